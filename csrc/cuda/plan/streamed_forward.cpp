// The forward pass of the streamed path: which calls it takes, and how it divides the work.

#include <algorithm>
#include <cmath>
#include <limits>

#include "../../core/method_table.h"
#include "../kit/barrier_state.h"
#include "../kit/packed_bc_layout.h"
#include "../streamed/forward_shape.h"
#include "../streamed/plan.h"
#include "figures.h"
#include "segments.h"
#include "streamed_rows.h"

namespace selective_scan::cuda::streamed {
namespace {

/// The properties of an instantiation that plans depend on.
struct Variant {
  int64_t least_states;
  int64_t most_states;
  bool is_complex;
  int lane_states;
  int warp_channels;
  int padded_states;
  int warp_bytes;  // of shared memory
  bool is_common;
  MethodTable<bool (*)(LaneMap, int64_t)> has_few_registers;
};

template <class T, int kStates, int kLaneBits>
constexpr Variant make_variant(int64_t least_states) {
  using Shape = WarpShape<T, kStates, kLaneBits>;
  return {least_states,
          Shape::kPadded,
          is_complex_v<T>,
          kStates,
          Shape::kChannels,
          Shape::kPadded,
          Shape::kWarpFloats * static_cast<int>(sizeof(float)),
          kIsCommonShape<T, kStates>,
          make_method_table<bool (*)(LaneMap, int64_t)>(
              []<Method kMethod>() { return &has_few_registers<T, kStates, kMethod>; })};
}

/// A few states cost as much as the number that they are padded to, which is still less than on the
/// floor.
constexpr Variant kVariants[] = {
    make_variant<float, 4, 2>(1),
    make_variant<float, 8, 2>(17),
    make_variant<float, 16, 2>(33),
    make_variant<Complex<float>, 2, 3>(1),
};

const Variant* find_variant(const ScanParams& params) {
  for (const Variant& variant : kVariants) {
    if (variant.is_complex == params.is_complex && variant.least_states <= params.dstate &&
        params.dstate <= variant.most_states) {
      return &variant;
    }
  }
  return nullptr;
}

/// Estimates the time that `blocks` blocks take for one chunk. The unit is the time of a warp's
/// share of a busy multiprocessor: with enough warps its work is proportional to their number; with
/// few it waits. Blocks run in waves of `resident` per multiprocessor, of which the last is
/// shorter; each block begins with a delay.
double estimated_time(const Device& device, int64_t blocks, int64_t chunks, int warps,
                      int resident) {
  const Figures::StreamedForward& figures = figures_of(device).streamed_forward;
  const double fullest = warps <= 2 ? warps : kSchedulers * ceil_div(warps, kSchedulers);
  const double share = figures.fullest * fullest + (1 - figures.fullest) * warps;
  const auto wave = [&](int64_t blocks_each) {
    const auto count = static_cast<double>(blocks_each);
    const double busy = count * (share + figures.ring);
    return std::max(busy, figures.wait + (1 - figures.hidden) * busy) +
           figures.delay / (count * static_cast<double>(chunks));
  };
  const int64_t capacity = static_cast<int64_t>(device.multiprocessors) * resident;
  const int64_t left = blocks % capacity;
  const double full = static_cast<double>(blocks / capacity) * wave(resident);
  return left == 0 ? full : full + wave(ceil_div(left, device.multiprocessors));
}

/// Cuts time into `wanted` segments, or into fewer if these would be short. Returns false if even
/// two would be short.
bool cut(int64_t chunks, int64_t wanted, int64_t fewest_chunks, ForwardGeometry& geometry) {
  const int64_t segments = std::min(wanted, chunks / fewest_chunks);
  if (segments < 2) return false;
  geometry.segment_chunks = ceil_div(chunks, segments);
  geometry.segments = ceil_div(chunks, geometry.segment_chunks);
  return geometry.segments > 1;
}

/// Returns the part of the packed sequences' steps that is summarized: those beyond the uncut
/// length. It assumes that the lengths, which the host does not know, are distributed
/// exponentially.
double summarized_part(const PackedSequences& packed, const PackedCuts& cuts) {
  const auto uncut = static_cast<double>(cuts.uncut_chunks * kChunk);
  return std::exp(-uncut * static_cast<double>(packed.count) / static_cast<double>(packed.total));
}

/// Chooses the number of warps per block and of segments with which all blocks finish first. Among
/// equally fast numbers of warps it takes the largest, which reads B and C least often. Leaves the
/// warps at 0 if shared memory has room for none.
void choose_geometry(const ForwardParams& params, const Variant& variant, const Device& device,
                     ForwardPlan& plan) {
  const Figures::StreamedForward& figures = figures_of(device).streamed_forward;
  const int64_t chunks = plan.chunks;
  const bool is_packed = params.packed.present();
  const bool may_cut = params.variable_B && warps_per_multiprocessor(params, variant.warp_channels,
                                                                     device) < figures.many_warps;
  const int64_t group_channels = params.dim / params.groups;
  const int64_t sequences = params.batch * params.groups;
  const int most = static_cast<int>(
      std::min<int64_t>(ceil_div(group_channels, variant.warp_channels), kMaxWarps));
  const PackedBC packed_bc(params, variant.padded_states);
  const int common = static_cast<int>(sizeof(RingBarriers<kRingSlots>)) +
                     (params.variable_B ? kRingSlots * packed_bc.chunk_bytes : 0);
  ForwardGeometry& best = plan.geometry;
  double best_time = 0;
  // `waves` is the number of waves of segments, or 0 without segments.
  const auto keep_best = [&](const ForwardGeometry& candidate, int resident, int waves) {
    const int64_t blocks = sequences * candidate.tiles * candidate.segments;
    double time =
        static_cast<double>(candidate.segment_chunks) *
        estimated_time(device, blocks, candidate.segment_chunks, candidate.warps, resident);
    PackedCuts cuts{1, chunks, chunks};
    if (is_packed && waves > 0) {
      cuts = packed_cuts(candidate.segments, candidate.segment_chunks,
                         chunks * sequences * candidate.tiles / (device.multiprocessors * resident),
                         false);
    }
    if (waves > 0) {
      // A summary also lasts at least as long as the walk through one segment.
      const double summarized =
          is_packed ? std::max(summarized_part(params.packed, cuts), 1.0 / waves) : 1;
      time *= 1 + figures.summary_share * summarized + figures.unevenness / waves +
              figures.coupling * candidate.warps + (candidate.few_registers ? 0 : figures.sparse);
      time += figures.summary_delay;
    }
    if (best.warps > 0 && time > best_time) return;
    best_time = time;
    best = candidate;
    plan.cuts = cuts;
  };
  const auto try_warps = [&](int warps, bool few_registers) {
    ForwardGeometry candidate;
    candidate.warps = warps;
    candidate.few_registers = few_registers;
    candidate.shared_bytes = common + warps * variant.warp_bytes;
    if (candidate.shared_bytes > device.block_shared_bytes) return;
    const int threads = few_registers ? kFewRegistersResidentThreads : kResidentThreads;
    const int resident =
        std::max(1, std::min(device.blocks_by_shared_memory(candidate.shared_bytes),
                             threads / (warps * kWarpSize)));
    candidate.tiles = ceil_div(group_channels, warps * variant.warp_channels);
    candidate.segment_chunks = chunks;
    const int64_t blocks = sequences * candidate.tiles;
    ForwardGeometry whole = candidate;
    whole.shared_bytes = device.even_shared_bytes(blocks, candidate.shared_bytes);
    keep_best(whole, resident, 0);
    if (!may_cut) return;
    const int64_t capacity = static_cast<int64_t>(device.multiprocessors) * resident;
    const auto try_waves = [&](int waves, int64_t most) {
      const int64_t wanted = std::min(waves * capacity / blocks, most);
      if (cut(chunks, wanted, figures.segment_chunks, candidate))
        keep_best(candidate, resident, waves);
    };
    if (is_packed)
      return try_waves(figures_of(device).segments.packed_waves_forward, kMostPackedSegments);
    for (const int waves : {1, 2, 4}) try_waves(waves, chunks);
  };
  if (!params.input_delta.present() &&
      variant.has_few_registers[params.method](plan.map, element_size(params.u.dtype))) {
    for (int warps = 1; warps <= most; ++warps) try_warps(warps, true);
  }
  for (int warps = 1; warps <= most; ++warps) try_warps(warps, false);
}

/// Chooses the geometry if only the map of all steps is wanted: as many segments as the device can
/// summarize at a time.
ForwardGeometry choose_map_geometry(const ForwardParams& params, const Device& device,
                                    int64_t chunks) {
  constexpr int64_t kBlocks = 3;  // per multiprocessor, or more: see ForwardSummaryShape
  const int64_t fewest_chunks = figures_of(device).streamed_forward.segment_chunks;
  const int64_t tiles = ceil_div(params.dim / params.groups, kWarpSize);
  const int64_t blocks = params.batch * params.groups * tiles;
  const int64_t wanted =
      std::min(kBlocks * device.multiprocessors / blocks, chunks / fewest_chunks);
  ForwardGeometry geometry;
  geometry.warps = 1;  // of the scan, which does not run
  geometry.segment_chunks = ceil_div(chunks, std::max<int64_t>(wanted, 1));
  geometry.segments = ceil_div(chunks, geometry.segment_chunks);
  return geometry;
}

/// Chooses the map for rows that do not all lie along steps.
LaneMap choose_own_map(const ForwardParams& params, const std::array<RowArray, 5>& rows) {
  const bool may_be_pairs =
      !params.packed.present() || has_packed(LaneMap::kStepPairs, element_size(params.u.dtype));
  const bool have_vectors = std::all_of(
      rows.begin(), rows.end(), [](const RowArray& it) { return !it.present() || it.has_vectors; });
  return may_be_pairs && have_vectors ? LaneMap::kStepPairs : LaneMap::kElements;
}

Refusal refuse(const ForwardParams& params, const Variant* variant) {
  if (params.is_double) return {"arithmetic must be fp32"};
  if (variant == nullptr) {
    return {params.is_complex ? "dstate must be at most 16 where A is complex"
                              : "dstate must be at most 64",
            params.dstate};
  }
  if (params.variable_B != params.variable_C) {
    return {"B and C must both be variable or both be constant"};
  }
  const bool is_common = variant->is_common && params.variable_B;
  if (!is_common && !has_all_kernels(params.method)) return no_other_methods(params);
  if (!params.variable_B && !variant->is_common) {
    return {"where B and C are constant, A must be real and dstate at most 16", params.dstate};
  }
  if (params.packed.present() && !is_common) return not_packed(params);
  if (params.input_delta.present() &&
      !(is_common && !params.packed.present() && has_all_kernels(params.method))) {
    return kNoInputDelta;
  }
  if (params.wanted == ForwardWanted::kMapAlone &&
      !(params.variable_B && params.seqlen % kChunk == 0)) {
    return {"where a map alone is wanted, B must be variable and seqlen a multiple of 32",
            params.seqlen};
  }
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  const int64_t sequences = params.batch * params.groups;
  if (params.seqlen < 1 || params.seqlen > kMost - kChunk ||
      sequences * ceil_div(params.seqlen, kChunk) > kMost ||
      sequences * ceil_div(params.dim / params.groups, variant->warp_channels) > kMost) {
    return {"a grid of blocks cannot have that many steps or channels; seqlen must be positive",
            params.seqlen};
  }
  if (!have_one_dtype(params, rows_of(params))) {
    return {"u, delta, z, input_delta and out must have one dtype"};
  }
  return {};
}

}  // namespace

Refusal make_plan(const ForwardParams& call, const Device& device, ForwardPlan& plan) {
  const ForwardParams params = in_chunks(call);
  const Variant* const variant = find_variant(params);
  if (const Refusal refusal = refuse(params, variant)) return refusal;
  plan.lane_states = variant->lane_states;
  plan.warp_channels = variant->warp_channels;
  plan.padded_states = variant->padded_states;
  plan.chunks = ceil_div(params.seqlen, kChunk);
  if (!plan_rows(params, variant->warp_channels, rows_of(params), plan.map, plan.rows)) {
    return {"strides of channels must be positive and less than 16 MiB"};
  }
  if (plan.map == LaneMap::kChannels && variant->is_common) {
    plan.map = choose_own_map(params, plan.rows);
  }
  if (wants_summary_alone(params)) {
    plan.geometry = choose_map_geometry(params, device, plan.chunks);
  } else {
    choose_geometry(params, *variant, device, plan);
  }
  const ForwardGeometry& geometry = plan.geometry;
  if (geometry.warps == 0) return kNotEnoughSharedMemory;
  plan.shape = {geometry.segments * params.batch * params.groups * geometry.tiles,
                geometry.warps * kWarpSize, geometry.shared_bytes};
  // With segments, other kernels run before the scan.
  plan.shape.is_dependent = params.variable_B && geometry.segments == 1;
  ForwardScratch& scratch = plan.scratch;
  scratch.packed_bc = scratch.take(
      params.variable_B, PackedBC(params, plan.padded_states).bytes(params, geometry.segments), 1);
  scratch.take_segments(geometry.segments > 1 || wants_summary_alone(params),
                        geometry.segments * params.batch * params.dim * plan.padded_states,
                        params.is_complex ? 8 : 4);
  return {};
}

}  // namespace selective_scan::cuda::streamed
