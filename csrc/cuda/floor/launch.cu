// Launches of the floor's kernels.
#include <type_traits>

#include "../../core/method_table.h"
#include "../kit/launch_tools.h"
#include "kernels.h"
#include "plan.h"

namespace selective_scan::cuda::floor {
namespace {

/// Enqueues a pass with states of type T, but for the sums of its gradients. Where what leaves all
/// steps is wanted alone, it enters an empty segment: behind them or, backwards, in front of them.
template <class T, class Params>
cudaError_t scan_as(Args<Params>& args, const LaunchShape& shape, const ArrayView& entering,
                    bool is_alone, cudaStream_t stream) {
  constexpr bool kIsBackward = std::is_same_v<Params, BackwardParams>;
  using Launcher = cudaError_t (*)(const Args<Params>&, const LaunchShape&, cudaStream_t);
  static constexpr auto kLaunchers = make_kernel_table<Launcher>(
      [&]<Method kMethod>() -> Launcher { return &Scan<T, kMethod>::launch; });
  const Params& params = args.params;
  const Launcher launch = kLaunchers[params.method];
  const SegmentStates all = args.workspace.segments;
  if (all.factors == nullptr) return launch(args, shape, stream);

  const int dstate = static_cast<int>(params.dstate);
  const int64_t front = kIsBackward && is_alone ? params.batch * params.dim * dstate : 0;
  args.workspace.segments = {static_cast<T*>(all.factors) + front,
                             static_cast<T*>(all.offsets) + front};
  args.is_summary = true;
  cudaError_t error = launch(args, shape, stream);
  if (error != cudaSuccess) return error;
  args.is_summary = false;
  Geometry geometry = args.geometry;
  geometry.segments += is_alone ? 1 : 0;
  error = combine_segments<T>(params, entering, geometry, dstate, kIsBackward, all, stream);
  if (error != cudaSuccess) return error;
  if (!is_alone) return launch(args, shape, stream);
  if constexpr (kIsBackward)
    return copy_state_gradient<T>(params, dstate, all, stream);
  else
    return store_map<T>(params, geometry.segments, dstate, all, stream);
}

template <class Params>
cudaError_t scan(Args<Params> args, const LaunchShape& shape, const ArrayView& entering,
                 bool is_alone, cudaStream_t stream) {
  return with_state_type(args.params, [&]<class T>(T*) {
    return scan_as<T>(args, shape, entering, is_alone, stream);
  });
}

}  // namespace

cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void* memory,
                cudaStream_t stream) {
  Args<ForwardParams> args{{plan.geometry, plan.layout, {}}, params};
  args.workspace.segments = segment_states(plan.scratch, memory);
  const bool is_alone = params.wanted == ForwardWanted::kMapAlone;
  return scan(args, plan.shape, params.initial_state, is_alone, stream);
}

cudaError_t run(const BackwardParams& params, const BackwardPlan& plan, void* memory,
                cudaStream_t stream) {
  const BackwardWorkspace workspace = backward_workspace(plan.scratch, memory);
  const Args<BackwardParams> args{{plan.geometry, plan.layout, workspace}, params};
  const bool is_alone = params.wanted == BackwardWanted::kStateAlone;
  const cudaError_t error = scan(args, plan.shape, params.dlast_state, is_alone, stream);
  if (error != cudaSuccess || is_alone) return error;
  const Geometry& geometry = plan.geometry;
  GradientParts parts{geometry.sums_per_group, geometry.segments * params.batch};
  parts.padded_states = geometry.padded_states(num_slices(params, geometry));
  parts.channel_parts = geometry.lanes();
  return add_gradients(params, workspace, parts, stream);
}

}  // namespace selective_scan::cuda::floor
