// The rules that choose a call's path, and nothing else.
//
// The first path of prompt, narrow, dstate1 and streamed that can run the call and is preferred
// takes it, else the floor. With several states dstate1 comes before narrow. figures.h has the
// numbers.

#include "plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "figures.h"

namespace selective_scan::cuda {
namespace {

// --- the rules ---

using Choice = Figures::Choice;
const Choice& choice_of(const Device& device) {
  return figures_of(device).choice;
}

/// dstate1 cannot cut time into segments. Without them, few channels with long sequences leave most
/// of the device idle. Of calls with several states it takes short ones whose blocks all run at the
/// same time.
template <class Scratch>
bool is_preferred(const ScanParams& params, const Device& device,
                  const dstate1::Plan<Scratch>& plan) {
  const Choice& figures = choice_of(device);
  if (params.dstate > 1) {
    return params.seqlen * plan.window_warps <= figures.dstate1_states_steps &&
           plan.work_items <= device.multiprocessors;
  }
  return params.seqlen <= figures.dstate1_most_steps * plan.window_warps ||
         params.batch * params.dim >= figures.dstate1_rows;
}

/// narrow's lanes have a channel each, so it takes calls with enough channels to keep a
/// multiprocessor busy. With one state, dstate1 is faster unless short rows are not aligned.
template <class Plan>
bool is_narrow(const ScanParams& params, const Device& device, const Plan& plan) {
  const Choice& figures = choice_of(device);
  return plan.shape.blocks >= figures.narrow_warps * device.multiprocessors &&
         (params.dstate > 1 || plan.rows.is_dense);
}
bool is_preferred(const ForwardParams& params, const Device& device,
                  const narrow::ForwardPlan& plan) {
  return is_narrow(params, device, plan);
}
/// Backward, narrow also takes fewer channels if a lane has few updates: streamed pads the states.
bool is_preferred(const BackwardParams& params, const Device& device,
                  const narrow::BackwardPlan& plan) {
  const int64_t lane_updates = params.seqlen * plan.padded_states * plan.warp_channels / kWarpSize;
  return is_narrow(params, device, plan) ||
         (params.dstate > 1 && lane_updates <= choice_of(device).narrow_lane_updates);
}

/// prompt's lanes walk through the whole sequence, so it takes calls that fit the device in one
/// wave. But few channels with a long sequence finish sooner in segments, and one state runs faster
/// on dstate1.
bool is_preferred(const ForwardParams& params, const Device& device,
                  const prompt::ForwardPlan& plan) {
  const Choice& figures = choice_of(device);
  const int64_t channels = ceil_div(params.batch * params.dim, device.multiprocessors);
  return params.dstate > 1 && plan.waves == 1 &&
         params.seqlen <= std::max(figures.prompt_steps, figures.prompt_channel_steps * channels);
}

/// The last steps of a packed sequence take a whole chunk, and extra launches describe the chunks.
/// Many short sequences, or few elements, do not pay for that.
bool pays_chunks(const ScanParams& params, const Choice& figures) {
  return !params.packed.present() || (params.seqlen >= figures.packed_steps * params.packed.count &&
                                      params.dim * params.seqlen >= figures.packed_elements);
}

/// The streamed path takes everything else that it can run. That includes one state, which it pads
/// to sixteen: the floor takes longer even then. It does not cut time into segments if B and C are
/// constant; the floor does, which is faster for few channels with long sequences.
bool is_streamed(const ScanParams& params, const Device& device, int warp_channels) {
  const Choice& figures = choice_of(device);
  return pays_chunks(params, figures) &&
         (params.variable_B || params.seqlen < figures.short_steps ||
          streamed::warps_per_multiprocessor(params, warp_channels, device) >=
              figures.constant_warps);
}
bool is_preferred(const ForwardParams& params, const Device& device,
                  const streamed::ForwardPlan& plan) {
  return is_streamed(params, device, plan.warp_channels);
}

bool is_preferred(const BackwardParams& params, const Device& device,
                  const streamed::BackwardPlan& plan) {
  return is_streamed(params, device, plan.geometry.warp_channels());
}

// --- the choice ---

[[noreturn]] void fail(const std::string& what, const Refusal& refusal) {
  std::string message = "selective_scan: " + what + refusal.reason;
  if (refusal.got >= 0) message += ", got " + std::to_string(refusal.got);
  throw std::runtime_error(message);
}

template <Path kPath, class AnyPlan, class Params>
Refusal make(const Params& params, const Device& device, AnyPlan& any) {
  if constexpr (kPath != Path::kStreamed && kPath != Path::kFloor) {
    if (params.packed.present()) return {"sequences are packed"};
    if (params.input_delta.present()) return {"the input has steps of its own"};
  }
  if (!has_kernels(device, kPath)) return refusal_of_older(device);
  return make_plan(params, device, any.of_path.template emplace<static_cast<size_t>(kPath)>());
}

template <Path kPath, class AnyPlan, class Params>
bool takes(const Params& params, const Device& device, AnyPlan& any) {
  return !make<kPath>(params, device, any) &&
         is_preferred(params, device, std::get<static_cast<size_t>(kPath)>(any.of_path));
}

/// Makes the plan of a path that is known at run time. `kIndex` is the first of the paths in
/// question; AnyPlan may lack the last ones.
template <size_t kIndex = 0, class AnyPlan, class Params>
Refusal make_wanted(Path wanted, const Params& params, const Device& device, AnyPlan& any) {
  if constexpr (kIndex == std::variant_size_v<decltype(AnyPlan::of_path)>) {
    return {"it has no backward pass"};
  } else {
    constexpr auto kPath = static_cast<Path>(kIndex);
    return wanted == kPath ? make<kPath>(params, device, any)
                           : make_wanted<kIndex + 1>(wanted, params, device, any);
  }
}

template <class AnyPlan, class Params>
AnyPlan choose(const Params& params, const Device& device, std::optional<Path> wanted) {
  AnyPlan plan;
  if (wanted) {
    if (const Refusal refusal = make_wanted(*wanted, params, device, plan)) {
      fail("SELECTIVE_SCAN_CUDA_KERNELS=" + std::string(kPathNames[static_cast<size_t>(*wanted)]) +
               " cannot run this call: ",
           refusal);
    }
    return plan;
  }
  constexpr bool kIsForward = std::is_same_v<AnyPlan, ForwardPlan>;
  if constexpr (kIsForward) {
    if (takes<Path::kPrompt>(params, device, plan)) return plan;
  }
  const bool is_one = params.dstate == 1;
  if (!is_one && takes<Path::kDstate1>(params, device, plan)) return plan;
  if (takes<Path::kNarrow>(params, device, plan)) return plan;
  if (is_one && takes<Path::kDstate1>(params, device, plan)) return plan;
  if (takes<Path::kStreamed>(params, device, plan)) return plan;
  if (const Refusal refusal = make<Path::kFloor>(params, device, plan)) fail("", refusal);
  return plan;
}

}  // namespace

ForwardPlan plan_scan(const ForwardParams& params, const Device& device,
                      std::optional<Path> wanted) {
  return choose<ForwardPlan>(params, device, wanted);
}

BackwardPlan plan_scan(const BackwardParams& params, const Device& device,
                       std::optional<Path> wanted) {
  return choose<BackwardPlan>(params, device, wanted);
}

}  // namespace selective_scan::cuda
