// Launches of the floor's kernels.
#include <type_traits>

#include "../kit/launch_tools.h"
#include "kernels.h"
#include "plan.h"

namespace selective_scan::cuda::floor {
namespace {

/// Enqueues a pass with states of type T, except for the sums of its gradients.
template <class T, class Params>
cudaError_t scan_as(Args<Params>& args, const LaunchShape& shape, const StateExchange* exchange,
                    cudaStream_t stream) {
  constexpr bool kIsBackward = std::is_same_v<Params, BackwardParams>;
  Params& params = args.params;
  const SegmentStates& segments = args.workspace.segments;
  if (segments.factors == nullptr) return Scan<T>::launch(args, shape, stream);

  const int dstate = static_cast<int>(params.dstate);
  const Geometry& geometry = args.geometry;
  args.is_summary = true;
  cudaError_t error = Scan<T>::launch(args, shape, stream);
  if (error != cudaSuccess) return error;
  args.is_summary = false;
  const auto store = [&](const ArrayView& factor, const ArrayView& offset) {
    return Summaries<T>::store_map(params, factor, offset, geometry.segments, dstate, kIsBackward,
                                   segments, stream);
  };
  const auto finish = [&](const ArrayView& entering) {
    error =
        Summaries<T>::combine(params, entering, geometry, dstate, kIsBackward, segments, stream);
    return error == cudaSuccess ? Scan<T>::launch(args, shape, stream) : error;
  };
  if (exchange != nullptr) {
    error = exchange_states<T>(*exchange, params, geometry.segments, dstate, segments, stream);
    if (error != cudaSuccess) return error;
  }
  if constexpr (kIsBackward) {
    if (wants_summary_alone(params)) return store({}, params.dinitial_state);
    return finish(params.dlast_state);
  } else {
    if (wants_summary_alone(params)) return store(params.map_factor, params.last_state);
    return finish(params.initial_state);
  }
}

template <class Params>
cudaError_t scan(Args<Params> args, const LaunchShape& shape, const StateExchange* exchange,
                 cudaStream_t stream) {
  return with_state_type(args.params,
                         [&]<class T>(T*) { return scan_as<T>(args, shape, exchange, stream); });
}

}  // namespace

cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void* memory,
                cudaStream_t stream, const StateExchange* exchange) {
  Args<ForwardParams> args{{plan.geometry, plan.layout, {}}, params};
  args.workspace.segments = segment_states(plan.scratch, memory);
  return scan(args, plan.shape, exchange, stream);
}

cudaError_t run(const BackwardParams& params, const BackwardPlan& plan, void* memory,
                cudaStream_t stream, const StateExchange* exchange) {
  const BackwardWorkspace workspace = backward_workspace(plan.scratch, memory);
  const Args<BackwardParams> args{{plan.geometry, plan.layout, workspace}, params};
  const cudaError_t error = scan(args, plan.shape, exchange, stream);
  if (error != cudaSuccess || wants_summary_alone(params)) return error;
  const Geometry& geometry = plan.geometry;
  GradientParts parts{geometry.sums_per_group, geometry.segments * params.batch};
  parts.padded_states = geometry.padded_states(num_slices(params, geometry));
  parts.channel_parts = geometry.lanes();
  return add_gradients(params, workspace, parts, stream);
}

}  // namespace selective_scan::cuda::floor
