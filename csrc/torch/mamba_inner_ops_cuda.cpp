// The CUDA backend of the ops of a Mamba layer.

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include <algorithm>

#include "../cuda/launch.h"
#include "cuda_stream.h"
#include "mamba_inner.h"
#include "op_namespace.h"

namespace selective_scan::op {
namespace {

Conversion conversion_of(const Cast& cast) {
  return {cast.source.const_data_ptr(),
          nullptr,
          cast.target.mutable_data_ptr(),
          cast.source.numel(),
          component_dtype(cast.source),
          component_dtype(cast.target),
          cast.negates_exp ? Conversion::Map::kNegativeExp : Conversion::Map::kIdentity};
}

void cast(const std::vector<Cast>& casts) {
  const CudaStream stream(casts.front().target);
  for (size_t first = 0; first < casts.size(); first += Conversions::kMost) {
    Conversions some;
    some.count = static_cast<int>(std::min<size_t>(casts.size() - first, Conversions::kMost));
    std::transform(casts.begin() + first, casts.begin() + first + some.count, some.items,
                   conversion_of);
    STD_CUDA_CHECK(cuda::convert(some, stream));
  }
}

Tensor sum(const Tensor& residual, const Tensor& product) {
  const Tensor result = allocate_like(residual);
  Conversions one;
  one.count = 1;
  one.items[0] = conversion_of({product, result});
  one.items[0].addend = residual.const_data_ptr();
  const CudaStream stream(result);
  STD_CUDA_CHECK(cuda::convert(one, stream));
  return result;
}

constexpr LayerOps kLayerOps{
    kCudaScanOps, kCudaConvOps, &aoti_torch_cuda_mm_out, &aoti_torch_cuda_addmm_out, true,
    &cast,        &sum};

}  // namespace

SELECTIVE_SCAN_LIBRARY_IMPL(CUDA, m) {
  implement_mamba_inner<kLayerOps>(m);
}

}  // namespace selective_scan::op
