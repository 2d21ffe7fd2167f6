// The prompt path: which calls it takes, and how it divides the work.

#include <algorithm>
#include <limits>

#include "../prompt/layout.h"
#include "../prompt/plan.h"
#include "arrays.h"
#include "figures.h"

namespace selective_scan::cuda::prompt {
namespace {

/// Returns whether rows consist of vectors of four steps, from the first step on, and those of B
/// and C of vectors of `items` steps.
bool have_step_vectors(const ForwardParams& params, int64_t items) {
  const auto are_vectors = [&](const ArrayView& view, int64_t steps) {
    return view.step == 1 && has_step_vectors(params, view, steps);
  };
  const auto is_row = [&](const ArrayView& view) { return are_vectors(view, kBlockSteps); };
  return all_of(rows_of(params), is_row) && are_vectors(params.B, items) &&
         are_vectors(params.C, items);
}

/// Returns the same for rows along channels, and for B and C along states.
template <class S>
bool have_channel_vectors(const ForwardParams& params) {
  const auto is_row = [&](const ArrayView& view) {
    return has_channel_vectors(params, view, S::kChannels);
  };
  const int64_t items = 16 / element_size(params.u.dtype);
  const auto are_vectors = [&](const ArrayView& view) {
    ArrayView vectors = view;
    vectors.state = 0;  // checks where the vectors begin, not each state
    return view.state == 1 && params.dstate % items == 0 &&
           is_aligned(params, vectors, reinterpret_cast<uintptr_t>(view.data), 16, false);
  };
  return all_of(rows_of(params), is_row) && are_vectors(params.B) && are_vectors(params.C);
}

/// Returns whether rows lie along steps, wherever they begin.
bool have_steps(const ForwardParams& params) {
  const auto is_row = [](const ArrayView& view) { return view.step == 1; };
  return all_of(rows_of(params), is_row) && is_row(params.B) && is_row(params.C);
}

Refusal refuse(const ForwardParams& params) {
  if (params.wanted == ForwardWanted::kMapAlone) return kNotMapAlone;
  if (const Refusal refusal = refuse_other_kinds(params)) return refusal;
  if (params.dstate > kPaddedStates) return {"dstate must be at most 16", params.dstate};
  constexpr int64_t kMost = std::numeric_limits<int>::max() / 4;  // steps, or bytes of a row
  if (params.seqlen < 1 || params.seqlen > kMost - kChunk) {
    return {"seqlen must be positive, and fit 32 bits", params.seqlen};
  }
  if (params.dim > kMost) return {"dim must fit 32 bits", params.dim};
  if (params.batch > kMaxRows) return {"batch must be at most 65535", params.batch};
  if (params.groups > kMaxRows) return {"there must be at most 65535 groups", params.groups};

  const auto fits = [&](const ArrayView& view) {
    return view.dtype == params.u.dtype &&
           fits_32_bits({{1, view.channel}, {1, view.group}, {1, view.state}, {1, view.step}},
                        element_size(view.dtype));
  };
  if (!all_of(rows_of(params), fits) || !fits(params.B) || !fits(params.C)) {
    return {"u, delta, z, out, B and C must have one dtype, and strides must fit 32 bits"};
  }
  return {};
}

/// Returns the number of warps of a block, including those that make rows. It is rounded up so that
/// all schedulers have the same number.
constexpr int64_t warps_for(int64_t scanners, int64_t makers) {
  return round_up(scanners + makers, kSchedulers);
}

template <class S>
Refusal divide(const ForwardParams& params, const Device& device, ForwardPlan& plan) {
  if (have_step_vectors(params, 16 / element_size(params.u.dtype))) {
    plan.along = Along::kSteps;
  } else if (have_channel_vectors<S>(params)) {
    plan.along = Along::kChannels;
  } else if (S::kStates == 1 && have_step_vectors(params, kBlockSteps)) {
    plan.along = Along::kFourSteps;
  } else if (S::kStates == 1 && have_steps(params)) {
    plan.along = Along::kElements;
  } else {
    return {
        "rows must lie along steps, or be vectors of two along channels, and those of B and C of "
        "16 bytes along states"};
  }
  plan.lane_states = S::kStates;
  plan.warp_channels = S::kChannels;
  const int64_t group_channels = params.dim / params.groups;
  const int64_t sequences = params.batch * params.groups;
  const int64_t group_warps = ceil_div(group_channels, S::kChannels);
  const auto size = static_cast<int>(element_size(params.u.dtype));
  const auto shared_bytes = [&](int64_t scanners) {
    return S::shared_bytes(size, static_cast<int>(scanners), plan.along);
  };
  // Equally many makers keep up with the scanners. If the block lacks room for them, a third as
  // many keep up with little delay.
  const auto fits = [&](int64_t scanners) {
    return warps_for(scanners, ceil_div(scanners, 3)) <= S::kMostWarps &&
           shared_bytes(scanners) <= device.block_shared_bytes;
  };
  int64_t most = group_warps;
  while (most > 0 && !fits(most)) most = std::min<int64_t>(most - 1, S::kMostWarps);
  if (most == 0) return kNotEnoughSharedMemory;
  // One wave of blocks, each with a multiprocessor's share of warps, if they have room; else as few
  // waves of equal blocks as possible.
  const int64_t share = ceil_div(sequences * group_warps, device.multiprocessors);
  const int64_t waves = plan.waves = ceil_div(share, most);
  const int64_t scanners = std::min(ceil_div(share, waves), most);
  plan.scanners = static_cast<int>(scanners);
  plan.tiles = ceil_div(group_warps, scanners);
  const int64_t warps = std::min<int64_t>(warps_for(scanners, scanners), S::kMostWarps);
  plan.shape = {plan.tiles, static_cast<int>(warps) * kWarpSize, shared_bytes(scanners)};
  plan.shape.rows = params.groups;
  plan.shape.layers = params.batch;
  return {};
}

}  // namespace

Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan) {
  if (const Refusal refusal = refuse(params)) return refusal;
  // Two states per lane spend less time on shared memory, which delays blocks of many warps, and
  // leave room for more channels.
  const Refusal refusal = divide<Shape<1>>(params, device, plan);
  if (refusal || (plan.waves == 1 && plan.scanners <= figures_of(device).choice.prompt_scanners))
    return refusal;
  ForwardPlan two_states;
  if (divide<Shape<2>>(params, device, two_states) || two_states.waves > plan.waves) return {};
  plan = two_states;
  return {};
}

}  // namespace selective_scan::cuda::prompt
