// Launches of the prompt kernels.
#include "../kit/launch_tools.h"
#include "kernels.h"
#include "plan.h"

namespace selective_scan::cuda::prompt {
namespace {

PromptArgs make_args(const ForwardParams& params, const ForwardPlan& plan) {
  const auto size = static_cast<int>(element_size(params.u.dtype));
  const auto bytes = [&](int64_t stride) { return static_cast<int>(stride * size); };
  const bool along_steps = is_along_steps(plan.along);
  const auto rows = [&](const ArrayView& view) -> PromptArgs::Rows {
    if (!view.present()) return {};
    return {static_cast<char*>(view.data), view.batch * size,
            bytes(along_steps ? view.channel : view.step)};
  };
  const auto projection = [&](const ArrayView& view) -> PromptArgs::Projection {
    return {static_cast<char*>(view.data), view.batch * size, bytes(view.group),
            bytes(along_steps ? view.state : view.step)};
  };
  PromptArgs args;
  args.u = rows(params.u);
  args.delta = rows(params.delta);
  args.z = rows(params.z);
  args.out = rows(params.out);
  args.B = projection(params.B);
  args.C = projection(params.C);
  args.A = params.A;
  args.D = params.D;
  args.delta_bias = params.delta_bias;
  args.initial_state = params.initial_state;
  args.last_state = params.last_state;
  args.states = static_cast<float*>(params.states);
  args.dstate = static_cast<int>(params.dstate);
  args.seqlen = static_cast<int>(params.seqlen);
  args.dim = static_cast<int>(params.dim);
  args.group_channels = static_cast<int>(params.dim / params.groups);
  args.scanners = plan.scanners;
  args.has_output = params.wanted == ForwardWanted::kOutput;
  args.delta_softplus = params.delta_softplus;
  return args;
}

using Launch = cudaError_t (*)(const PromptArgs&, const LaunchShape&, cudaStream_t);

template <class Element>
Launch launch_for(const ForwardPlan& plan) {
  using enum Along;
  if (plan.along == kElements) return &PromptForward<Element, 1, kElements>::launch;
  if constexpr (sizeof(Element) == 2) {
    if (plan.along == kFourSteps) return &PromptForward<Element, 1, kFourSteps>::launch;
  }
  if (plan.lane_states == 1) {
    return plan.along == kSteps ? &PromptForward<Element, 1, kSteps>::launch
                                : &PromptForward<Element, 1, kChannels>::launch;
  }
  return plan.along == kSteps ? &PromptForward<Element, 2, kSteps>::launch
                              : &PromptForward<Element, 2, kChannels>::launch;
}

}  // namespace

cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void* /*memory*/,
                cudaStream_t stream) {
  return with_element_type(params.u.dtype, [&]<class Element>(Element*) {
    return launch_for<Element>(plan)(make_args(params, plan), plan.shape, stream);
  });
}

}  // namespace selective_scan::cuda::prompt
