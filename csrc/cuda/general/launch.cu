// From a parameter struct to a launch: takes one of the special paths, or for the general one picks
// an instantiation and a geometry and lays out scratch memory.
#include "../launch.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "../../core/method_table.h"
#include "../kit/launch_tools.h"
#include "../plan/paths.h"
#include "kernels.h"
#include "shared_layout.h"

namespace selective_scan::cuda {
namespace {

/// The first that accepts a problem is taken.
constexpr Path<ForwardParams>* kForwardPaths[] = {&dstate1_forward, &relay_forward,
                                                  &streamed_forward};
constexpr Path<BackwardParams>* kBackwardPaths[] = {&dstate1_backward, &relay_backward,
                                                    &streamed_backward};

/// SELECTIVE_SCAN_CUDA_KERNELS=general leaves the special paths out, to test and time the general
/// one. Read once.
bool special_paths_wanted() {
  static const bool wanted = [] {
    const char* value = std::getenv("SELECTIVE_SCAN_CUDA_KERNELS");
    const std::string_view name = value == nullptr ? "" : value;
    if (name != "" && name != "general") {
      throw std::runtime_error(
          "selective_scan: SELECTIVE_SCAN_CUDA_KERNELS must be unset or general, got '" +
          std::string(name) + "'");
    }
    return name == "";
  }();
  return wanted;
}

/// Nothing where the general way is to be taken.
template <class Params, size_t kCount>
std::optional<cudaError_t> run_special(Path<Params>* const (&paths)[kCount], const Params& params,
                                       const ScratchMemory& memory, cudaStream_t stream) {
  if (!special_paths_wanted()) return std::nullopt;
  for (Path<Params>* const path : paths) {
    if (const auto result = path(params, memory, stream)) return result;
  }
  return std::nullopt;
}

struct Launches {
  cudaError_t (*forward)(const ForwardParams&, const Geometry&, const SegmentStates&, cudaStream_t);
  cudaError_t (*backward)(const BackwardParams&, const Geometry&, const BackwardWorkspace&,
                          cudaStream_t);
};

/// What the launcher knows of an instantiation's type.
struct Variant {
  TypeSizes sizes;
  MethodTable<Launches> launches;
  cudaError_t (*reduce)(const BackwardParams&, const Geometry&, int, const BackwardWorkspace&,
                        cudaStream_t);
};

template <class T, int kStates, int kLaneBits = kAnyLanes>
const Variant& variant() {
  static constexpr Variant kInstance{{kStates, sizeof(T), sizeof(real_t<T>)},
                                     make_method_table<Launches>([&]<Method kMethod>() {
                                       using Instance = Scan<T, kStates, kLaneBits, kMethod>;
                                       return Launches{&Instance::forward, &Instance::backward};
                                     }),
                                     &reduce_gradients<T>};
  return kInstance;
}

/// Whether dstate fills `lanes` lanes of `states` states each.
bool fills(const ScanParams& params, int lanes, int states) {
  return params.dstate <= lanes * states && params.dstate > (lanes - 1) * states;
}

/// A lane holds 16 bytes of states, or one state where there is one.
const Variant& choose_variant(const ScanParams& params) {
  if (params.is_complex && params.is_double) return variant<Complex<double>, 1>();
  if (params.is_complex) {
    return fills(params, 8, 2) ? variant<Complex<float>, 2, 3>() : variant<Complex<float>, 2>();
  }
  if (params.is_double) return variant<double, 2>();
  if (fills(params, 1, 1)) return variant<float, 1, 0>();
  if (fills(params, 4, 4)) return variant<float, 4, 2>();
  if (fills(params, 16, 4)) return variant<float, 4, 4>();
  return variant<float, 4>();
}

/// Below this a segment's summary and start cost more than what runs at the same time saves.
constexpr int64_t kMinSegmentSteps = 512;

void set_channel_warps(const ScanParams& params, Geometry& geometry, int warps) {
  geometry.channel_warps = warps;
  geometry.set_tiles();
  geometry.work_items = params.batch * params.groups * geometry.tiles;
}

/// Cuts time into segments where the channels alone leave most multiprocessors without work.
void set_segments(const ScanParams& params, const Device& device, Geometry& geometry) {
  constexpr int64_t kBlocksWanted = 4;  // per multiprocessor, so that they finish together
  if (2 * geometry.work_items > device.multiprocessors) return;
  const int64_t wanted = ceil_div(kBlocksWanted * device.multiprocessors, geometry.work_items);
  const int64_t segments = std::min(wanted, params.seqlen / kMinSegmentSteps);
  if (segments < 2) return;
  geometry.segment_steps = round_up(ceil_div(params.seqlen, segments), kChunk);
  geometry.segments = ceil_div(params.seqlen, geometry.segment_steps);
  geometry.work_items *= geometry.segments;
}

/// Blocks of a kernel that a multiprocessor has at a time.
int resident_blocks(const Geometry& geometry, const Device& device, int shared_bytes) {
  constexpr int kRegistersPerThread = 168;
  constexpr int kReservedSharedBytes = 1024;  // per block, by the system
  return std::max(1, std::min(device.shared_bytes / (shared_bytes + kReservedSharedBytes),
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
/// often. Sequences long enough for segments take the largest in any case. `shared_bytes(geometry)`
/// is what a block needs.
template <class SharedBytes>
cudaError_t choose_geometry(const ScanParams& params, const Variant& variant, int min_tile,
                            const SharedBytes& shared_bytes, Geometry& best) {
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  Geometry geometry;
  geometry.group_channels = params.dim / params.groups;
  const int64_t lanes = ceil_div(params.dstate, variant.sizes.states);
  while (geometry.lanes() < lanes && geometry.lanes() < kWarpSize) ++geometry.lane_bits;
  geometry.state_warps = static_cast<int>(ceil_div(lanes, geometry.lanes()));

  const int64_t useful = ceil_div(geometry.group_channels, geometry.warp_channels());
  const int most = static_cast<int>(std::min<int64_t>(useful, kMaxWarps / geometry.state_warps));
  for (; geometry.piece_steps >= kBlockSteps; geometry.piece_steps /= 2) {
    double best_load = 0;
    Geometry largest;
    for (int warps = 1; warps <= most; ++warps) {
      set_channel_warps(params, geometry, warps);
      const int bytes = shared_bytes(geometry);
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
    return cudaSuccess;
  }
  return cudaErrorLaunchOutOfResources;
}

/// Many states leave a block few channels, and each tile's partial sum of dB and dC is as long as B
/// and C. Where there would be more than one such sum for as many channels as there are states,
/// which take as much memory as two arrays like u in fp32, tiles are worked on in rounds: as many
/// as it takes, so long as no multiprocessor has more to do for it.
cudaError_t share_partial_sums(const ScanParams& params, int shared_bytes, Geometry& geometry) {
  constexpr double kAllowedLoad = 1.05;
  constexpr int64_t kMostBlocks = 0x7fffffff;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
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
    const bool fits = candidate.work_items <= kMostBlocks;  // every work item has its block
    if (fits && static_cast<double>(load()) <= most) geometry = candidate;
  }
  return cudaSuccess;
}

cudaError_t choose_geometry(const ForwardParams& params, const Variant& variant,
                            Geometry& geometry) {
  const auto shared_bytes = [&](const Geometry& candidate) {
    return forward_layout(params, candidate, variant.sizes).bytes;
  };
  return choose_geometry(params, variant, 1, shared_bytes, geometry);
}

cudaError_t choose_geometry(const BackwardParams& params, const Variant& variant,
                            Geometry& geometry) {
  const auto shared_bytes = [&](const Geometry& candidate) {
    return backward_layout(params, params.dout, candidate, variant.sizes).bytes;
  };
  const bool any_variable = params.variable_B || params.variable_C;
  const cudaError_t error =
      choose_geometry(params, variant, any_variable ? kMinBackwardTile : 1, shared_bytes, geometry);
  if (error == cudaSuccess && any_variable) {
    return share_partial_sums(params, shared_bytes(geometry), geometry);
  }
  return error;
}

void take_segments(const ScanParams& params, const Variant& variant, const Geometry& geometry,
                   Scratch& scratch, SegmentStates& segments) {
  const int64_t count =
      geometry.segments * params.batch * params.dim * geometry.padded_states(variant.sizes.states);
  const bool wanted = geometry.segments > 1;
  scratch.take(segments.factors, wanted, count, variant.sizes.state_bytes);
  scratch.take(segments.offsets, wanted, count, variant.sizes.state_bytes);
}

void take_workspace(const BackwardParams& params, const Variant& variant, const Geometry& geometry,
                    Scratch& scratch, BackwardWorkspace& workspace) {
  const int64_t padded = geometry.padded_states(variant.sizes.states);
  const int64_t channels = geometry.segments * params.batch * params.dim;
  const int state_bytes = variant.sizes.state_bytes;
  const int real_bytes = variant.sizes.real_bytes;
  scratch.take(workspace.dBC_partials,
               (params.variable_B || params.variable_C) && params.seqlen > 0,
               geometry.sums_per_group * params.batch * params.groups * params.seqlen * 2 * padded,
               state_bytes);
  scratch.take(workspace.dA, true, channels * padded, state_bytes);
  scratch.take(workspace.dB, !params.variable_B, channels * padded, state_bytes);
  scratch.take(workspace.dC, !params.variable_C, channels * padded, state_bytes);
  workspace.channel_parts = geometry.state_warps;
  scratch.take(workspace.dD, params.dD.present(), channels * geometry.state_warps, real_bytes);
  scratch.take(workspace.ddelta_bias, params.ddelta_bias.present(), channels * geometry.state_warps,
               real_bytes);
  take_segments(params, variant, geometry, scratch, workspace.segments);
}

bool is_empty(const ScanParams& params) {
  return params.batch == 0 || params.dim == 0 || params.dstate == 0;
}

}  // namespace

cudaError_t scan_forward(const ForwardParams& params, const ScratchMemory& memory,
                         cudaStream_t stream) {
  if (is_empty(params)) return cudaSuccess;
  if (const auto result = run_special(kForwardPaths, params, memory, stream)) return *result;
  if (params.dstate > kMaxDstate) return cudaErrorInvalidValue;
  const Variant& variant = choose_variant(params);
  Geometry geometry;
  const cudaError_t error = choose_geometry(params, variant, geometry);
  if (error != cudaSuccess) return error;
  SegmentStates segments;
  lay_out(memory,
          [&](Scratch& scratch) { take_segments(params, variant, geometry, scratch, segments); });
  return variant.launches[params.method].forward(params, geometry, segments, stream);
}

cudaError_t scan_backward(const BackwardParams& params, const ScratchMemory& memory,
                          cudaStream_t stream) {
  if (is_empty(params)) return cudaSuccess;
  if (const auto result = run_special(kBackwardPaths, params, memory, stream)) return *result;
  if (params.dstate > kMaxDstate) return cudaErrorInvalidValue;
  const Variant& variant = choose_variant(params);
  Geometry geometry;
  cudaError_t error = choose_geometry(params, variant, geometry);
  if (error != cudaSuccess) return error;
  BackwardWorkspace workspace;
  lay_out(memory,
          [&](Scratch& scratch) { take_workspace(params, variant, geometry, scratch, workspace); });
  error = variant.launches[params.method].backward(params, geometry, workspace, stream);
  if (error != cudaSuccess) return error;
  return variant.reduce(params, geometry, geometry.padded_states(variant.sizes.states), workspace,
                        stream);
}

}  // namespace selective_scan::cuda
