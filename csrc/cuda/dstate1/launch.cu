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

struct Launches {
  cudaError_t (*forward)(const ForwardArgs&, const LaunchShape&, cudaStream_t);
  cudaError_t (*backward)(const BackwardArgs&, const LaunchShape&, cudaStream_t);
};

template <class Storage, class Shape>
constexpr Launches kLaunches = {&Kernels<Storage, Shape>::forward,
                                &Kernels<Storage, Shape>::backward};

/// Returns the launches for a shape of windows; its storages are those of instantiations.py.
template <class Shape>
const Launches& launches_of(DType dtype, Rows rows) {
  if constexpr (Shape::kWarps == 1) {
    if (rows == Rows::kScattered) {
      return element_size(dtype) == 4 ? kLaunches<Scattered<4>, Shape>
                                      : kLaunches<Scattered<2>, Shape>;
    }
  }
  return *with_element_type(dtype, [&]<class Element>(Element*) {
    constexpr bool kHasHalves = sizeof(Element) == 2;
    if constexpr (kHasHalves && Shape::kChannels > 1) {
      if (rows == Rows::kDense) return &kLaunches<DenseRows<Element>, Shape>;
    }
    if constexpr (kHasHalves && std::is_same_v<Shape, LongWindow>) {
      if (rows == Rows::kHalfVectors) return &kLaunches<HalfVectors<Element>, Shape>;
    }
    return &kLaunches<Vectors<Element>, Shape>;
  });
}

template <class Plan>
const Launches& launches_for(const ScanParams& params, const Plan& plan) {
  return *visit_shape(plan.window_channels, plan.window_warps, [&]<class Shape>(Shape) {
    return &launches_of<Shape>(params.u.dtype, plan.rows);
  });
}

/// Returns arguments with the values that both passes take. `Rows` numbers the arrays.
template <class Args, class Rows, class Params>
Args make_args(const Params& params) {
  Args args{};
  args.params = params;
  args.strides = make_strides(params.u);
  args.inputs[Rows::kU] = make_sequence(params.u);
  args.inputs[Rows::kDelta] = make_sequence(params.delta);
  args.inputs[Rows::kZ] = make_sequence(params.z);
  return args;
}

}  // namespace

cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void*, cudaStream_t stream) {
  auto args = make_args<ForwardArgs, ForwardRows>(params);
  args.out = make_sequence(params.out);
  args.windows = plan.windows;
  args.work_items = plan.work_items;
  return launches_for(params, plan).forward(args, plan.shape, stream);
}

cudaError_t run(const BackwardParams& params, const BackwardPlan& plan, void* memory,
                cudaStream_t stream) {
  auto args = make_args<BackwardArgs, BackwardRows>(params);
  args.inputs[BackwardRows::kDout] = make_sequence(params.dout);
  args.gradients[BackwardRows::kU] = make_sequence(params.du);
  args.gradients[BackwardRows::kDelta] = make_sequence(params.ddelta);
  args.gradients[BackwardRows::kZ] = make_sequence(params.dz);
  args.warps = plan.warps;
  args.tiles = plan.tiles;
  args.work_items = plan.work_items;
  args.padded_states = plan.padded_states;
  args.workspace = backward_workspace(plan.scratch, memory);
  const auto launch = params.dstate == 1                  ? launches_for(params, plan).backward
                      : element_size(params.u.dtype) == 4 ? &States<4>::backward
                                                          : &States<2>::backward;
  const cudaError_t error = launch(args, plan.shape, stream);
  if (error != cudaSuccess) return error;
  return add_gradients(params, args.workspace, {plan.tiles, params.batch, plan.padded_states},
                       stream);
}

}  // namespace selective_scan::cuda::dstate1
