// What each path says of a call: its plan, or why it cannot run it. Which of the plans is the best,
// plan.cpp decides.
#pragma once

#include "plan.h"

namespace selective_scan::cuda {

/// Why a path cannot run a call. Costs nothing until somebody asks for the words.
struct Refusal {
  const char* reason = nullptr;  // null: it can
  int64_t got = -1;              // what the call has instead, if that is a number

  explicit operator bool() const { return reason != nullptr; }
};

/// Of a path that has no kernels for the gradient of the initial state alone.
constexpr Refusal kNotStateAlone{"gradients other than the initial state's must be wanted"};

/// Of a path that has no kernels for the map of all steps alone.
constexpr Refusal kNotMapAlone{"out or states must be wanted"};

/// Shorter sequences are too short for the relay's blocks of four states a lane, where a
/// multiprocessor has one, two or three of them.
constexpr int64_t kFewestRelaySteps[] = {72, 200, 900};

/// How many warps a multiprocessor has if every channel has one place, at whatever time.
inline double warps_per_multiprocessor(const ScanParams& params, int warp_channels,
                                       const Device& device) {
  const int64_t warps =
      params.batch * params.groups * ceil_div(params.dim / params.groups, warp_channels);
  return static_cast<double>(warps) / device.multiprocessors;
}

// Each makes the plan, or has done nothing of use where it refuses.
Refusal plan_general(const ForwardParams& params, const Device& device, GeneralForwardPlan& plan);
Refusal plan_general(const BackwardParams& params, const Device& device, GeneralBackwardPlan& plan);
Refusal plan_dstate1(const ForwardParams& params, const Device& device, Dstate1ForwardPlan& plan);
Refusal plan_dstate1(const BackwardParams& params, const Device& device, Dstate1BackwardPlan& plan);
Refusal plan_relay(const ForwardParams& params, const Device& device, RelayForwardPlan& plan);
Refusal plan_relay(const BackwardParams& params, const Device& device, RelayBackwardPlan& plan);
Refusal plan_streamed(const ForwardParams& params, const Device& device, StreamedForwardPlan& plan);
Refusal plan_streamed(const BackwardParams& params, const Device& device,
                      StreamedBackwardPlan& plan);

/// Whether the streamed kernels for the rows' type, if they take the call, sum the gradients of B
/// and C with as many digits as these have.
bool streamed_sums_have_digits(const BackwardParams& params);

}  // namespace selective_scan::cuda
