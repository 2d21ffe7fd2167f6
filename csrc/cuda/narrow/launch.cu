// Launches of the narrow kernels.
#include "../kit/launch_tools.h"
#include "kernels.h"

namespace selective_scan::cuda::narrow {
namespace {

/// Calls visit with the plan's kernels. instantiations.py has no dense kernels for fp32, whose
/// elements are always aligned to 4 bytes, and no others for one state.
template <class Plan, class Visit>
cudaError_t with_kernels(const ScanParams& params, const Plan& plan, const Visit& visit) {
  return with_element_type(params.u.dtype, [&]<class Element>(Element*) {
    const bool has_two = plan.padded_states == 2;
    if constexpr (sizeof(Element) == 2) {
      if (plan.padded_states == 1) return visit(Kernels<Element, 1, true>());
      if (plan.rows.is_dense) {
        return has_two ? visit(Kernels<Element, 2, true>()) : visit(Kernels<Element, 8, true>());
      }
    }
    return has_two ? visit(Kernels<Element, 2, false>()) : visit(Kernels<Element, 8, false>());
  });
}

Sequence make_sequence(const ArrayView& view) {
  if (!view.present()) return {};
  const int64_t size = element_size(view.dtype);
  return {static_cast<char*>(view.data), view.batch * size, view.channel * size};
}

/// Fills in the arguments that both passes have in common.
template <class Args, class Params, class Plan>
Args make_args(const Params& params, const Plan& plan) {
  Args args{};
  args.params = params;
  args.rows = plan.rows;
  args.tiles = plan.tiles;
  args.inputs[Args::kU] = make_sequence(params.u);
  args.inputs[Args::kDelta] = make_sequence(params.delta);
  args.inputs[Args::kZ] = make_sequence(params.z);
  return args;
}

}  // namespace

cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void*, cudaStream_t stream) {
  auto args = make_args<ForwardArgs>(params, plan);
  args.results[args.kU] = make_sequence(params.out);
  return with_kernels(params, plan,
                      [&]<class Own>(Own) { return Own::forward(args, plan.shape, stream); });
}

cudaError_t run(const BackwardParams& params, const BackwardPlan& plan, void* memory,
                cudaStream_t stream) {
  auto args = make_args<BackwardArgs>(params, plan);
  args.inputs[args.kDout] = make_sequence(params.dout);
  args.results[args.kU] = make_sequence(params.du);
  args.results[args.kDelta] = make_sequence(params.ddelta);
  args.results[args.kZ] = make_sequence(params.dz);
  args.workspace = backward_workspace(plan.scratch, memory);
  const cudaError_t error = with_kernels(
      params, plan, [&]<class Own>(Own) { return Own::backward(args, plan.shape, stream); });
  if (error != cudaSuccess) return error;
  return add_gradients(params, args.workspace, {plan.tiles, params.batch, plan.padded_states},
                       stream);
}

}  // namespace selective_scan::cuda::narrow
