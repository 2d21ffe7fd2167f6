// From a parameter struct to a launch of a streamed forward kernel.
#include "forward.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "../launch_tools.h"
#include "bulk_copy.cuh"
#include "forward_launch.h"
#include "projections.h"

namespace selective_scan::cuda {
namespace streamed {
namespace {

/// What the launcher knows of an instantiation's type.
struct ForwardVariant {
  int warp_channels;
  int padded_states;
  int warp_bytes;  // of shared memory
  bool has_constant;
  bool has_own_maps;
  std::array<bool (*)(LaneMap), kNumMethods> has_dense;
  std::array<cudaError_t (*)(const ForwardArgs&, cudaStream_t), kNumMethods> launch;
};

template <class T, int kStates, int kLaneBits>
const ForwardVariant& variant() {
  using Shape = WarpShape<T, kStates, kLaneBits>;
  static const ForwardVariant instance =
      []<int... kMethods>(std::integer_sequence<int, kMethods...>) {
        return ForwardVariant{
            Shape::kChannels,
            Shape::kPadded,
            Shape::kWarpFloats * static_cast<int>(sizeof(float)),
            StreamedForward<T, kStates, kLaneBits, Method::kZoh>::kHasConstant,
            kHasOwnMaps<T, kStates>,
            {StreamedForward<T, kStates, kLaneBits, static_cast<Method>(kMethods)>::has_dense...},
            {&StreamedForward<T, kStates, kLaneBits, static_cast<Method>(kMethods)>::launch...}};
      }(std::make_integer_sequence<int, kNumMethods>());
  return instance;
}

const ForwardVariant* choose_variant(const ScanParams& params) {
  if (params.is_double) return nullptr;
  if (params.is_complex) {
    return params.dstate >= 2 && params.dstate <= 16 ? &variant<Complex<float>, 2, 3>() : nullptr;
  }
  if (params.dstate < 3 || params.dstate > 64) return nullptr;
  if (params.dstate <= 16) return &variant<float, 4, 2>();
  return params.dstate <= 32 ? &variant<float, 8, 2>() : &variant<float, 16, 2>();
}

bool has_arrays(const ForwardParams& params) {
  if (params.u.dtype == DType::kFloat64) return false;
  const auto matches = [&](const ArrayView& view) {
    return !view.present() || view.dtype == params.u.dtype;
  };
  return matches(params.delta) && matches(params.z) && matches(params.out);
}

bool prepare_arrays(const ForwardParams& params, const ForwardVariant& variant, ForwardArgs& args) {
  if (!prepare_rows(params, variant.warp_channels,
                    {&params.u, &params.delta, &params.z, &params.out}, args.map,
                    {&args.u, &args.delta, &args.z, &args.out})) {
    return false;
  }
  if (args.map == LaneMap::kChannels && variant.has_own_maps) {
    args.map = LaneMap::kPairs;
    for (const RowArray* rows : {&args.u, &args.delta, &args.z, &args.out}) {
      if (rows->present() && !rows->has_vectors) args.map = LaneMap::kElements;
    }
  }
  return true;
}

/// How long `blocks` blocks take for one chunk, in the time of a warp's share of a busy
/// multiprocessor: that has as much to do as it has warps, but with few of them waits. Blocks run
/// in waves of `resident` a multiprocessor, the last of which is short; each begins with a delay.
double estimated_time(const Device& device, int64_t blocks, int64_t chunks, int warps,
                      int resident) {
  // Measured on an H200.
  constexpr double kFewest = 4.4;  // what the first warps have to wait
  constexpr double kHidden = 0.4;  // of that, by each warp
  constexpr double kRing = 0.25;   // of each block, for its own B and C
  constexpr double kDelay = 12;    // at the beginning of a block, shared by those that run with it
  const auto wave = [&](int64_t blocks_each) {
    const auto count = static_cast<double>(blocks_each);
    const double busy = count * (warps + kRing);
    return std::max(busy, kFewest + (1 - kHidden) * busy) +
           kDelay / (count * static_cast<double>(chunks));
  };
  const int64_t capacity = static_cast<int64_t>(device.multiprocessors) * resident;
  const int64_t left = blocks % capacity;
  const double full = static_cast<double>(blocks / capacity) * wave(resident);
  return left == 0 ? full : full + wave(ceil_div(left, device.multiprocessors));
}

/// Takes the number of warps a block with which all are done first; of equals the largest, which
/// reads B and C least often.
cudaError_t choose_tile(const ForwardParams& params, const ForwardVariant& variant,
                        const Device& device, ForwardArgs& args) {
  constexpr int kReservedSharedBytes = 1024;  // per block, by the system
  const int64_t group_channels = params.dim / params.groups;
  const int most = static_cast<int>(
      std::min<int64_t>(ceil_div(group_channels, variant.warp_channels), kMaxWarps));
  const ProjectionStream stream(params, variant.padded_states);
  const int common = static_cast<int>(sizeof(RingBarriers<kRingSlots>)) +
                     (params.variable_B ? kRingSlots * stream.chunk_bytes : 0);
  args.warps = 0;
  double best = 0;
  const auto try_warps = [&](int warps, bool is_dense) {
    const int bytes = common + warps * variant.warp_bytes;
    if (bytes > device.block_shared_bytes) return;
    const int by_shared = device.shared_bytes / (bytes + kReservedSharedBytes);
    const int threads = is_dense ? kDenseResidentThreads : kResidentThreads;
    const int resident = std::max(1, std::min(by_shared, threads / (warps * kWarpSize)));
    const int64_t tiles = ceil_div(group_channels, warps * variant.warp_channels);
    const double time =
        estimated_time(device, params.batch * params.groups * tiles, args.chunks, warps, resident);
    if (args.warps > 0 && time > best) return;
    best = time;
    args.warps = warps;
    args.tiles = tiles;
    args.shared_bytes = bytes;
    args.is_dense = is_dense;
  };
  if (variant.has_dense[static_cast<size_t>(params.method)](args.map)) {
    for (int warps = 1; warps <= most; ++warps) try_warps(warps, true);
  }
  for (int warps = 1; warps <= most; ++warps) try_warps(warps, false);
  return args.warps > 0 ? cudaSuccess : cudaErrorInvalidConfiguration;
}

/// Few channels with long sequences are faster cut into segments, as the general path does it.
bool fills_device(const ForwardParams& params, const ForwardVariant& variant) {
  constexpr int64_t kLongSequence = 1024;
  if (params.seqlen < kLongSequence) return true;
  Device device;
  if (current_device(device) != cudaSuccess) return false;
  const int64_t warps =
      params.batch * params.groups * ceil_div(params.dim / params.groups, variant.warp_channels);
  return warps >= 2 * static_cast<int64_t>(device.multiprocessors);
}

}  // namespace
}  // namespace streamed

using namespace streamed;

bool streamed_forward_accepts(const ForwardParams& params) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  const ForwardVariant* variant = choose_variant(params);
  if (variant == nullptr || params.seqlen < 1 || params.seqlen > kMost - kChunk) return false;
  if (params.variable_B != params.variable_C) return false;
  if (!params.variable_B && !variant->has_constant) return false;
  // The largest grids.
  const int64_t sequences = params.batch * params.groups;
  if (sequences * ceil_div(params.seqlen, kChunk) > kMost) return false;
  if (sequences * ceil_div(params.dim / params.groups, variant->warp_channels) > kMost)
    return false;
  ForwardArgs args;
  return has_arrays(params) && prepare_arrays(params, *variant, args) &&
         fills_device(params, *variant);
}

int64_t streamed_forward_workspace_bytes(const ForwardParams& params) {
  if (!params.variable_B) return 0;
  return ProjectionStream(params, choose_variant(params)->padded_states).bytes(params);
}

cudaError_t streamed_forward(const ForwardParams& params, void* workspace, cudaStream_t stream) {
  const ForwardVariant& variant = *choose_variant(params);
  ForwardArgs args{};
  args.params = params;
  args.chunks = ceil_div(params.seqlen, kChunk);
  if (!prepare_arrays(params, variant, args)) return cudaErrorInvalidValue;
  Device device;
  cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  if ((error = choose_tile(params, variant, device, args)) != cudaSuccess) return error;
  if (params.variable_B) {
    error = convert_projections(params, variant.padded_states, workspace, stream);
    if (error != cudaSuccess) return error;
    args.projections = static_cast<const char*>(workspace);
    args.is_dependent = device.major >= 9;
  }
  return variant.launch[static_cast<size_t>(params.method)](args, stream);
}

}  // namespace selective_scan::cuda
