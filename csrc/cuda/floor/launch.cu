// Launches of the floor's kernels.
#include "../kit/launch_tools.h"
#include "kernels.h"
#include "plan.h"

namespace selective_scan::cuda::floor {
namespace {

/// Enqueues a pass, except for the sums of its gradients.
template <class Params>
cudaError_t scan(Args<Params> args, const LaunchShape& shape, const StateExchange* exchange,
                 cudaStream_t stream) {
  return with_state_type(args.params, [&]<class T>(T*) {
    const auto launch = [&] { return Scan<T>::launch(args, shape, stream); };
    const SegmentStates& segments = args.workspace.segments;
    if (segments.factors == nullptr) return launch();
    const auto summarize = [&] {
      args.is_summary = true;
      const cudaError_t error = launch();
      args.is_summary = false;
      return error;
    };
    return run_in_segments(args.params, args.geometry.segments,
                           static_cast<int>(args.params.dstate), segments, exchange, stream,
                           summarize, launch);
  });
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
