// The dstate1 path: which calls it takes, and how it divides their channels.

#include <algorithm>

#include "../dstate1/layout.h"
#include "../dstate1/plan.h"
#include "arrays.h"
#include "figures.h"

namespace selective_scan::cuda::dstate1 {
namespace {

Refusal refuse(const ScanParams& params) {
  if (const Refusal refusal = refuse_other_kinds(params)) return refusal;
  if (params.batch * params.dim > kMaxBlocks) {
    return {"channels of all batch rows must be fewer than 2^31", params.batch * params.dim};
  }
  return {};
}

/// Requires that all arrays with steps have one element type and the same strides, and that offsets
/// within a tile of channels fit 32 bits.
template <class Params>
Refusal refuse_arrays(const Params& params) {
  constexpr int64_t tile_channels = kMaxBackwardWarps<WideWindow> * WideWindow::kChannels;
  const auto has_strides_of_u = [&](const ArrayView& view) {
    return view.channel == params.u.channel && view.step == params.u.step;
  };
  const auto rows = rows_of(params);
  if (!have_one_dtype(params, rows) || !all_of(rows, has_strides_of_u)) {
    return {"u, delta, z and out or their gradients must have one dtype and the same strides"};
  }
  const auto fits = [&](const ArrayView& view) {
    // Prefetches may reach past the end.
    const int64_t steps = params.seqlen + 2 * SharedWindow::kRoundSteps;
    return fits_32_bits({{steps, view.step}, {tile_channels, view.channel}},
                        element_size(view.dtype));
  };
  if (!fits(params.u) || !fits(params.B) || !fits(params.C)) {
    return {"a block's part of an array must lie within 2 GiB"};
  }
  return {};
}

/// Returns the warps per multiprocessor if each warp has this many channels of a group.
double count_warps(const ScanParams& params, const Device& device, int channels) {
  const int64_t windows =
      params.batch * params.groups * ceil_div(params.dim / params.groups, channels);
  return static_cast<double>(windows) / device.multiprocessors;
}

/// Chooses windows of eight channels, unless these would be too few warps.
int choose_window_channels(const ScanParams& params, const Device& device, bool is_backward) {
  const Figures::Choice& figures = figures_of(device).choice;
  const double warps = count_warps(params, device, WideWindow::kChannels);
  const bool are_few = warps < figures.dstate1_long_warps[is_backward] &&
                       params.seqlen >= figures.dstate1_long_steps * warps * warps;
  return are_few ? LongWindow::kChannels : WideWindow::kChannels;
}

/// Chooses one warp, unless one-channel windows would be too few warps as well: then four warps
/// share each. Backward, a multiprocessor has room for half as many warps with 4-byte elements.
int choose_window_warps(const ScanParams& params, const Device& device, bool is_backward,
                        int window_channels, Rows rows) {
  if (window_channels > 1 || rows != Rows::kVectors) return 1;
  const double room = is_backward && params.u.dtype == DType::kFloat32 ? 0.5 : 1;
  const double warps = count_warps(params, device, LongWindow::kChannels) / room;
  const double steps = figures_of(device).choice.dstate1_shared_steps * warps * warps;
  const bool are_few = params.seqlen > SharedWindow::kRoundSteps / 2 && params.seqlen >= steps;
  return are_few ? SharedWindow::kWarps : 1;
}

/// Returns the best row layout that all arrays allow. The kernels support vectors only if B and C
/// have the same type.
template <class Params>
Rows find_rows(const Params& params, int window_channels) {
  if (params.B.dtype != params.u.dtype || params.C.dtype != params.u.dtype) return Rows::kScattered;
  const auto rows = rows_of(params);
  const auto have_vectors = [&](int steps) {
    return all_of(rows,
                  [&](const ArrayView& view) { return has_step_vectors(params, view, steps); });
  };
  if (params.u.dtype == DType::kFloat32) {
    return have_vectors(kItems / 2) ? Rows::kVectors : Rows::kScattered;
  }
  if (have_vectors(kItems)) return Rows::kVectors;
  if (!have_vectors(kItems / 2)) return Rows::kScattered;
  if (window_channels == LongWindow::kChannels) return Rows::kHalfVectors;
  const bool can_be_dense = params.seqlen <= kMostDenseSteps && are_dense(params, rows);
  return can_be_dense ? Rows::kDense : Rows::kScattered;
}

/// Adds the shared memory for rows to a block of `warps` warps that already needs `other_bytes`:
/// rows of `arrays` arrays, kStages windows of vectors or all steps of dense rows. Returns false if
/// the block has no room for them.
template <class Plan>
bool make_room_for_rows(const ScanParams& params, const Device& device, int warps, int arrays,
                        int other_bytes, Plan& plan) {
  if (plan.rows == Rows::kScattered) return true;
  const int size = static_cast<int>(element_size(params.u.dtype));
  const int window_bytes =
      visit_shape(plan.window_channels, plan.window_warps,
                  [&]<class Shape>(Shape) { return staged_bytes<Shape>(size); });
  const int row_bytes = plan.rows == Rows::kDense
                            ? plan.window_channels * static_cast<int>(params.seqlen) * size
                            : kStages * window_bytes;
  const int bytes = warps * arrays * row_bytes;
  if (bytes + other_bytes > device.block_shared_bytes) return false;
  plan.shape.shared_bytes += bytes;
  return true;
}

/// Divides the channels among blocks. Returns false if a block has no room for the rows.
bool divide(const ForwardParams& params, const Device& device, ForwardPlan& plan) {
  plan.windows = static_cast<int>(ceil_div(params.dim / params.groups, plan.window_channels));
  plan.work_items = static_cast<int>(params.batch * params.groups * plan.windows);
  plan.shape = {ceil_div(plan.work_items, kForwardWarps / plan.window_warps),
                kForwardWarps * kWarpSize};
  const size_t own_bytes =
      visit_shape(plan.window_channels, plan.window_warps,
                  []<class Shape>(Shape) { return sizeof(WarpShared<Shape>); });
  return make_room_for_rows(params, device, kForwardWarps, ForwardRows::count(params.z.present()),
                            kForwardWarps * static_cast<int>(own_bytes), plan);
}

/// Estimates how long the blocks take, with `resident` of them per multiprocessor at a time, in the
/// time that a multiprocessor takes for one warp. Each wave adds a wait, however few blocks it has.
double time_of_waves(const Device& device, const BackwardPlan& plan, int resident) {
  const double wait = figures_of(device).choice.dstate1_wait;
  const auto wave = [&](int64_t blocks) {
    return blocks == 0 ? 0 : wait + static_cast<double>(blocks * plan.warps);
  };
  const int64_t capacity = static_cast<int64_t>(device.multiprocessors) * resident;
  const auto full = static_cast<double>(plan.work_items / capacity);
  return full * wave(resident) + wave(ceil_div(plan.work_items % capacity, device.multiprocessors));
}

bool divide(const BackwardParams& params, const Device& device, BackwardPlan& plan) {
  const int64_t windows = ceil_div(params.dim / params.groups, plan.window_channels);
  const auto visit = [&](const auto& visitor) {
    return visit_shape(plan.window_channels, plan.window_warps, visitor);
  };
  const int most_warps = visit([]<class Shape>(Shape) { return kMaxBackwardWarps<Shape>; });
  const auto most = static_cast<int>(std::min<int64_t>(windows, most_warps / plan.window_warps));
  const int fewest = plan.window_warps > 1 ? std::min(most, 2) : most;
  // Large tiles have few partial sums. Smaller tiles are better if they finish sooner, or if a
  // block has no room for larger ones.
  double best_time = 0;
  BackwardPlan candidate = plan;
  for (int tile_windows = most; tile_windows >= fewest; --tile_windows) {
    candidate.warps = tile_windows * plan.window_warps;
    candidate.tiles = static_cast<int>(ceil_div(windows, tile_windows));
    candidate.work_items = static_cast<int>(params.batch * params.groups * candidate.tiles);
    const int shared_bytes =
        visit([&]<class Shape>(Shape) { return backward_shared_bytes<Shape>(candidate.warps); });
    candidate.shape = {candidate.work_items, candidate.warps * kWarpSize, shared_bytes};
    const int arrays = BackwardRows::count(params.z.present());
    if (!make_room_for_rows(params, device, candidate.warps, arrays, shared_bytes, candidate)) {
      continue;
    }
    const double time = time_of_waves(device, candidate, most_warps / candidate.warps);
    if (best_time > 0 && time >= best_time) continue;
    best_time = time;
    plan = candidate;
  }
  return best_time > 0;
}

/// Divides the channels of a call with several states. Blocks are as large as need be for all of
/// them to run at a time.
Refusal divide_states(const BackwardParams& params, const Device& device, BackwardPlan& plan) {
  if (params.dstate > kMostStates) return {"dstate must be at most 16", params.dstate};
  if (params.seqlen < 1) return {"seqlen must be positive", params.seqlen};
  if (const Refusal refusal = refuse(params)) return refusal;
  const auto rows = rows_of(params);
  if (!have_one_dtype(params, rows)) return {"u, delta, z and their gradients must have one dtype"};
  const auto fits = [&](const ArrayView& view) {
    return fits_32_bits({{params.seqlen + LongWindow::kSteps, view.step}},
                        element_size(view.dtype));
  };
  if (!all_of(rows, fits)) return {"a row must lie within 2 GiB"};
  plan.rows = Rows::kScattered;
  plan.window_channels = LongWindow::kChannels;
  plan.window_warps = channel_warps(static_cast<int>(params.dstate));
  constexpr auto kWarpBytes = static_cast<int>(sizeof(StatesShared));
  const int64_t channels = params.dim / params.groups;
  const int64_t most_warps =
      std::min<int64_t>(kMostStatesWarps, device.block_shared_bytes / kWarpBytes);
  const int64_t most = std::min(most_warps / plan.window_warps, channels);
  if (most == 0) return kNotEnoughSharedMemory;
  const int64_t wanted = ceil_div(params.batch * params.dim, device.multiprocessors);
  const int64_t tile_channels = std::clamp<int64_t>(wanted, 1, most);
  plan.warps = static_cast<int>(tile_channels) * plan.window_warps;
  plan.tiles = static_cast<int>(ceil_div(channels, tile_channels));
  plan.work_items = static_cast<int>(params.batch * params.groups * plan.tiles);
  plan.padded_states = static_cast<int>(round_up(params.dstate, 4));
  plan.shape = {plan.work_items, plan.warps * kWarpSize, plan.warps * kWarpBytes};
  return {};
}

/// Fills in the part of a plan that both passes share: the row layout, the warps that share a
/// window, and blocks that have room for them.
template <class Params, class Plan>
Refusal choose_and_divide(const Params& params, const Device& device, bool is_backward,
                          Plan& plan) {
  if (const Refusal refusal = refuse(params)) return refusal;
  plan.window_channels = choose_window_channels(params, device, is_backward);
  if (const Refusal refusal = refuse_arrays(params)) return refusal;
  plan.rows = find_rows(params, plan.window_channels);
  plan.window_warps =
      choose_window_warps(params, device, is_backward, plan.window_channels, plan.rows);
  while (!divide(params, device, plan)) {
    // Blocks whose warps share nothing are smaller, and those of single elements always fit.
    if (plan.window_warps > 1) {
      plan.window_warps = 1;
    } else {
      plan.rows = Rows::kScattered;
    }
  }
  return {};
}

}  // namespace

Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan) {
  if (params.wanted == ForwardWanted::kMapAlone) return kNotMapAlone;
  if (params.dstate != 1) return {"dstate must be 1", params.dstate};
  return choose_and_divide(params, device, false, plan);
}

Refusal make_plan(const BackwardParams& params, const Device& device, BackwardPlan& plan) {
  if (params.wanted == BackwardWanted::kStateAlone) return kNotStateAlone;
  if (const Refusal refusal = params.dstate > 1 ? divide_states(params, device, plan)
                                                : choose_and_divide(params, device, true, plan)) {
    return refusal;
  }
  BackwardScratch& scratch = plan.scratch;
  scratch.dBC_partials = scratch.take(
      true, params.batch * params.groups * plan.tiles * params.seqlen * 2 * plan.padded_states,
      sizeof(float));
  const int64_t rows = params.batch * params.dim;
  scratch.take_sums(params, rows * plan.padded_states, sizeof(float), rows, sizeof(float));
  return {};
}

}  // namespace selective_scan::cuda::dstate1
