// The CUDA backend of the op of chunked prefill.

#include "../cuda/launch.h"
#include "cuda_stream.h"
#include "op_namespace.h"
#include "prefill_ops.h"

namespace selective_scan::op {
namespace {

struct CudaBackend {
  static constexpr int64_t kMaxDstate = cuda::kMaxDstate;
  static constexpr bool kSavesStates = true;

  explicit CudaBackend(const Tensor& u) : stream(u) {}

  void check(const PrefillParams&) const {}  // the kernels do no harm whatever the values are
  void launch(const PrefillParams& params, const cuda::ScratchMemory& memory) const {
    STD_CUDA_CHECK(cuda::scan_prefill(params, memory, stream));
  }

  CudaStream stream;
};

}  // namespace

SELECTIVE_SCAN_LIBRARY_IMPL(CUDA, m) {
  implement_prefill<CudaBackend>(m);
}

}  // namespace selective_scan::op
