// The general path: any call, so long as a block's shared memory has room for it.

#include <algorithm>

#include "candidates.h"
#include "segments.h"

namespace selective_scan::cuda {
namespace {

using general::SharedLayout;
using general::TypeSizes;

/// A lane holds 16 bytes of states.
TypeSizes sizes_of(const ScanParams& params) {
  const int real_bytes = params.is_double ? 8 : 4;
  const int state_bytes = params.is_complex ? 2 * real_bytes : real_bytes;
  return {16 / state_bytes, state_bytes, real_bytes};
}

SharedLayout make_layout(const ForwardParams& params, const Geometry& geometry, TypeSizes sizes) {
  return general::forward_layout(params, geometry, sizes);
}
SharedLayout make_layout(const BackwardParams& params, const Geometry& geometry, TypeSizes sizes) {
  return general::backward_layout(params, params.dout, geometry, sizes);
}

void set_channel_warps(const ScanParams& params, Geometry& geometry, int warps) {
  geometry.channel_warps = warps;
  geometry.set_tiles();
  geometry.work_items = params.batch * params.groups * geometry.tiles;
}

/// Cuts time into segments where the channels alone leave most multiprocessors without work.
void set_segments(const ScanParams& params, const Device& device, Geometry& geometry) {
  if (2 * geometry.work_items > device.multiprocessors) return;
  cut_time(params.seqlen, ceil_div(kSegmentBlocks * device.multiprocessors, geometry.work_items),
           geometry);
}

/// Blocks of a kernel that a multiprocessor has at a time. The compiler gives a thread all
/// registers that kMaxWarps leave it.
int resident_blocks(const Geometry& geometry, const Device& device, int shared_bytes) {
  constexpr int kRegistersPerThread = 168;
  return std::max(1, std::min(device.blocks_by_shared_memory(shared_bytes),
                              device.registers / (kRegistersPerThread * geometry.threads())));
}

/// How long the busiest multiprocessor takes, in the time that a warp's channels would take if
/// nothing had to wait: its warps' worth of work, over the part of its time in which it issues. Few
/// warps at a time leave it waiting.
double estimated_load(const Geometry& geometry, const Device& device, int shared_bytes) {
  constexpr double kWarpsForHalfRate = 6;  // on an H200, roughly
  const int64_t blocks = ceil_div(geometry.work_items, device.multiprocessors);
  const int resident = resident_blocks(geometry, device, shared_bytes);
  const auto at_a_time =
      static_cast<double>(std::min<int64_t>(blocks, resident) * geometry.warps());
  const double rate = at_a_time / (at_a_time + kWarpsForHalfRate);
  return static_cast<double>(blocks * geometry.warps()) / rate;
}

/// Takes the number of warps with the least load. Of equals the largest, which reads B and C least
/// often. Sequences long enough for segments take the largest in any case. False where not even one
/// warp's share fits shared memory.
template <class Params, class Plan>
bool choose_geometry(const Params& params, const Device& device, int min_tile, Plan& plan) {
  Geometry& best = plan.geometry;
  Geometry geometry;
  geometry.group_channels = params.dim / params.groups;
  const int64_t lanes = ceil_div(params.dstate, plan.sizes.states);
  while (geometry.lanes() < lanes && geometry.lanes() < kWarpSize) ++geometry.lane_bits;
  geometry.state_warps = static_cast<int>(ceil_div(lanes, geometry.lanes()));

  const int64_t useful = ceil_div(geometry.group_channels, geometry.warp_channels());
  const int most = static_cast<int>(std::min<int64_t>(useful, kMaxWarps / geometry.state_warps));
  for (; geometry.piece_steps >= kBlockSteps; geometry.piece_steps /= 2) {
    double best_load = 0;
    Geometry largest;
    for (int warps = 1; warps <= most; ++warps) {
      set_channel_warps(params, geometry, warps);
      const int bytes = make_layout(params, geometry, plan.sizes).bytes;
      if (bytes > device.block_shared_bytes) break;
      largest = geometry;
      const double load = estimated_load(geometry, device, bytes);
      const bool too_small = best.work_items > 0 && best.tile_channels() < min_tile;
      if (best.work_items == 0 || too_small || load <= best_load) {
        best = geometry;
        best_load = load;
      }
    }
    if (best.work_items == 0) continue;
    set_segments(params, device, largest);
    if (largest.segments > 1) best = largest;
    return true;
  }
  return false;
}

/// Many states leave a block few channels, and each tile's partial sum of dB and dC is as long as B
/// and C. Where there would be more than one such sum for as many channels as there are states,
/// which take as much memory as two arrays like u in fp32, tiles are worked on in rounds: as many
/// as it takes, so long as no multiprocessor has more to do for it.
void share_partial_sums(const ScanParams& params, const Device& device, int shared_bytes,
                        Geometry& geometry) {
  constexpr double kAllowedLoad = 1.05;
  const int64_t enough = std::max<int64_t>(1, geometry.group_channels / params.dstate);
  const int64_t at_a_time =
      device.multiprocessors * resident_blocks(geometry, device, shared_bytes);
  Geometry candidate = geometry;
  const auto load = [&] {
    return candidate.tiles_per_sum * ceil_div(candidate.work_items, at_a_time);
  };
  const auto most = kAllowedLoad * static_cast<double>(load());
  while (candidate.sums_per_group > enough) {
    candidate.set_tiles(candidate.tiles_per_sum + 1);
    candidate.work_items =
        geometry.segments * params.batch * params.groups * candidate.sums_per_group;
    const bool fits = candidate.work_items <= kMaxBlocks;  // every work item has its block
    if (fits && static_cast<double>(load()) <= most) geometry = candidate;
  }
}

/// What both passes have alike.
template <class Params, class Plan>
Refusal plan_pass(const Params& params, const Device& device, int min_tile, Plan& plan) {
  if (params.dstate > kMaxDstate) return {"dstate must be at most 256", params.dstate};
  if (!choose_geometry(params, device, min_tile, plan)) {
    return {
        "dstate must be smaller on this GPU, whose blocks have not enough shared memory for so "
        "many states of this dtype",
        params.dstate};
  }
  return {};
}

template <class Params, class Plan>
void set_launch(const Params& params, Plan& plan) {
  const Geometry& geometry = plan.geometry;
  plan.layout = make_layout(params, geometry, plan.sizes);
  plan.shape = {std::min(geometry.work_items, kMaxBlocks), geometry.threads(), plan.layout.bytes};
  const int64_t states =
      geometry.segments * params.batch * params.dim * geometry.padded_states(plan.sizes.states);
  plan.scratch.take_segments(geometry.segments > 1, states, plan.sizes.state_bytes);
}

}  // namespace

Refusal plan_general(const ForwardParams& params, const Device& device, GeneralForwardPlan& plan) {
  plan.sizes = sizes_of(params);
  const Refusal refusal = plan_pass(params, device, 1, plan);
  if (refusal) return refusal;
  if (params.wants_map_alone()) add_empty_segment(params.seqlen, plan.geometry);
  set_launch(params, plan);
  return {};
}

Refusal plan_general(const BackwardParams& params, const Device& device,
                     GeneralBackwardPlan& plan) {
  plan.sizes = sizes_of(params);
  const bool has_sums = (params.variable_B || params.variable_C) && !params.wants_state_alone();
  // In fp64 a warp has half as many channels, and the rest counts less beside its arithmetic.
  const int least_tile = params.is_double ? kMinBackwardTile / 2 : kMinBackwardTile;
  const Refusal refusal = plan_pass(params, device, has_sums ? least_tile : 1, plan);
  if (refusal) return refusal;
  Geometry& geometry = plan.geometry;
  if (has_sums) {
    const int shared_bytes = make_layout(params, geometry, plan.sizes).bytes;
    share_partial_sums(params, device, shared_bytes, geometry);
  }
  const int64_t padded = geometry.padded_states(plan.sizes.states);
  const int64_t channels = geometry.segments * params.batch * params.dim;
  BackwardScratch& scratch = plan.scratch;
  scratch.dBC_partials = scratch.take(
      has_sums && params.seqlen > 0,
      geometry.sums_per_group * params.batch * params.groups * params.seqlen * 2 * padded,
      plan.sizes.state_bytes);
  if (params.wants_state_alone()) {
    add_empty_segment(params.seqlen, geometry);
  } else {
    scratch.take_sums(params, channels * padded, plan.sizes.state_bytes,
                      channels * geometry.state_warps, plan.sizes.real_bytes);
  }
  set_launch(params, plan);
  return {};
}

}  // namespace selective_scan::cuda
