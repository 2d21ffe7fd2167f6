// The backward pass of the streamed path: which calls it takes, and how it divides the work.

#include <algorithm>

#include "../kit/packed_bc_layout.h"
#include "../streamed/backward_shape.h"
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
  bool variable;
  bool has_input_delta;
  bool is_common;  // has kernels for every method, packed sequences and float16 gradients
  int lane_bits;
  int team_warps;    // that share a channel
  int row_channels;  // whose rows one warp moves
  int (*shared_bytes)(const Geometry&);
  int (*summary_bytes)(const Geometry&);
};

template <class T, int kLaneBits>
int summary_bytes(const Geometry& geometry) {
  return BackwardLayout::make<SummaryShape<T, kLaneBits>>(geometry.warps(), true,
                                                          geometry.state_warps)
      .bytes;
}

template <class T, int kLaneBits, bool kVariable, bool kOwnInputSteps = false>
constexpr Variant make_variant() {
  using Shape = StreamedShape<T, kLaneBits, kVariable, kOwnInputSteps>;
  return {1,
          Shape::kPadded,
          is_complex_v<T>,
          kVariable,
          kOwnInputSteps,
          kIsCommonBackward<T, kVariable>,
          kLaneBits,
          1,
          Shape::kChannels,
          [](const Geometry& geometry) {
            return BackwardLayout::make<Shape>(geometry.warps(), kVariable).bytes;
          },
          &summary_bytes<T, kLaneBits>};
}

/// Returns the variant for numbers of states that need more than half of the warps.
template <int kWarps>
constexpr Variant make_team_variant() {
  using Shape = TeamShape<kWarps>;
  return {kWarps / 2 * Shape::kPadded + 1,
          kWarps * Shape::kPadded,
          false,
          true,
          false,
          false,
          2,
          kWarps,
          Shape::kRowChannels,
          [](const Geometry& geometry) {
            return TeamLayout<Shape>::make(geometry.channel_warps).bytes;
          },
          &summary_bytes<float, 2>};
}

/// A few states cost as much as the number that they are padded to, which is still less than on the
/// floor.
constexpr Variant kVariants[] = {
    make_variant<float, 2, true>(),
    make_variant<float, 2, true, true>(),
    make_variant<float, 2, false>(),  // constant B and C
    make_team_variant<2>(),
    make_team_variant<4>(),
    make_variant<Complex<float>, 3, true>(),
};

const Variant* find_variant(const ScanParams& params) {
  for (const Variant& variant : kVariants) {
    if (variant.least_states <= params.dstate && params.dstate <= variant.most_states &&
        variant.is_complex == params.is_complex && variant.variable == params.variable_B &&
        variant.has_input_delta == params.input_delta.present()) {
      return &variant;
    }
  }
  return nullptr;
}

/// The fewest channels of a tile. A block sums dB and dC over its channels and writes one partial
/// sum for all of them. Tiles of this many channels, or of the whole group, keep the partial sums
/// below dstate·dim·seqlen / 32 values. If all tiles run at the same time, they may have half as
/// many channels.
constexpr int kMinBackwardTile = 64;

/// From this number of warps per block on, registers limit a multiprocessor to one block.
constexpr int kFewestWarpsAlone = 7;

/// Returns whether some tiles are split so that all multiprocessors have the same amount of work:
/// see BlockOrder. If whole tiles come close to that, the split costs more than it gains.
bool splits_tiles(const BackwardParams& params, const Geometry& geometry, const Device& device) {
  const Figures::StreamedBackward& figures = figures_of(device).streamed_backward;
  const int64_t rounds = ceil_div(geometry.work_items, device.multiprocessors);
  return geometry.segments == 1 && params.seqlen >= figures.ordered_steps &&
         geometry.warps() >= kFewestWarpsAlone && rounds > 1 &&
         static_cast<double>(geometry.work_items) <
             figures.good_balance * static_cast<double>(rounds * device.multiprocessors);
}

/// Lets tiles share partial sums if there are several times as many tiles as it takes to fill the
/// multiprocessors: see BlockOrder.
void share_partial_sums(const BackwardParams& params, const Device& device, Geometry& geometry) {
  if (!params.variable_B || geometry.segments > 1 || geometry.warps() < kFewestWarpsAlone ||
      params.seqlen < figures_of(device).streamed_backward.ordered_steps) {
    return;
  }
  const int64_t sequences = params.batch * params.groups;
  const int64_t rounds = geometry.tiles / ceil_div(device.multiprocessors, sequences);
  if (rounds < 2) return;
  geometry.set_tiles(rounds);
  geometry.set_tiles(ceil_div(geometry.tiles, geometry.sums_per_group));  // no sum without tiles
  geometry.work_items = sequences * geometry.sums_per_group;
}

/// Returns the time of `count` chunks, or blocks of equal length, one after another, in the unit of
/// figures.h.
double time_of(int64_t count, const Geometry& geometry, const Figures::StreamedBackward& figures) {
  const int warps = round_up(geometry.warps(), kSchedulers);
  return static_cast<double>(count * (warps + figures.half_rate_warps));
}

/// Returns the estimated time in that unit. A multiprocessor runs one block at a time.
double estimated_time(const Geometry& geometry, int64_t chunks, const Device& device) {
  const Figures::StreamedBackward& figures = figures_of(device).streamed_backward;
  const int64_t places = device.multiprocessors;
  const auto waves = static_cast<double>(ceil_div(geometry.work_items, places));
  if (geometry.segments == 1) return waves * (figures.delay + time_of(chunks, geometry, figures));
  const double segment = time_of(geometry.segment_steps / kChunk, geometry, figures);
  return figures.segments_delay + waves * (figures.delay + figures.summarized * segment);
}

void cut_packed(const BackwardParams& params, const Device& device, BackwardPlan& plan) {
  const Figures::Segments& figures = figures_of(device).segments;
  Geometry& geometry = plan.geometry;
  const int64_t places = device.multiprocessors;
  const int64_t items = geometry.work_items;
  const int64_t wanted =
      std::min(figures.packed_waves_backward * places / items, kMostPackedSegments);
  cut_time(params.seqlen, std::min(wanted, params.seqlen / figures.steps), geometry);
  if (geometry.segments == 1) return;
  plan.cuts = packed_cuts(geometry.segments, geometry.segment_steps / kChunk,
                          params.seqlen / kChunk * items / places, true);
}

/// Chooses the number of warps per block with which the busiest multiprocessor finishes first. Cuts
/// time into segments if that is faster and blocks leave half of the device idle. Leaves work_items
/// at 0 if shared memory has room for no block.
void choose_geometry(const BackwardParams& params, const Variant& variant, const Device& device,
                     BackwardPlan& plan) {
  const Figures::StreamedBackward& figures = figures_of(device).streamed_backward;
  Geometry geometry;
  geometry.lane_bits = variant.lane_bits;
  geometry.state_warps = variant.team_warps;
  geometry.group_channels = params.dim / params.groups;
  const int useful = static_cast<int>(
      std::min<int64_t>(ceil_div(geometry.group_channels, geometry.warp_channels()),
                        kMaxWarps / geometry.state_warps));
  int most = useful;
  const auto fits = [&] {
    geometry.channel_warps = most;
    return variant.shared_bytes(geometry) <= device.block_shared_bytes;
  };
  while (most > 0 && !fits()) --most;
  const bool is_packed = params.packed.present();
  const int64_t places = device.multiprocessors;
  const int64_t chunks = ceil_div(params.seqlen, kChunk);
  const auto load_of = [&](int64_t items) { return time_of(items, geometry, figures); };
  Geometry& best = plan.geometry;
  Geometry cut;  // the best geometry for segments
  double best_load = 0, cut_load = 0;
  const auto keep = [](const Geometry& candidate, double load, Geometry& kept, double& kept_load) {
    if (kept.work_items > 0 && load > kept_load) return;
    kept = candidate;
    kept_load = load;
  };
  for (geometry.channel_warps = 1; geometry.channel_warps <= most; ++geometry.channel_warps) {
    geometry.set_tiles();
    const int64_t items = geometry.work_items = params.batch * params.groups * geometry.tiles;
    // A tile writes one partial sum of dB and dC for all of its channels. Twice as many partial
    // sums cost less than multiprocessors without a tile.
    const int fewest_channels = items > places ? kMinBackwardTile : kMinBackwardTile / 2;
    if (params.variable_B && geometry.tile_channels() < fewest_channels &&
        geometry.warps() < std::min(most * geometry.state_warps, kMaxWarps - 2)) {
      continue;
    }
    // Split tiles spread the work evenly.
    const double load = splits_tiles(params, geometry, device)
                            ? load_of(items) * figures.split_cost
                            : load_of(ceil_div(items, places) * places);
    keep(geometry, load, best, best_load);
    if (!params.variable_B || 2 * items > places) continue;
    if (is_packed) {  // segments spread work of any size evenly
      keep(geometry, load_of(items), cut, cut_load);
      continue;
    }
    for (int64_t waves = 1; waves <= figures_of(device).segments.blocks; ++waves) {
      Geometry candidate = geometry;
      cut_time(params.seqlen, std::min(waves * places / items, chunks), candidate);
      keep(candidate, estimated_time(candidate, chunks, device), cut, cut_load);
    }
  }
  if (cut.work_items == 0) return;
  if (is_packed) {
    if (params.seqlen < 2 * figures_of(device).segments.steps) return;
    best = cut;
    return cut_packed(params, device, plan);
  }
  if (cut_load < estimated_time(best, chunks, device)) best = cut;
}

/// Returns whether the kernels for u's type sum dB and dC with as many digits as these gradients
/// have.
bool sums_have_digits(const BackwardParams& params, const Variant& variant) {
  const DType dtype = params.u.dtype;
  if (!variant.variable || element_size(dtype) > 2) return true;
  const auto suffice_for = [&](const ArrayView& gradient) {
    return !gradient.present() || gradient.dtype == DType::kBFloat16 ||
           (gradient.dtype == DType::kFloat16 && dtype == DType::kFloat16 && variant.is_common);
  };
  return suffice_for(params.dB) && suffice_for(params.dC);
}

/// Requires one type of all rows. B and C may have other types, but their gradients must not need
/// more digits than the sums over channels have.
Refusal refuse(const BackwardParams& params, const Variant* variant) {
  if (params.is_double) return {"arithmetic must be fp32"};
  if (params.variable_B != params.variable_C) {
    return {"B and C must both be variable or both be constant"};
  }
  const bool takes_input_delta =
      variant != nullptr && !params.packed.present() && has_all_kernels(params.method);
  if (params.input_delta.present() && !takes_input_delta) return kNoInputDelta;
  if (variant == nullptr) {
    return {params.is_complex ? "with complex A, B and C must be variable and dstate at most 16"
                              : "dstate must be at most 64, or 16 where B and C are constant",
            params.dstate};
  }
  if (params.wanted == BackwardWanted::kStateAlone && !params.variable_B) return kNotStateAlone;
  if (!variant->is_common && !has_all_kernels(params.method)) return no_other_methods(params);
  if (params.packed.present() && !variant->is_common) return not_packed(params);
  if (params.seqlen < 1) return {"seqlen must be positive", params.seqlen};
  if (!params.dout.present()) return {"there must be a gradient of out"};
  const auto size = element_size(params.u.dtype);
  if (size > 4 || !have_one_dtype(params, rows_of(params))) {
    return {"u, delta, z, input_delta, dout and their gradients must have one dtype"};
  }
  if (!sums_have_digits(params, *variant)) {
    return {
        "where u has 16 bits, B and C must be bfloat16, or float16 as u is with real A and dstate "
        "at most 16"};
  }
  return {};
}

/// Returns whether strides are small enough: kernels compute offsets between the lanes of a warp in
/// 32 bits.
bool fits_lanes(const RowArray& rows) {
  const auto fits = [](int64_t stride) {
    return stride < kLargestStride && stride > -kLargestStride;
  };
  return fits(rows.channel) && fits(rows.step);
}

/// If the rows' layouts differ, kernels support vectors along steps only in the order of the scan.
template <size_t kCount>
void keep_order(LaneMap map, std::array<RowArray, kCount>& rows) {
  if (map == LaneMap::kSteps) return;
  for (RowArray& it : rows) it.has_step_vectors = it.has_step_vectors && it.step > 0;
}

void take_scratch(const BackwardParams& params, BackwardPlan& plan) {
  BackwardScratch& scratch = plan.scratch;
  const Geometry& geometry = plan.geometry;
  const int64_t state_bytes = params.is_complex ? 8 : 4;
  const int64_t channels = geometry.segments * params.batch * params.dim;
  const int64_t channel_states = channels * plan.padded_states;
  scratch.packed_bc = scratch.take(
      params.variable_B, PackedBC(params, plan.padded_states).bytes(params, geometry.segments), 1);
  if (wants_summary_alone(params)) {
    return scratch.take_segments(true, channel_states, state_bytes);
  }
  scratch.dBC_partials = scratch.take(params.variable_B,
                                      geometry.sums_per_group * params.batch * params.groups *
                                          params.seqlen * 2 * plan.padded_states,
                                      state_bytes);
  scratch.take_sums(params, channel_states, state_bytes, channels, sizeof(float));
  scratch.factors = scratch.take(geometry.segments > 1, channel_states, state_bytes);
  scratch.offsets =
      scratch.take(geometry.segments > 1 || plan.split_tiles > 0, channel_states, state_bytes);
  scratch.flags = scratch.take(plan.flags > 0, plan.flags, sizeof(int));
}

}  // namespace

bool sums_have_digits(const BackwardParams& params) {
  const Variant* const variant = find_variant(params);
  return variant == nullptr || sums_have_digits(params, *variant);
}

Refusal make_plan(const BackwardParams& call, const Device& device, BackwardPlan& plan) {
  const BackwardParams params = in_chunks(call);
  const Variant* const variant = find_variant(params);
  if (const Refusal refusal = refuse(params, variant)) return refusal;
  if (!plan_rows(params, variant->row_channels, rows_of(params), plan.map, plan.rows) ||
      !std::all_of(plan.rows.begin(), plan.rows.end(), &fits_lanes)) {
    return {"strides of channels and steps must be less than 16 MiB"};
  }
  keep_order(plan.map, plan.rows);
  choose_geometry(params, *variant, device, plan);
  Geometry& geometry = plan.geometry;
  if (geometry.work_items == 0) return kNotEnoughSharedMemory;
  // In the summary kernel, every warp moves the rows of all its channels.
  if ((geometry.segments > 1 || wants_summary_alone(params)) &&
      !plan_rows(params, geometry.warp_channels(), rows_of(params), plan.summary_map,
                 plan.summary_rows)) {
    return {"strides of channels must be positive and less than 16 MiB"};
  }
  keep_order(plan.summary_map, plan.summary_rows);
  plan.team_warps = variant->team_warps;
  plan.padded_states = static_cast<int>(variant->most_states);
  plan.split_tiles = 0;
  if (!wants_summary_alone(params)) {
    if (splits_tiles(params, geometry, device)) plan.split_tiles = device.multiprocessors;
    share_partial_sums(params, device, geometry);
  }
  const int64_t tiles = geometry.tiles_per_sum * geometry.work_items;
  constexpr int64_t kMostSteps = int64_t{1} << 24;  // per segment: offsets have 32 bits
  const int64_t segment = geometry.segments > 1 ? geometry.segment_steps : params.seqlen;
  if (tiles + plan.split_tiles > kMaxBlocks || segment > kMostSteps) {
    return {"a grid of blocks cannot have that many channels, or a block that many steps",
            params.seqlen};
  }
  plan.flags = geometry.tiles_per_sum > 1 ? tiles : plan.split_tiles;
  // Of the kernels after the conversion of B and C, the first one is launched as its dependent.
  const bool has_summary = geometry.segments > 1;
  plan.shape = {tiles + plan.split_tiles, geometry.threads(), variant->shared_bytes(geometry),
                params.variable_B && !has_summary};
  plan.summary_shape = {geometry.work_items, geometry.threads(), variant->summary_bytes(geometry),
                        params.variable_B};
  for (LaunchShape* const shape : {&plan.shape, &plan.summary_shape}) {
    shape->shared_bytes = device.even_shared_bytes(shape->blocks, shape->shared_bytes);
  }
  take_scratch(params, plan);
  return {};
}

}  // namespace selective_scan::cuda::streamed
