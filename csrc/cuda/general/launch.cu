// Launches of the general kernels.
#include "../../core/method_table.h"
#include "../kit/launch_tools.h"
#include "kernels.h"

namespace selective_scan::cuda::general {
namespace {

struct Launches {
  cudaError_t (*forward)(const ForwardParams&, const GeneralForwardPlan&, const SegmentStates&,
                         cudaStream_t);
  cudaError_t (*backward)(const BackwardParams&, const GeneralBackwardPlan&,
                          const BackwardWorkspace&, cudaStream_t);
};

/// An instantiation for all methods.
struct Variant {
  MethodTable<Launches> launches;
  cudaError_t (*reduce)(const BackwardParams&, const Geometry&, int, const BackwardWorkspace&,
                        cudaStream_t);
};

template <class T, int kStates, int kLaneBits = kAnyLanes, BCSource kSource = BCSource::kStaged>
const Variant& variant() {
  static constexpr Variant kInstance{make_kernel_table<Launches>([&]<Method kMethod>() {
                                       using Instance =
                                           Scan<T, kStates, kLaneBits, kMethod, kSource>;
                                       return Launches{&Instance::forward, &Instance::backward};
                                     }),
                                     &reduce_gradients<T>};
  return kInstance;
}

/// See instantiations.py.
template <class Plan>
const Variant& variant_of(const ScanParams& params, const Plan& plan) {
  if (plan.source == BCSource::kOwn) return variant<float, 4, 2, BCSource::kOwn>();
  if (params.is_complex && params.is_double) return variant<Complex<double>, 1>();
  if (params.is_complex) return variant<Complex<float>, 2>();
  if (params.is_double) return variant<double, 2>();
  if (plan.fixed_lanes == 0) return variant<float, 1, 0>();
  if (plan.fixed_lanes == 2) return variant<float, 4, 2>();
  return variant<float, 4>();
}

}  // namespace

cudaError_t run(const ForwardParams& call, const GeneralForwardPlan& plan, void* memory,
                cudaStream_t stream) {
  const ForwardParams params = in_tiles(call, plan.source);
  const Variant& variant = variant_of(params, plan);
  return variant.launches[params.method].forward(params, plan, segment_states(plan.scratch, memory),
                                                 stream);
}

cudaError_t run(const BackwardParams& call, const GeneralBackwardPlan& plan, void* memory,
                cudaStream_t stream) {
  const BackwardParams params = in_tiles(call, plan.source);
  const Variant& variant = variant_of(params, plan);
  BackwardWorkspace workspace = backward_workspace(plan.scratch, memory);
  workspace.channel_parts = plan.geometry.state_warps;
  const cudaError_t error =
      variant.launches[params.method].backward(params, plan, workspace, stream);
  if (error != cudaSuccess || params.wants_state_alone()) return error;
  return variant.reduce(params, plan.geometry, plan.geometry.padded_states(plan.sizes.states),
                        workspace, stream);
}

}  // namespace selective_scan::cuda::general
