// The CUDA backend of the state update op.

#include "../cuda/launch.h"
#include "cuda_stream.h"
#include "op_namespace.h"
#include "update_ops.h"

namespace selective_scan::op {
namespace {

struct CudaBackend {
  static constexpr int64_t kMaxDstate = cuda::kMaxDstate;

  explicit CudaBackend(const Tensor& x) : stream(x) {}

  /// The kernel takes them for padding.
  void check_indices(const UpdateParams&) const {}
  void launch(const UpdateParams& params, const Tensor&) const {
    STD_CUDA_CHECK(cuda::update_states(params, stream));
  }

  CudaStream stream;
};

}  // namespace

SELECTIVE_SCAN_LIBRARY_IMPL(CUDA, m) {
  implement_update<CudaBackend>(m);
}

}  // namespace selective_scan::op
