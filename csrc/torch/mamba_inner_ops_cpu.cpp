// Schemas of the ops of a Mamba layer, and their CPU backend.

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <string>

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

SELECTIVE_SCAN_LIBRARY_FRAGMENT(m) {
  const std::string arguments =
      "Tensor xz, Tensor? in_proj_weight, Tensor? in_proj_bias, Tensor conv1d_weight, "
      "Tensor? conv1d_bias, Tensor x_proj_weight, Tensor delta_proj_weight, "
      "Tensor? out_proj_weight, Tensor? out_proj_bias, Tensor A, Tensor? A_b, Tensor? D, "
      "Tensor? delta_bias, bool delta_softplus, int checkpoint_lvl, str discretization_method, "
      "bool bidirectional, bool reverse, Tensor? cu_seqlens, ScalarType? autocast_dtype";
  const std::string kept =
      "Tensor? xz_rows, Tensor? poles, Tensor? x_dbl, Tensor? y, Tensor? u, Tensor? steps, "
      "Tensor? states, Tensor? second_states";
  const auto define = [&](const std::string& name, const std::string& group,
                          const std::string& of_ranks) {
    define_forward(m, name + "_fwd",
                   arguments + ", Tensor? residual" + group + ", bool save_states",
                   "Tensor out, Tensor? input, " + kept + of_ranks);
    for (const auto& [suffix, room] : {std::pair("_bwd", ""), {"_bwd_over", ", Tensor(a!) room"}}) {
      const std::string schema =
          name + suffix + "(Tensor dout, " + arguments + group + ", " + kept + of_ranks +
          ", ScalarType xz_dtype" + room +
          ") -> (Tensor dxz, Tensor din_proj_weight, Tensor din_proj_bias, Tensor dconv1d_weight, "
          "Tensor dconv1d_bias, Tensor dx_proj_weight, Tensor ddelta_proj_weight, Tensor "
          "dout_proj_weight, Tensor dout_proj_bias, Tensor dA, Tensor dA_b, Tensor dD, Tensor "
          "ddelta_bias)";
      m.def(schema.c_str());
    }
  };
  define("mamba_inner", "", "");
  define("mamba_inner_of_ranks", ", str group",
         ", Tensor? before, Tensor? counts, Tensor? entering, Tensor? factors, "
         "Tensor? second_entering, Tensor? second_factors");
}

SELECTIVE_SCAN_LIBRARY_IMPL(CPU, m) {
  implement_mamba_inner<kLayerOps>(m);
}

}  // namespace selective_scan::op
