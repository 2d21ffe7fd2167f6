// The CPU backend of the ops of a Mamba layer.

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include "dispatcher.h"
#include "mamba_inner.h"
#include "op_namespace.h"

namespace selective_scan::op {
namespace {

void cast(const std::vector<Cast>& casts) {
  for (const Cast& it : casts) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(it.target.get(), it.source.get(), 0));
    if (it.negates_exp) call("aten::neg_", "", call("aten::exp_", "", it.target));
  }
}

Tensor sum(const Tensor& residual, const Tensor& product) {
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_add_Tensor(residual.get(), product.get(), 1.0, &handle));
  return Tensor(handle);
}

constexpr LayerOps kLayerOps{
    kCpuScanOps, kCpuConvOps, &aoti_torch_cpu_mm_out, &aoti_torch_cpu_addmm_out, false,
    &cast,       &sum};

}  // namespace

SELECTIVE_SCAN_LIBRARY_IMPL(CPU, m) {
  implement_mamba_inner<kLayerOps>(m);
}

}  // namespace selective_scan::op
