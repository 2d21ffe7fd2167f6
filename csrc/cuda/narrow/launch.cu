// Launches of the narrow kernels.
#include "../kit/launch_tools.h"
#include "kernels.h"

namespace selective_scan::cuda::narrow {
namespace {

struct Launches {
  cudaError_t (*forward)(const ForwardArgs&, const LaunchShape&, cudaStream_t);
  cudaError_t (*backward)(const BackwardArgs&, const LaunchShape&, cudaStream_t);
};

template <class Element, int kStates, bool kDense>
constexpr Launches kLaunches = {&Kernels<Element, kStates, kDense>::forward,
                                &Kernels<Element, kStates, kDense>::backward};

/// instantiations.py has no dense kernels for fp32, whose elements are always aligned to 4 bytes.
template <int kStates>
Launches launches_of_dense(DType dtype) {
  return dtype == DType::kBFloat16 ? kLaunches<BFloat16, kStates, true>
                                   : kLaunches<Half, kStates, true>;
}
template <int kStates>
Launches launches_of(DType dtype, bool is_dense) {
  if (is_dense) return launches_of_dense<kStates>(dtype);
  return with_element_type(
      dtype, []<class Element>(Element*) { return kLaunches<Element, kStates, false>; });
}
template <class Plan>
Launches launches_for(const ScanParams& params, const Plan& plan) {
  const DType dtype = params.u.dtype;
  switch (plan.padded_states) {
    case 1:
      return launches_of_dense<1>(dtype);
    case 2:
      return launches_of<2>(dtype, plan.rows.is_dense);
    default:
      return launches_of<8>(dtype, plan.rows.is_dense);
  }
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
  return launches_for(params, plan).forward(args, plan.shape, stream);
}

cudaError_t run(const BackwardParams& params, const BackwardPlan& plan, void* memory,
                cudaStream_t stream) {
  auto args = make_args<BackwardArgs>(params, plan);
  args.inputs[args.kDout] = make_sequence(params.dout);
  args.results[args.kU] = make_sequence(params.du);
  args.results[args.kDelta] = make_sequence(params.ddelta);
  args.results[args.kZ] = make_sequence(params.dz);
  args.workspace = backward_workspace(plan.scratch, memory);
  const cudaError_t error = launches_for(params, plan).backward(args, plan.shape, stream);
  if (error != cudaSuccess) return error;
  return add_gradients(params, args.workspace, {plan.tiles, params.batch, plan.padded_states},
                       stream);
}

}  // namespace selective_scan::cuda::narrow
