// Launches of the general kernels.
#include "../../core/method_table.h"
#include "../plan/segments.h"
#include "kernels.h"

namespace selective_scan::cuda::general {
namespace {

struct Launches {
  cudaError_t (*forward)(const ForwardArgs&, const LaunchShape&, cudaStream_t);
  cudaError_t (*backward)(const BackwardArgs&, const LaunchShape&, cudaStream_t);
};

/// An instantiation for all methods, and what else is done with states of its type.
struct Variant {
  MethodTable<Launches> launches;
  decltype(&combine_segments<float>) combine;
  decltype(&store_map<float>) store_map;
  decltype(&copy_state_gradient<float>) copy_state_gradient;
  decltype(&reduce_gradients<float>) reduce;
};

template <class T, int kStates>
const Variant& variant() {
  static constexpr Variant kInstance{make_kernel_table<Launches>([&]<Method kMethod>() {
                                       using Instance = Scan<T, kStates, kMethod>;
                                       return Launches{&Instance::forward, &Instance::backward};
                                     }),
                                     &combine_segments<T>, &store_map<T>, &copy_state_gradient<T>,
                                     &reduce_gradients<T>};
  return kInstance;
}

/// See instantiations.py.
const Variant& variant_of(const ScanParams& params) {
  if (params.is_complex && params.is_double) return variant<Complex<double>, 1>();
  if (params.is_complex) return variant<Complex<float>, 2>();
  if (params.is_double) return variant<double, 2>();
  return variant<float, 4>();
}

}  // namespace

cudaError_t run(const ForwardParams& params, const GeneralForwardPlan& plan, void* memory,
                cudaStream_t stream) {
  const Variant& variant = variant_of(params);
  const auto launch = variant.launches[params.method].forward;
  const Geometry& geometry = plan.geometry;
  const SegmentStates segments = segment_states(plan.scratch, memory);
  ForwardArgs args{params,
                   geometry,
                   plan.layout,
                   make_input_plans(params, geometry),
                   make_row_plan(params.out, params, geometry),
                   Mode::kWhole,
                   segments};
  if (geometry.segments == 1) return launch(args, plan.shape, stream);

  args.mode = Mode::kSummarize;  // of all segments but the last
  args.geometry.work_items = geometry.work_items / geometry.segments * (geometry.segments - 1);
  LaunchShape summary_shape = plan.shape;
  summary_shape.blocks = args.geometry.work_items;
  cudaError_t error = launch(args, summary_shape, stream);
  if (error != cudaSuccess) return error;
  const int padded_states = geometry.padded_states(plan.sizes.states);
  error = variant.combine(params, params.initial_state, geometry, padded_states, false, segments,
                          stream);
  if (error != cudaSuccess) return error;
  if (params.wants_map_alone()) {
    return variant.store_map(params, geometry.segments, padded_states, segments, stream);
  }
  args.mode = Mode::kResume;
  args.geometry.work_items = geometry.work_items;
  return launch(args, plan.shape, stream);
}

cudaError_t run(const BackwardParams& params, const GeneralBackwardPlan& plan, void* memory,
                cudaStream_t stream) {
  const Variant& variant = variant_of(params);
  const auto launch = variant.launches[params.method].backward;
  const Geometry& geometry = plan.geometry;
  const int padded_states = geometry.padded_states(plan.sizes.states);
  BackwardWorkspace workspace = backward_workspace(plan.scratch, memory);
  workspace.channel_parts = geometry.state_warps;
  const bool wants_state_alone = params.wants_state_alone();
  const BackwardParams steps = wants_state_alone ? behind_front_segment(params, geometry) : params;
  BackwardArgs args{steps,
                    geometry,
                    plan.layout,
                    make_input_plans(steps, geometry),
                    make_row_plan(steps.dout, params, geometry),
                    make_row_plan(params.du, params, geometry),
                    make_row_plan(params.ddelta, params, geometry),
                    make_row_plan(params.dz, params, geometry),
                    Mode::kWhole,
                    workspace};
  if (geometry.segments > 1) {
    args.mode = Mode::kSummarize;
    cudaError_t error = launch(args, plan.shape, stream);
    if (error != cudaSuccess) return error;
    error = variant.combine(params, params.dlast_state, geometry, padded_states, true,
                            workspace.segments, stream);
    if (error != cudaSuccess) return error;
    if (wants_state_alone) {
      return variant.copy_state_gradient(params, padded_states, workspace.segments, stream);
    }
    args.mode = Mode::kResume;
  }
  const cudaError_t error = launch(args, plan.shape, stream);
  if (error != cudaSuccess) return error;
  return variant.reduce(params, geometry, padded_states, workspace, stream);
}

}  // namespace selective_scan::cuda::general
