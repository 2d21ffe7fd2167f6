// Launches of the dstate 1 kernels.
#include <cstdlib>

#include "../kit/launch_tools.h"
#include "kernels.h"
#include "plan.h"

namespace selective_scan::cuda::dstate1 {
namespace {

Sequence make_sequence(const ArrayView& view) {
  if (!view.present()) return {};
  return {static_cast<char*>(view.data), view.batch * element_size(view.dtype)};
}

SequenceStrides make_strides(const ArrayView& view) {
  const int64_t size = element_size(view.dtype);
  return {view.dtype, view.channel * size, static_cast<int>(view.step * size),
          std::abs(view.channel) < std::abs(view.step)};
}

/// Calls visit with the plan's kernels; the storages of a shape of windows are those of
/// instantiations.py.
template <class Plan, class Visit>
cudaError_t with_kernels(const ScanParams& params, const Plan& plan, const Visit& visit) {
  const DType dtype = params.u.dtype;
  return visit_shape(plan.window_channels, plan.window_warps, [&]<class Shape>(Shape) {
    if constexpr (Shape::kWarps == 1) {
      if (plan.rows == Rows::kScattered) {
        return element_size(dtype) == 4 ? visit(Kernels<Scattered<4>, Shape>())
                                        : visit(Kernels<Scattered<2>, Shape>());
      }
    }
    return with_element_type(dtype, [&]<class Element>(Element*) {
      constexpr bool kHasHalves = sizeof(Element) == 2;
      if constexpr (kHasHalves && Shape::kChannels > 1) {
        if (plan.rows == Rows::kDense) return visit(Kernels<DenseRows<Element>, Shape>());
      }
      if constexpr (kHasHalves && std::is_same_v<Shape, LongWindow>) {
        if (plan.rows == Rows::kHalfVectors) return visit(Kernels<HalfVectors<Element>, Shape>());
      }
      return visit(Kernels<Vectors<Element>, Shape>());
    });
  });
}

/// Fills in the parameters and the arrays with steps, each by `make`. `Rows` numbers the arrays.
template <class Rows, class Args, class Params, class Make>
void set_arrays(const Params& params, const Make& make, Args& args) {
  args.params = params;
  args.inputs[Rows::kU] = make(params.u);
  args.inputs[Rows::kDelta] = make(params.delta);
  args.inputs[Rows::kZ] = make(params.z);
  if constexpr (std::is_same_v<Params, BackwardParams>) {
    args.inputs[Rows::kDout] = make(params.dout);
    args.gradients[Rows::kU] = make(params.du);
    args.gradients[Rows::kDelta] = make(params.ddelta);
    args.gradients[Rows::kZ] = make(params.dz);
  } else {
    args.out = make(params.out);
  }
}

cudaError_t run_one_state(const BackwardParams& params, const BackwardPlan& plan,
                          const BackwardWorkspace& workspace, cudaStream_t stream) {
  BackwardArgs args{};
  set_arrays<BackwardRows>(params, make_sequence, args);
  args.strides = make_strides(params.u);
  args.warps = plan.warps;
  args.tiles = plan.tiles;
  args.workspace = workspace;
  return with_kernels(params, plan,
                      [&]<class Own>(Own) { return Own::backward(args, plan.shape, stream); });
}

cudaError_t run_states(const BackwardParams& params, const BackwardPlan& plan,
                       const BackwardWorkspace& workspace, cudaStream_t stream) {
  const auto make_strided = [](const ArrayView& view) {
    return StridedSequence{make_sequence(view), make_strides(view)};
  };
  StatesArgs args{};
  set_arrays<BackwardRows>(params, make_strided, args);
  args.tile_channels = plan.warps / plan.window_warps;
  args.tiles = plan.tiles;
  args.padded_states = plan.padded_states;
  args.workspace = workspace;
  return element_size(params.u.dtype) == 4 ? States<4>::backward(args, plan.shape, stream)
                                           : States<2>::backward(args, plan.shape, stream);
}

}  // namespace

cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void*, cudaStream_t stream) {
  ForwardArgs args{};
  set_arrays<ForwardRows>(params, make_sequence, args);
  args.strides = make_strides(params.u);
  args.windows = plan.windows;
  args.work_items = plan.work_items;
  return with_kernels(params, plan,
                      [&]<class Own>(Own) { return Own::forward(args, plan.shape, stream); });
}

cudaError_t run(const BackwardParams& params, const BackwardPlan& plan, void* memory,
                cudaStream_t stream) {
  const BackwardWorkspace workspace = backward_workspace(plan.scratch, memory);
  const cudaError_t error = params.dstate == 1 ? run_one_state(params, plan, workspace, stream)
                                               : run_states(params, plan, workspace, stream);
  if (error != cudaSuccess) return error;
  return add_gradients(params, workspace, {plan.tiles, params.batch, plan.padded_states}, stream);
}

}  // namespace selective_scan::cuda::dstate1
