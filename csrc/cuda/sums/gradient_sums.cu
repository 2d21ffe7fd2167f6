#include "gradient_sums.h"

#include "sums.h"

namespace selective_scan::cuda {

cudaError_t add_gradients(const BackwardParams& params, const BackwardWorkspace& workspace,
                          const GradientParts& parts, cudaStream_t stream) {
  Sums sums;
  sums.is_complex = params.is_complex;
  sums.is_double = params.is_double;
  if (workspace.dBC_partials != nullptr) {
    const auto wanted = [](bool is_variable, const ArrayView& view) {
      return is_variable ? view : ArrayView{};
    };
    sums.projections = {workspace.dBC_partials,
                        parts.tiles,
                        parts.padded_states / parts.slices,
                        params.batch,
                        params.groups,
                        params.seqlen,
                        params.dstate,
                        wanted(params.variable_B, params.dB),
                        wanted(params.variable_C, params.dC),
                        parts.chunks};
  }
  const auto add_states = [&](const void* data, const ArrayView& target) {
    if (data == nullptr) return;
    sums.parameters.add({data, false, parts.rows, params.dim * parts.padded_states,
                         parts.padded_states, 1, params.dim, params.dstate, target, target.channel,
                         target.state});
  };
  const auto add_channels = [&](const void* data, const ArrayView& target) {
    if (data == nullptr) return;
    sums.parameters.add({data, true, parts.rows, params.dim * parts.channel_parts,
                         parts.channel_parts, parts.channel_parts, params.dim, 1, target,
                         target.channel, 0});
  };
  add_states(workspace.dA, params.dA);
  add_states(workspace.dB, params.dB);
  add_states(workspace.dC, params.dC);
  add_channels(workspace.dD, params.dD);
  add_channels(workspace.ddelta_bias, params.ddelta_bias);
  return add_up(sums, stream);
}

}  // namespace selective_scan::cuda
