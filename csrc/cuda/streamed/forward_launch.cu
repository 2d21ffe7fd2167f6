// From a parameter struct to a launch of a streamed forward kernel.
#include "forward_kernels.h"

#include <algorithm>
#include <array>
#include <limits>

#include "../../core/method_table.h"
#include "../kit/bulk_copy.cuh"
#include "../kit/launch_tools.h"
#include "../kit/packed_bc.h"
#include "../plan/paths.h"

namespace selective_scan::cuda {
namespace streamed {
namespace {

struct Kernels {
  bool (*has_few_registers)(LaneMap, int64_t);
  cudaError_t (*launch)(const ForwardArgs&, cudaStream_t);
  cudaError_t (*summarize)(const ForwardArgs&, cudaStream_t);
};

/// What the launcher knows of an instantiation's type.
struct ForwardVariant {
  int warp_channels;
  int padded_states;
  int warp_bytes;  // of shared memory
  bool has_constant;
  bool has_own_maps;
  MethodTable<Kernels> kernels;
};

template <class T, int kStates, int kLaneBits>
const ForwardVariant& variant() {
  using Shape = WarpShape<T, kStates, kLaneBits>;
  static constexpr ForwardVariant kInstance{
      Shape::kChannels,
      Shape::kPadded,
      Shape::kWarpFloats * static_cast<int>(sizeof(float)),
      StreamedForward<T, kStates, kLaneBits, Method::kZoh>::kHasConstant,
      kHasOwnMaps<T, kStates>,
      make_method_table<Kernels>([&]<Method kMethod>() {
        using Instance = StreamedForward<T, kStates, kLaneBits, kMethod>;
        return Kernels{&Instance::has_few_registers, &Instance::launch, &Instance::summarize};
      })};
  return kInstance;
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
    args.map = LaneMap::kStepPairs;
    for (const RowArray* rows : {&args.u, &args.delta, &args.z, &args.out}) {
      if (rows->present() && !rows->has_vectors) args.map = LaneMap::kElements;
    }
  }
  return true;
}

constexpr int kReservedSharedBytes = 1024;  // per block, by the system

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
  constexpr double kFullest = 0.67;  // of the warps that all would be if each scheduler had as many
                                     // as the fullest: a block begins with a scheduler of its own
  constexpr int kSchedulers = 4;
  const double fullest = warps <= 2 ? warps : kSchedulers * ceil_div(warps, kSchedulers);
  const double share = kFullest * fullest + (1 - kFullest) * warps;
  const auto wave = [&](int64_t blocks_each) {
    const auto count = static_cast<double>(blocks_each);
    const double busy = count * (share + kRing);
    return std::max(busy, kFewest + (1 - kHidden) * busy) +
           kDelay / (count * static_cast<double>(chunks));
  };
  const int64_t capacity = static_cast<int64_t>(device.multiprocessors) * resident;
  const int64_t left = blocks % capacity;
  const double full = static_cast<double>(blocks / capacity) * wave(resident);
  return left == 0 ? full : full + wave(ceil_div(left, device.multiprocessors));
}

/// Cuts time into segments so that `blocks` times as many fill `waves` waves. False where these
/// would be short.
bool cut(int64_t chunks, int64_t blocks, int64_t capacity, int waves, ForwardGeometry& geometry) {
  constexpr int64_t kFewestChunks = 8;
  const int64_t wanted = std::min(waves * capacity / blocks, chunks / kFewestChunks);
  if (wanted < 2) return false;
  geometry.segment_chunks = ceil_div(chunks, wanted);
  geometry.segments = ceil_div(chunks, geometry.segment_chunks);
  return geometry.segments > 1;
}

/// How much shared memory blocks of `bytes` ask for so that a single wave of them is spread evenly:
/// behind the kernel that writes B and C, some multiprocessors would take all `resident` that they
/// have room for, and others fewer.
int even_shared_bytes(const Device& device, int64_t blocks, int resident, int bytes) {
  const auto wanted = static_cast<int>(ceil_div(blocks, device.multiprocessors));
  if (wanted >= resident) return bytes;
  constexpr int kUnit = 128;
  const int too_many = device.shared_bytes / (wanted + 1) - kReservedSharedBytes;
  return std::max(bytes, round_up(too_many + 1, kUnit));
}

/// How many warps a multiprocessor has if every channel has one place, at whatever time.
double warps_wanted(const ForwardParams& params, const ForwardVariant& variant,
                    const Device& device) {
  const int64_t warps =
      params.batch * params.groups * ceil_div(params.dim / params.groups, variant.warp_channels);
  return static_cast<double>(warps) / device.multiprocessors;
}

/// Takes the number of warps a block and of segments with which all are done first; of equal
/// numbers of warps the largest, which reads B and C least often.
bool choose_geometry(const ForwardParams& params, const ForwardVariant& variant,
                     const Device& device, ForwardArgs& args) {
  // Of finding out what segments do, measured on an H200.
  constexpr double kSummaryShare = 0.8;  // of the time for the scan
  constexpr double kSummaryDelay = 40;   // in the units of estimated_time()
  constexpr double kUnevenness = 0.08;   // lost where there is one wave, less where there are more
  constexpr double kCoupling = 0.01;     // of each warp's time, by each other warp in the block
  constexpr double kSparse = 0.02;       // where fewer warps are at hand
  constexpr double kManyWarps = 6;       // with so many a multiprocessor that does not pay
  const bool may_cut = params.variable_B && warps_wanted(params, variant, device) < kManyWarps;
  const int64_t group_channels = params.dim / params.groups;
  const int most = static_cast<int>(
      std::min<int64_t>(ceil_div(group_channels, variant.warp_channels), kMaxWarps));
  const PackedBC stream(params, variant.padded_states);
  const int common = static_cast<int>(sizeof(RingBarriers<kRingSlots>)) +
                     (params.variable_B ? kRingSlots * stream.chunk_bytes : 0);
  ForwardGeometry best;
  double best_time = 0;
  // `waves`: of segments, or 0
  const auto keep_best = [&](const ForwardGeometry& candidate, int resident, int waves) {
    const int64_t blocks = params.batch * params.groups * candidate.tiles * candidate.segments;
    double time =
        static_cast<double>(candidate.segment_chunks) *
        estimated_time(device, blocks, candidate.segment_chunks, candidate.warps, resident);
    if (waves > 0) {
      time *= 1 + kSummaryShare + kUnevenness / waves + kCoupling * candidate.warps +
              (candidate.few_registers ? 0 : kSparse);
      time += kSummaryDelay;
    }
    if (best.warps > 0 && time > best_time) return;
    best_time = time;
    best = candidate;
  };
  const auto try_warps = [&](int warps, bool few_registers) {
    ForwardGeometry candidate;
    candidate.warps = warps;
    candidate.few_registers = few_registers;
    candidate.shared_bytes = common + warps * variant.warp_bytes;
    if (candidate.shared_bytes > device.block_shared_bytes) return;
    const int by_shared = device.shared_bytes / (candidate.shared_bytes + kReservedSharedBytes);
    const int threads = few_registers ? kFewRegistersResidentThreads : kResidentThreads;
    const int resident = std::max(1, std::min(by_shared, threads / (warps * kWarpSize)));
    candidate.tiles = ceil_div(group_channels, warps * variant.warp_channels);
    candidate.segment_chunks = args.chunks;
    const int64_t blocks = params.batch * params.groups * candidate.tiles;
    ForwardGeometry whole = candidate;
    whole.shared_bytes = even_shared_bytes(device, blocks, resident, candidate.shared_bytes);
    keep_best(whole, resident, 0);
    if (!may_cut) return;
    const int64_t capacity = static_cast<int64_t>(device.multiprocessors) * resident;
    for (const int waves : {1, 2, 4}) {
      if (cut(args.chunks, blocks, capacity, waves, candidate))
        keep_best(candidate, resident, waves);
    }
  };
  const int64_t size = element_size(params.u.dtype);
  if (variant.kernels[params.method].has_few_registers(args.map, size)) {
    for (int warps = 1; warps <= most; ++warps) try_warps(warps, true);
  }
  for (int warps = 1; warps <= most; ++warps) try_warps(warps, false);
  static_cast<ForwardGeometry&>(args) = best;
  return best.warps > 0;
}

/// Few channels with long sequences are faster cut into segments. With constant B and C the general
/// path does that.
bool fills_device(const ForwardParams& params, const ForwardVariant& variant,
                  const Device& device) {
  constexpr int64_t kLongSequence = 1024;
  return params.variable_B || params.seqlen < kLongSequence ||
         warps_wanted(params, variant, device) >= 2;
}

bool fits_grids(const ForwardParams& params, const ForwardVariant& variant) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  if (params.seqlen < 1 || params.seqlen > kMost - kChunk) return false;
  const int64_t sequences = params.batch * params.groups;
  return sequences * ceil_div(params.seqlen, kChunk) <= kMost &&
         sequences * ceil_div(params.dim / params.groups, variant.warp_channels) <= kMost;
}

/// Everything about a launch that does not depend on the scratch memory. False where the problem is
/// not for these kernels.
bool make_plan(const ForwardParams& params, const ForwardVariant& variant, ForwardArgs& args) {
  if (params.variable_B != params.variable_C) return false;
  if (!params.variable_B && !variant.has_constant) return false;
  args.params = params;
  args.chunks = ceil_div(params.seqlen, kChunk);
  Device device;
  if (!fits_grids(params, variant) || !has_arrays(params) ||
      !prepare_arrays(params, variant, args) || current_device(device) != cudaSuccess ||
      !fills_device(params, variant, device) || !choose_geometry(params, variant, device, args)) {
    return false;
  }
  // With segments there are kernels in between.
  args.is_dependent = params.variable_B && args.segments == 1;
  return true;
}

/// `projections` is where B and C go in fp32.
void take_workspace(const ForwardVariant& variant, ForwardArgs& args, Scratch& scratch,
                    char*& projections) {
  const ForwardParams& params = args.params;
  const int64_t states = args.segments * params.batch * params.dim * variant.padded_states;
  const int64_t state_bytes = params.is_complex ? 8 : 4;
  scratch.take(projections, params.variable_B,
               PackedBC(params, variant.padded_states).bytes(params), 1);
  scratch.take(args.states.factors, args.segments > 1, states, state_bytes);
  scratch.take(args.states.offsets, args.segments > 1, states, state_bytes);
  args.projections = projections;
}

}  // namespace
}  // namespace streamed

std::optional<cudaError_t> streamed_forward(const ForwardParams& params,
                                            const ScratchMemory& memory, cudaStream_t stream) {
  using namespace streamed;
  const ForwardVariant* const variant = choose_variant(params);
  ForwardArgs args{};
  if (variant == nullptr || !make_plan(params, *variant, args)) return std::nullopt;
  char* projections = nullptr;
  lay_out(memory, [&](Scratch& scratch) { take_workspace(*variant, args, scratch, projections); });
  const Kernels& kernels = variant->kernels[params.method];
  const int padded_states = variant->padded_states;
  cudaError_t error = cudaSuccess;
  if (params.variable_B) {
    error = convert_projections(params, padded_states, projections, stream);
    if (error != cudaSuccess) return error;
  }
  if (args.segments > 1) {
    if ((error = kernels.summarize(args, stream)) != cudaSuccess) return error;
    Geometry geometry;
    geometry.segments = args.segments;
    const auto combine =
        params.is_complex ? &combine_segments<Complex<float>> : &combine_segments<float>;
    error =
        combine(params, params.initial_state, geometry, padded_states, false, args.states, stream);
    if (error != cudaSuccess) return error;
  }
  return kernels.launch(args, stream);
}

}  // namespace selective_scan::cuda
