// Launches of the relay kernels: which problems they take, and in which shape.
#include <algorithm>
#include <array>
#include <iterator>

#include "../../core/method_table.h"
#include "../kit/launch_tools.h"
#include "../kit/packed_bc.h"
#include "../plan/paths.h"
#include "place.cuh"
#include "rounds.h"

namespace selective_scan::cuda {
namespace relay {
namespace {

// --- how arrays are stored ---

/// Whether `items` consecutive steps are always one aligned vector. Strides along what there is one
/// of do not matter.
bool has_vectors(const ScanParams& params, const ArrayView& view, int64_t items) {
  const int64_t size = element_size(view.dtype);
  const int64_t bytes = items * size;
  if ((view.step != 1 && view.step != -1) || params.seqlen % items != 0) return false;
  const auto* lowest = static_cast<const char*>(view.data);
  if (view.step < 0) lowest -= (items - 1) * size;
  const auto aligned = [&](int64_t count, int64_t stride) {
    return count == 1 || stride * size % bytes == 0;
  };
  return reinterpret_cast<uintptr_t>(lowest) % static_cast<uintptr_t>(bytes) == 0 &&
         aligned(params.batch, view.batch) && aligned(params.dim, view.channel) &&
         aligned(params.groups, view.group) && aligned(params.dstate, view.state);
}

std::array<const ArrayView*, 4> rows_of(const ForwardParams& params) {
  return {&params.u, &params.delta, &params.z, &params.out};
}
std::array<const ArrayView*, 7> rows_of(const BackwardParams& params) {
  return {&params.u,  &params.delta,  &params.z, &params.dout,
          &params.du, &params.ddelta, &params.dz};
}

/// Bytes of an element where all arrays with steps are vectors of one type, else 0.
template <class S, class Rows>
int vector_size(const ScanParams& params, const Rows& rows) {
  const DType dtype = params.u.dtype;
  const int64_t size = element_size(dtype);
  const auto is_vector = [&](const ArrayView* view) {
    return !view->present() || (view->dtype == dtype && has_vectors(params, *view, S::kItems));
  };
  // Of kernels that read B and C themselves.
  const auto is_projection = [&](const ArrayView& view) {
    return S::kStepMajor || (view.dtype == dtype && has_vectors(params, view, 16 / size));
  };
  return std::all_of(rows.begin(), rows.end(), is_vector) && is_projection(params.B) &&
                 is_projection(params.C)
             ? static_cast<int>(size)
             : 0;
}

// --- what can be run ---

bool is_supported(const ScanParams& params) {
  return !params.is_complex && !params.is_double && params.variable_B && params.variable_C &&
         params.dstate > kPaddedStates / 4 && params.dstate <= kPaddedStates && params.seqlen > 0 &&
         params.batch > 0 && params.dim > 0;
}

template <class S>
RelayGeometry make_geometry(const ScanParams& params, int64_t warps) {
  RelayGeometry geometry;
  geometry.group_channels = params.dim / params.groups;
  geometry.tiles = ceil_div(geometry.group_channels, S::kChannels);
  geometry.blocks = params.batch * params.groups * geometry.tiles;
  geometry.warps =
      static_cast<int>(std::clamp<int64_t>(ceil_div(params.seqlen, S::kSteps), 1, warps));
  return geometry;
}

// --- tables of instantiations -------------------------------------------------------------------

/// Calls visit with the Storage that suits arrays of vectors of `size` bytes an element, or of
/// none.
template <class Visit>
cudaError_t visit_storage(int size, const Visit& visit) {
  if (size == 2) return visit.template operator()<Vectors<2>>();
  if (size == 4) return visit.template operator()<Vectors<4>>();
  return visit.template operator()<Elements>();
}

/// Kernel<kMethod>::launch for a method found out at run time.
template <template <Method> class Kernel, class Args>
cudaError_t launch_method(Method method, const Args& args, cudaStream_t stream) {
  using Launch = decltype(&Kernel<Method::kZoh>::launch);
  static constexpr auto kTable = make_method_table<Launch>(
      [&]<Method kMethod>() -> Launch { return &Kernel<kMethod>::launch; });
  return kTable[method](args, stream);
}

template <class S, int kWarpsPerMap, class Storage>
struct ForwardKernels {
  template <Method kMethod>
  struct Kernel : RelayForward<S::kStates, S::kSteps, kWarpsPerMap, Storage, kMethod> {};
};
template <DType kType>
struct RoundsKernels {
  template <Method kMethod>
  struct Kernel : RoundsForward<kType, kMethod> {};
};
template <class Storage>
struct BackwardKernels {
  template <Method kMethod>
  struct Kernel : RelayBackward<Storage, kMethod> {};
};

using FourStates = Shape<4, 16>;  // 8 channels a block
using OneState = Shape<1, 32>;    // 2 channels a block

// Figures of choice, from measurements on an H200.

/// Beyond so many blocks of the wide shape a multiprocessor, warps that stay with their channels
/// are as good.
constexpr int64_t kMostForwardBlocks = 4;
/// Problems of fewer steps are short. Longer ones are left to other kernels unless arrays are
/// vectors: those divide the work around the scan better.
constexpr int64_t kFewSteps = 1024;
/// Shorter sequences are better streamed, by the blocks of the wide shape that a multiprocessor
/// has: with more of these, all below kSegmentSteps.
constexpr int64_t kFewestSteps[] = {72, 200, 900};
/// The narrow shape is the better one where all of its blocks are there at once, and no more than
/// so many on a multiprocessor, unless the sequence is too short for the wide one.
constexpr int64_t kMostOneStateBlocks = 2;
constexpr int64_t kManySteps = 16384;
/// From so many on, time in segments (streamed/) is better where the last wave of blocks leaves
/// more multiprocessors idle than this part of them all.
constexpr int64_t kSegmentSteps = 8192;
constexpr double kMostIdle = 0.15;
/// Blocks that share a tile, from so many steps on. Not all multiprocessors can be divided among
/// clusters of four.
constexpr int64_t kCluster = 2;
constexpr int64_t kClusterSteps = 384;
constexpr int kWarpsPerMap = 4;
constexpr int64_t kMostBackwardBlocks = 4;
/// Every tile writes partial sums of dB and dC, in all no more than 16 MiB.
constexpr int64_t kMostPartialSums = int64_t{1} << 22;

/// Whether the streamed kernels have no objection either.
bool is_streamable(const ForwardParams& params) {
  const auto rows = rows_of(params);
  return std::all_of(rows.begin(), rows.end(), [&](const ArrayView* view) {
    return !view->present() || view->dtype == params.u.dtype;
  });
}

/// What a forward launch settles before it needs scratch memory.
struct ForwardPlan {
  bool has_one_state;
  RoundsForwardArgs rounds;  // where it is narrow
  bool is_clustered;
  int64_t warps;     // at most
  int element_size;  // of vectors, or 0: see vector_size()
};

/// False where the problem is not for these kernels.
bool make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan) {
  if (!is_supported(params)) return false;
  const int64_t multiprocessors = device.multiprocessors;
  const int64_t blocks = make_geometry<FourStates>(params, kMaxRelayWarps).blocks;
  if (blocks > kMostForwardBlocks * multiprocessors) return false;
  const bool is_short = params.seqlen < kFewSteps;
  constexpr int64_t kOneStatePerFour = FourStates::kChannels / OneState::kChannels;
  const int64_t round_warps = params.seqlen <= 4 * kChunk   ? 4
                              : params.seqlen <= 8 * kChunk ? 8
                                                            : kMaxRelayWarps;
  const int64_t one_state_blocks = kOneStatePerFour * blocks;
  const bool are_few = one_state_blocks * round_warps <= kMaxRelayWarps * multiprocessors &&
                       (one_state_blocks <= kMostOneStateBlocks * multiprocessors ||
                        params.seqlen < kFewestSteps[0]);
  plan.has_one_state = are_few && vector_size<OneState>(params, rows_of(params)) != 0 &&
                       make_rounds_args(params, plan.rounds);
  plan.is_clustered = !plan.has_one_state && params.seqlen >= kClusterSteps && device.major >= 9 &&
                      kCluster * blocks <= multiprocessors;
  plan.element_size = vector_size<FourStates>(params, rows_of(params));
  // Blocks of half the warps share a multiprocessor; with many turns it no longer matters that the
  // last blocks of all run alone.
  const bool is_shared =
      !plan.is_clustered && blocks > multiprocessors && params.seqlen < kManySteps;
  plan.warps = is_shared ? kMaxRelayWarps / 2 : kMaxRelayWarps;
  if (!is_streamable(params) || (is_short && plan.has_one_state)) return is_short;
  if (!is_short && (are_few ? !plan.has_one_state : plan.element_size == 0)) return false;
  const int64_t rounds = ceil_div(blocks, multiprocessors);
  if (params.seqlen >= kSegmentSteps) {
    const auto places = static_cast<double>(rounds * multiprocessors);
    return static_cast<double>(blocks) >= (1 - kMostIdle) * places;
  }
  return rounds <= std::ssize(kFewestSteps) && params.seqlen >= kFewestSteps[rounds - 1];
}

template <int kWarpsPerMap>
cudaError_t launch_forward(const ForwardParams& params, const ForwardPlan& plan,
                           const ScratchMemory& memory, cudaStream_t stream) {
  RelayForwardArgs args{params, make_geometry<FourStates>(params, plan.warps)};
  const PackedBC layout(params, kPaddedStates);
  void* const projections = memory(layout.bytes(params));
  args.projections = static_cast<const char*>(projections);
  args.sequence_bytes = layout.sequence_bytes();
  args.is_dependent = true;
  const cudaError_t error = convert_projections(params, kPaddedStates, projections, stream);
  if (error != cudaSuccess) return error;
  args.geometry.cluster = plan.is_clustered ? static_cast<int>(kCluster) : 1;
  args.geometry.warps = round_up(args.geometry.warps, kWarpsPerMap);
  return visit_storage(plan.element_size, [&]<class Storage>() {
    return launch_method<ForwardKernels<FourStates, kWarpsPerMap, Storage>::template Kernel>(
        params.method, args, stream);
  });
}

cudaError_t launch_rounds(const RoundsForwardArgs& args, const ForwardParams& params,
                          cudaStream_t stream) {
  const auto launch = [&]<DType kType>() {
    return launch_method<RoundsKernels<kType>::template Kernel>(params.method, args, stream);
  };
  if (params.u.dtype == DType::kFloat32) return launch.template operator()<DType::kFloat32>();
  if (params.u.dtype == DType::kFloat16) return launch.template operator()<DType::kFloat16>();
  return launch.template operator()<DType::kBFloat16>();
}

void take_workspace(RelayBackwardArgs& args, Scratch& scratch) {
  const BackwardParams& params = args.params;
  const auto take = [&](void*& array, bool wanted, int64_t count) {
    scratch.take(array, wanted, count, sizeof(float));
  };
  const int64_t rows = params.batch * params.dim;
  take(args.workspace.dBC_partials, true,
       args.geometry.tiles * params.batch * params.groups * params.seqlen * 2 * kPaddedStates);
  take(args.workspace.dA, true, rows * kPaddedStates);
  take(args.workspace.dD, params.dD.present(), rows);
  take(args.workspace.ddelta_bias, params.ddelta_bias.present(), rows);
}

}  // namespace
}  // namespace relay

std::optional<cudaError_t> relay_forward(const ForwardParams& params, const ScratchMemory& memory,
                                         cudaStream_t stream) {
  using namespace relay;
  Device device;
  ForwardPlan plan;
  if (current_device(device) != cudaSuccess || !make_plan(params, device, plan)) {
    return std::nullopt;
  }
  if (plan.has_one_state) return launch_rounds(plan.rounds, params, stream);
  const auto launch = plan.is_clustered ? &launch_forward<kWarpsPerMap> : &launch_forward<1>;
  return launch(params, plan, memory, stream);
}

std::optional<cudaError_t> relay_backward(const BackwardParams& params, const ScratchMemory& memory,
                                          cudaStream_t stream) {
  using namespace relay;
  Device device;
  if (!is_supported(params) || params.seqlen >= kFewSteps ||
      current_device(device) != cudaSuccess) {
    return std::nullopt;
  }
  RelayBackwardArgs args{params, make_geometry<OneState>(params, kMaxRelayWarps), {}};
  const int64_t blocks = args.geometry.blocks;
  if (blocks > kMostBackwardBlocks * device.multiprocessors ||
      blocks * params.seqlen * 2 * kPaddedStates > kMostPartialSums) {
    return std::nullopt;
  }
  // Blocks that share a multiprocessor share the warps it has room for.
  const int64_t share = std::max<int64_t>(1, ceil_div(blocks, device.multiprocessors));
  args.geometry = make_geometry<OneState>(params, kMaxRelayWarps / share);
  lay_out(memory, [&](Scratch& scratch) { take_workspace(args, scratch); });
  const int size = vector_size<OneState>(params, rows_of(params));
  const cudaError_t error = visit_storage(size, [&]<class Storage>() {
    return launch_method<BackwardKernels<Storage>::template Kernel>(params.method, args, stream);
  });
  return error == cudaSuccess ? relay_reduce(args, stream) : error;
}

}  // namespace selective_scan::cuda
