// The CUDA backend of the adaptive unitary scan ops.

#include "../cuda/launch.h"
#include "cuda_stream.h"
#include "op_namespace.h"
#include "unitary_ops.h"

namespace selective_scan::op {
namespace {

struct CudaBackend {
  static constexpr int64_t kMaxDstate = cuda::kMaxUnitaryDstate;
  /// Large enough for the matrix product and the scan to run at full speed.
  static constexpr int64_t kThetaBytes = int64_t{256} << 20;
  static constexpr int64_t kLanes = 1;
  static constexpr bool kChannelsLast = false;

  explicit CudaBackend(const Tensor& u) : stream(u) {}

  void launch(const UnitaryForwardParams& params) const {
    STD_CUDA_CHECK(cuda::unitary_scan_forward(params, stream));
  }
  void launch(const UnitaryBackwardParams& params) const {
    STD_CUDA_CHECK(cuda::unitary_scan_backward(params, stream));
  }

  CudaStream stream;
};

}  // namespace

SELECTIVE_SCAN_LIBRARY_IMPL(CUDA, m) {
  implement_unitary_scan<CudaBackend>(m);
}

}  // namespace selective_scan::op
