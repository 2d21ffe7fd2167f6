// The floor: runs any call, provided that one warp's share of it fits a block's shared memory.

#include "../floor/plan.h"

#include <algorithm>
#include <type_traits>

#include "figures.h"
#include "segments.h"

namespace selective_scan::cuda::floor {
namespace {

constexpr int kFewestBlocks = 2;       // that a multiprocessor has room for, if possible
constexpr int64_t kPackedBlocks = 16;  // per multiprocessor; packed sequences are dealt out to them

/// Chooses the most warps per block with which a tile is more than half full, shared memory has
/// room for the blocks, and there are enough blocks for the device, counting segments.
template <class Plan>
void choose_tile(const ScanParams& params, const Device& device, bool is_backward, Plan& plan) {
  Geometry& geometry = plan.geometry;
  const int64_t segments = params.seqlen / figures_of(device).segments.steps;
  const int64_t rows =
      params.packed.present() ? params.packed.count : params.batch * std::max<int64_t>(1, segments);
  for (int warps = kMostWarps; warps > 0; warps /= 2) {
    geometry.channel_warps = warps;
    geometry.set_tiles();
    plan.layout = SharedLayout(params, geometry, is_backward);
    const bool has_room = device.blocks_by_shared_memory(plan.layout.bytes) >= kFewestBlocks;
    const bool is_divided = geometry.tile_channels() / 2 < geometry.group_channels &&
                            rows * params.groups * geometry.tiles >= device.multiprocessors;
    if (has_room && is_divided) return;
  }
}

/// Cuts time if the channels alone leave most multiprocessors without work.
void set_segments(const ScanParams& params, const Device& device, Geometry& geometry) {
  const int64_t tiles = params.groups * geometry.tiles;
  geometry.work_items = params.batch * tiles;
  if (params.packed.present()) {
    const int64_t most = ceil_div(kPackedBlocks * device.multiprocessors, tiles);
    geometry.segments = std::clamp<int64_t>(params.packed.count, 1, most);
    geometry.work_items *= geometry.segments;
  } else if (2 * geometry.work_items <= device.multiprocessors) {
    const Figures::Segments& figures = figures_of(device).segments;
    const int64_t wanted = ceil_div(figures.blocks * device.multiprocessors, geometry.work_items);
    cut_time(params.seqlen, std::min(wanted, params.seqlen / figures.steps), geometry);
  }
}

/// Limits the partial sums of dB and dC, each of which is as long as B and C: together they take at
/// most as much memory as two arrays like u in fp32, or there are just enough to keep the device
/// busy.
void share_partial_sums(const ScanParams& params, const Device& device, Geometry& geometry) {
  const int64_t rows = geometry.segments * params.batch * params.groups;
  const int64_t most = std::max({int64_t{1}, geometry.group_channels / params.dstate,
                                 ceil_div(int64_t{kFewestBlocks} * device.multiprocessors, rows)});
  // If a block takes several work items, tiles do not run in order.
  if (geometry.tiles <= most || geometry.work_items > kMaxBlocks) return;
  geometry.set_tiles(ceil_div(geometry.tiles, most));
  geometry.work_items = rows * geometry.sums_per_group;
}

template <class Params, class Plan>
Refusal plan_pass(const Params& params, const Device& device, Plan& plan) {
  constexpr bool kIsBackward = std::is_same_v<Params, BackwardParams>;
  if (params.dstate > kMaxDstate) return {"dstate must be at most 256", params.dstate};
  const int real_bytes = params.is_double ? 8 : 4;
  const int state_bytes = params.is_complex ? 2 * real_bytes : real_bytes;
  Geometry& geometry = plan.geometry;
  geometry.group_channels = params.dim / params.groups;
  // sums/ reads 16 bytes of a channel's states at a time, or a single fp32 state.
  int64_t lanes = std::min<int64_t>(params.dstate, kWarpSize);
  if (lanes > 1 || state_bytes > 4) lanes = std::max<int64_t>(lanes, 16 / state_bytes);
  while (geometry.lanes() < lanes) ++geometry.lane_bits;
  choose_tile(params, device, kIsBackward, plan);
  if (plan.layout.bytes > device.block_shared_bytes) {
    return {"dstate must be smaller on this GPU, whose blocks have not enough shared memory",
            params.dstate};
  }
  set_segments(params, device, geometry);
  const bool has_sums =
      (params.variable_B || params.variable_C) && kIsBackward && !wants_summary_alone(params);
  if (has_sums) share_partial_sums(params, device, geometry);
  plan.shape = {std::min(geometry.work_items, kMaxBlocks), geometry.threads(), plan.layout.bytes};

  const int64_t padded = geometry.padded_states(num_slices(params, geometry));
  const int64_t channels = geometry.segments * params.batch * params.dim;
  if constexpr (kIsBackward) {
    const int64_t rows = geometry.sums_per_group * params.batch * params.groups * params.seqlen;
    plan.scratch.dBC_partials = plan.scratch.take(has_sums, rows * 2 * padded, state_bytes);
    if (!wants_summary_alone(params)) {
      plan.scratch.take_sums(params, channels * padded, state_bytes, channels * geometry.lanes(),
                             real_bytes);
    }
  }
  const bool has_segments =
      wants_summary_alone(params) || (geometry.segments > 1 && !params.packed.present());
  plan.scratch.take_segments(has_segments, channels * params.dstate, state_bytes);
  return {};
}

}  // namespace

Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan) {
  return plan_pass(params, device, plan);
}

Refusal make_plan(const BackwardParams& params, const Device& device, BackwardPlan& plan) {
  return plan_pass(params, device, plan);
}

}  // namespace selective_scan::cuda::floor
