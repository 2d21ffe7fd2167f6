// Which backward scans take the streamed path, and their launch: picks an instantiation and a
// geometry, lays out scratch memory.
#include <algorithm>
#include <array>
#include <initializer_list>
#include <iterator>

#include "../../core/method_table.h"
#include "../kit/launch_tools.h"
#include "../kit/packed_bc.h"
#include "../plan/paths.h"
#include "backward_kernels.h"
#include "backward_shape.h"

namespace selective_scan::cuda {
namespace streamed {
namespace {

/// There are other kernels for one state. Few cost as much as those that they are padded to, which
/// still is less than in the general kernels.
constexpr int64_t kLeastStates = 2;

/// What the launcher knows of an instantiation.
struct Kernels {
  int (*shared_bytes)(const Geometry&) = nullptr;
  cudaError_t (*summarize)(const BackwardArgs&, cudaStream_t) = nullptr;
  cudaError_t (*run)(const BackwardArgs&, cudaStream_t) = nullptr;
};

/// [element size / 2 - 1][LaneMap]
using KernelTables = std::array<std::array<MethodTable<Kernels>, 2>, 2>;

/// The shape of an instantiation, without its type.
struct Variant {
  int64_t least_states;
  int64_t most_states;
  bool is_complex;
  bool variable;
  int lane_bits;
  int team_warps;    // that share a channel
  int slice_states;  // of a channel, in a warp
  int row_channels;  // whose rows a warp moves
  KernelTables kernels;
};

/// The tables of kernels_of<kSize, kMap, kMethod>().
template <class KernelsOf>
KernelTables make_tables(const KernelsOf& kernels_of) {
  const auto table = [&]<int kSize, LaneMap kMap>() {
    return make_method_table<Kernels>(
        [&]<Method kMethod>() { return kernels_of.template operator()<kSize, kMap, kMethod>(); });
  };
  using enum LaneMap;
  static_assert(static_cast<int>(kSteps) == 0 && static_cast<int>(kChannels) == 1);
  return {{{table.template operator()<2, kSteps>(), table.template operator()<2, kChannels>()},
           {table.template operator()<4, kSteps>(), table.template operator()<4, kChannels>()}}};
}

template <class T, int kLaneBits, bool kVariable>
Variant make_variant() {
  using Shape = BackwardShape<T, kLaneBits>;
  return {kLeastStates,
          Shape::kPadded,
          is_complex_v<T>,
          kVariable,
          kLaneBits,
          1,
          Shape::kPadded,
          Shape::kChannels,
          make_tables([&]<int kSize, LaneMap kMap, Method kMethod>() {
            using Instance = StreamedBackward<T, kLaneBits, kSize, kVariable, kMethod, kMap>;
            return Kernels{&Instance::shared_bytes, &Instance::summarize, &Instance::run};
          })};
}

/// For all that needs more than half of the warps.
template <int kWarps>
Variant make_team_variant() {
  using Shape = TeamShape<kWarps>;
  constexpr int kSlice = Shape::kPadded;
  return {kWarps / 2 * kSlice + 1,
          kWarps * kSlice,
          false,
          true,
          2,
          kWarps,
          kSlice,
          Shape::kRowChannels,
          make_tables([&]<int kSize, LaneMap kMap, Method kMethod>() {
            using Instance = TeamBackward<kWarps, kSize, kMethod, kMap>;
            using Summary = StreamedBackward<float, 2, kSize, true, kMethod, kMap>;
            return Kernels{&Instance::shared_bytes, &Summary::summarize, &Instance::run};
          })};
}

/// See instantiations.py.
const Variant* find_variant(const ScanParams& params) {
  static const std::array variants = {
      make_variant<float, 2, true>(),
      make_variant<float, 2, false>(),
      make_team_variant<2>(),
      make_team_variant<4>(),
      make_variant<Complex<float>, 3, true>(),
  };
  for (const Variant& variant : variants) {
    if (variant.least_states <= params.dstate && params.dstate <= variant.most_states &&
        variant.is_complex == params.is_complex && variant.variable == params.variable_B &&
        variant.variable == params.variable_C) {
      return &variant;
    }
  }
  return nullptr;
}

/// Everything about a launch that does not depend on the scratch memory.
struct Plan {
  Kernels kernels;
  int padded_states = 0;
  BackwardArgs args;
  RowArray summary_rows[kRowArrays];  // where there are segments
};

/// Below this a segment's summary and start cost more than what runs at the same time saves.
constexpr int64_t kMinSegmentSteps = 512;

/// With at least so many warps a multiprocessor has registers for one block only.
constexpr int kFewestWarpsAlone = 7;

/// Shorter tiles are done too soon for a block to wait for another one.
constexpr int64_t kFewestOrderedSteps = 8 * kChunk;

/// Whether some tiles are split, so that multiprocessors have the same to do: see BlockOrder. Where
/// whole tiles come near to that, the split costs more than it gains.
bool splits_tiles(const BackwardParams& params, const Geometry& geometry, const Device& device) {
  constexpr double kGoodBalance = 0.92;
  const int64_t rounds = ceil_div(geometry.work_items, device.multiprocessors);
  return geometry.segments == 1 && params.seqlen >= kFewestOrderedSteps &&
         geometry.warps() >= kFewestWarpsAlone && rounds > 1 &&
         static_cast<double>(geometry.work_items) <
             kGoodBalance * static_cast<double>(rounds * device.multiprocessors);
}

/// Has tiles share partial sums where there are several times as many of them as it takes to fill
/// the multiprocessors: see BlockOrder.
void share_partial_sums(const BackwardParams& params, const Device& device, Geometry& geometry) {
  if (!params.variable_B || geometry.segments > 1 || geometry.warps() < kFewestWarpsAlone ||
      params.seqlen < kFewestOrderedSteps) {
    return;
  }
  const int64_t sequences = params.batch * params.groups;
  const int64_t rounds = geometry.tiles / ceil_div(device.multiprocessors, sequences);
  if (rounds < 2) return;
  geometry.set_tiles(rounds);
  geometry.set_tiles(ceil_div(geometry.tiles, geometry.sums_per_group));  // none that has no tiles
  geometry.work_items = sequences * geometry.sums_per_group;
}

/// Takes the number of warps in a block with which the busiest multiprocessor is done first. A
/// multiprocessor has one block at a time, and with w warps issues at w / (w + kWarpsForHalfRate)
/// of its full rate.
bool choose_geometry(const BackwardParams& params, const Variant& variant, const Device& device,
                     const Kernels& kernels, Geometry& best) {
  constexpr int kWarpsForHalfRate = 6;
  constexpr int kFewestWarps = 8;        // where shared memory has no room for more
  constexpr double kCostOfSplit = 1.05;  // more blocks begin and end
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
    return kernels.shared_bytes(geometry) <= device.block_shared_bytes;
  };
  while (most > 0 && !fits()) --most;
  if (params.variable_B && most < useful && most * geometry.state_warps < kFewestWarps) {
    return false;
  }
  double best_load = 0;
  for (geometry.channel_warps = 1; geometry.channel_warps <= most; ++geometry.channel_warps) {
    const int warps = geometry.warps();
    // A tile writes one partial sum of dB and dC for all of its channels.
    if (params.variable_B && geometry.tile_channels() < kMinBackwardTile &&
        warps < std::min(most * geometry.state_warps, kMaxWarps - 2)) {
      continue;
    }
    geometry.set_tiles();
    geometry.work_items = params.batch * params.groups * geometry.tiles;
    // In segments or with split tiles, work of any size is spread evenly.
    const bool cut =
        2 * geometry.work_items <= device.multiprocessors && params.seqlen >= 2 * kMinSegmentSteps;
    const bool splits = splits_tiles(params, geometry, device);
    const int64_t rounds = cut || splits ? geometry.work_items
                                         : ceil_div(geometry.work_items, device.multiprocessors) *
                                               device.multiprocessors;
    const double load =
        static_cast<double>(rounds * (warps + kWarpsForHalfRate)) * (splits ? kCostOfSplit : 1.0);
    if (best.work_items == 0 || load <= best_load) {
      best = geometry;
      best_load = load;
    }
  }
  if (best.work_items == 0) return false;
  if (2 * best.work_items <= device.multiprocessors) {
    constexpr int64_t kBlocksWanted = 4;  // per multiprocessor, so that they finish together
    const int64_t wanted = kBlocksWanted * device.multiprocessors / best.work_items;
    const int64_t segments = std::min(wanted, params.seqlen / kMinSegmentSteps);
    if (segments >= 2) {
      best.segment_steps = round_up(ceil_div(params.seqlen, segments), kChunk);
      best.segments = ceil_div(params.seqlen, best.segment_steps);
      best.work_items *= best.segments;
    }
  }
  return true;
}

/// See prepare_rows().
bool prepare_all_rows(const BackwardParams& params, int items, RowArray (&rows)[kRowArrays],
                      LaneMap& map) {
  return prepare_rows(
      params, items,
      {&params.u, &params.delta, &params.z, &params.dout, &params.du, &params.ddelta, &params.dz},
      map, {&rows[0], &rows[1], &rows[2], &rows[3], &rows[4], &rows[5], &rows[6]});
}

bool make_plan(const BackwardParams& params, Plan& plan) {
  if (params.is_double || params.batch == 0 || params.dim == 0 || params.seqlen == 0) return false;
  if (!params.dout.present()) return false;
  const Variant* const variant = find_variant(params);
  if (variant == nullptr) return false;

  // All of these have one type; B and C may have others, but their gradients must not need more
  // digits than the sums over channels have.
  const DType dtype = params.u.dtype;
  for (const ArrayView* view :
       {&params.delta, &params.z, &params.dout, &params.du, &params.ddelta, &params.dz}) {
    if (view->present() && view->dtype != dtype) return false;
  }
  const auto size = element_size(dtype);
  if (size != 2 && size != 4) return false;
  if (variant->variable && size == 2 &&
      (element_size(params.B.dtype) != 2 || element_size(params.C.dtype) != 2)) {
    return false;
  }
  plan.args = {params, {}, {}, {}, nullptr, 0, 0, nullptr};
  BackwardArgs& args = plan.args;
  LaneMap map;
  if (!prepare_all_rows(params, variant->row_channels, args.rows, map)) return false;
  // Kernels compute what differs between the lanes of a warp in 32 bits.
  constexpr int64_t kLargestStride = int64_t{1} << 24;
  const auto fits = [](int64_t stride) {
    return stride < kLargestStride && stride > -kLargestStride;
  };
  for (const RowArray& array : args.rows) {
    if (!fits(array.channel) || !fits(array.step)) {
      return false;
    }
  }
  const auto kernels_for = [&](LaneMap map) {
    const auto& maps = variant->kernels[size / 2 - 1];
    return maps[static_cast<size_t>(map)][params.method];
  };
  plan.kernels = kernels_for(map);
  Device device;
  if (current_device(device) != cudaSuccess ||
      !choose_geometry(params, *variant, device, plan.kernels, args.geometry)) {
    return false;
  }
  if (args.geometry.segments > 1) {
    // Every warp moves the rows of all its channels then.
    const int channels = args.geometry.warp_channels();
    if (!prepare_all_rows(params, channels, plan.summary_rows, map)) return false;
    plan.kernels.summarize = kernels_for(map).summarize;
  }
  args.workspace.slices = variant->team_warps;
  plan.padded_states = variant->team_warps * variant->slice_states;
  if (splits_tiles(params, args.geometry, device)) args.split_tiles = device.multiprocessors;
  share_partial_sums(params, device, args.geometry);
  constexpr int64_t kMostBlocks = 0x7fffffff;
  constexpr int64_t kMostSteps = int64_t{1} << 24;  // of a segment: offsets have 32 bits
  const int64_t segment = args.geometry.segments > 1 ? args.geometry.segment_steps : params.seqlen;
  return args.blocks() <= kMostBlocks && segment <= kMostSteps;
}

/// `stream` is where B and C go in fp32.
void take_workspace(const BackwardParams& params, Plan& plan, Scratch& scratch, void*& stream) {
  BackwardArgs& args = plan.args;
  BackwardWorkspace& workspace = args.workspace;
  const Geometry& geometry = args.geometry;
  const int64_t state_bytes = params.is_complex ? 8 : 4;
  const int64_t step_states = 2 * plan.padded_states;
  const int64_t sequences = params.batch * params.groups;
  const int64_t channels = geometry.segments * params.batch * params.dim;
  const int64_t channel_states = channels * plan.padded_states;
  const bool variable = params.variable_B;
  const PackedBC projections(params, plan.padded_states);
  scratch.take(stream, variable, projections.bytes(params), 1);
  args.projections = static_cast<const char*>(stream);
  args.sequence_bytes = projections.sequence_bytes();
  scratch.take(workspace.dBC_partials, variable,
               geometry.sums_per_group * sequences * params.seqlen * step_states, state_bytes);
  scratch.take(workspace.dA, true, channel_states, state_bytes);
  scratch.take(workspace.dB, !variable, channel_states, state_bytes);
  scratch.take(workspace.dC, !variable, channel_states, state_bytes);
  scratch.take(workspace.dD, params.dD.present(), channels, sizeof(float));
  scratch.take(workspace.ddelta_bias, params.ddelta_bias.present(), channels, sizeof(float));
  scratch.take(workspace.segments.factors, geometry.segments > 1, channel_states, state_bytes);
  scratch.take(workspace.segments.offsets, geometry.segments > 1 || args.split_tiles > 0,
               channel_states, state_bytes);
  scratch.take(args.done, args.flags() > 0, args.flags(), sizeof(int));
}

}  // namespace
}  // namespace streamed

std::optional<cudaError_t> streamed_backward(const BackwardParams& params,
                                             const ScratchMemory& memory, cudaStream_t stream) {
  streamed::Plan plan;
  if (!streamed::make_plan(params, plan)) return std::nullopt;
  void* projections = nullptr;
  lay_out(memory,
          [&](Scratch& scratch) { streamed::take_workspace(params, plan, scratch, projections); });
  const streamed::BackwardArgs& args = plan.args;
  const auto reduce_type = [&](auto type) {
    using T = decltype(type);
    cudaError_t error = cudaSuccess;
    if (projections != nullptr) {
      error =
          convert_projections(params, plan.padded_states, projections, stream,
                              args.workspace.slices, {args.done, static_cast<int>(args.flags())});
    } else if (args.flags() > 0) {
      error = cudaMemsetAsync(args.done, 0, args.flags() * sizeof(int), stream);
    }
    if (error == cudaSuccess && args.geometry.segments > 1) {
      streamed::BackwardArgs summary = args;
      std::copy(std::begin(plan.summary_rows), std::end(plan.summary_rows), summary.rows);
      error = plan.kernels.summarize(summary, stream);
      if (error != cudaSuccess) return error;
      error = combine_segments<T>(params, params.dlast_state, args.geometry, plan.padded_states,
                                  true, args.workspace.segments, stream);
    }
    if (error == cudaSuccess) error = plan.kernels.run(args, stream);
    if (error != cudaSuccess) return error;
    return reduce_gradients<T>(params, args.geometry, plan.padded_states, args.workspace, stream);
  };
  return params.is_complex ? reduce_type(Complex<float>{}) : reduce_type(float{});
}

}  // namespace selective_scan::cuda
