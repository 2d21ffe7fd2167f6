// The CUDA backend of the ops of a plain Mamba layer.

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "mamba_inner.h"

namespace selective_scan::op {
namespace {

constexpr LayerOps kLayerOps{kCudaScanOps, kCudaConvOps, &aoti_torch_cuda_mm_out,
                             &aoti_torch_cuda_addmm_out};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(selective_scan, CUDA, m) {
  m.impl("plain_mamba_inner_fwd", TORCH_BOX(&plain_mamba_inner_fwd<kLayerOps>));
  m.impl("plain_mamba_inner_bwd", TORCH_BOX(&plain_mamba_inner_bwd<kLayerOps>));
}

}  // namespace selective_scan::op
