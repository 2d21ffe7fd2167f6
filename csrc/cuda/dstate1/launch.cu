// Launches of the dstate 1 kernels: how arrays are moved, who works on which channels, and the sums
// that follow the backward kernel.
#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <limits>

#include "../../core/method_table.h"
#include "../kit/dependent_launch.cuh"
#include "../kit/elements.cuh"
#include "../kit/launch_tools.h"
#include "../plan/paths.h"
#include "kernels.h"

namespace selective_scan::cuda {
namespace dstate1 {
namespace {

// --- what can be run ---

/// Whether kItems steps are always a vector aligned to 16 bytes.
bool has_vectors(const ScanParams& params, const ArrayView& view) {
  constexpr uintptr_t kBytes = 16;
  const int64_t size = element_size(view.dtype);
  if ((view.step != 1 && view.step != -1) || params.seqlen % kItems != 0) return false;
  const auto* lowest = static_cast<const char*>(view.data);
  if (view.step < 0) lowest -= (kItems - 1) * size;
  return reinterpret_cast<uintptr_t>(lowest) % kBytes == 0 && view.batch * size % kBytes == 0 &&
         view.channel * size % kBytes == 0;
}

using Views = std::initializer_list<const ArrayView*>;

/// Whether all arrays that are there have the element type and the strides of u.
bool are_alike(const ScanParams& params, Views sequences) {
  return std::all_of(sequences.begin(), sequences.end(), [&](const ArrayView* view) {
    return !view->present() || (view->dtype == params.u.dtype &&
                                view->channel == params.u.channel && view->step == params.u.step);
  });
}

Sequence make_sequence(const ArrayView& view) {
  if (!view.present()) return {};
  return {static_cast<char*>(view.data), view.batch * element_size(view.dtype)};
}

SequenceStrides make_strides(const ArrayView& view) {
  const int64_t size = element_size(view.dtype);
  return {view.channel * size, static_cast<int>(view.step * size),
          std::abs(view.channel) < std::abs(view.step)};
}

/// Whether offsets within `channels` channels of an array fit 32 bits.
bool fits_32_bits(const ScanParams& params, const ArrayView& view, int64_t channels) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  const int64_t steps = params.seqlen + kChunk;  // what is on its way may lie behind the end
  const int64_t step_bytes = std::abs(view.step) * element_size(view.dtype);
  const int64_t channel_bytes = std::abs(view.channel) * element_size(view.dtype);
  return step_bytes <= kLimit / steps && channel_bytes <= kLimit / channels &&
         step_bytes * steps + channel_bytes * channels <= kLimit;
}

/// With few channels a long sequence is better cut into segments, which this path does not do.
bool has_enough_channels(const ScanParams& params) {
  constexpr int64_t kFewSteps = 4096;
  constexpr int64_t kManyRows = 2048;
  return params.seqlen <= kFewSteps || params.batch * params.dim >= kManyRows;
}

bool is_supported(const ScanParams& params, int64_t tile_channels, Views sequences) {
  if (params.is_complex || params.is_double || params.dstate != 1) return false;
  const auto fits = [&](const ArrayView& view) {
    return fits_32_bits(params, view, tile_channels);
  };
  return are_alike(params, sequences) && fits(params.u) && (!params.variable_B || fits(params.B)) &&
         (!params.variable_C || fits(params.C)) && has_enough_channels(params);
}

// --- forward ---

ForwardArgs make_args(const ForwardParams& params) {
  ForwardArgs args{};
  args.params = params;
  args.strides = make_strides(params.u);
  args.u = make_sequence(params.u);
  args.delta = make_sequence(params.delta);
  args.z = make_sequence(params.z);
  args.out = make_sequence(params.out);
  args.windows = ceil_div(params.dim / params.groups, kWindowChannels);
  args.work_items = params.batch * params.groups * args.windows;
  return args;
}

// --- backward ---

/// A tile has kMinBackwardTile channels or, if that is less, those of a group.
void choose_tile(BackwardArgs& args) {
  const BackwardParams& params = args.params;
  const int64_t windows = ceil_div(params.dim / params.groups, kWindowChannels);
  args.warps = static_cast<int>(std::min<int64_t>(windows, kMaxBackwardWarps));
  args.slots = static_cast<int>(std::min<int64_t>(
      ceil_div(windows, args.warps), kMinBackwardTile / (args.warps * kWindowChannels)));
  args.tiles = ceil_div(windows, args.warps * args.slots);
  args.work_items = params.batch * params.groups * args.tiles;
}

void take_workspace(BackwardArgs& args, Scratch& scratch) {
  const BackwardParams& params = args.params;
  const auto take = [&](float*& array, bool wanted, int64_t count) {
    scratch.take(array, wanted, count, sizeof(float));
  };
  BackwardWorkspace& workspace = args.workspace;
  take(workspace.dBC_partials, params.variable_B || params.variable_C,
       args.tiles * params.batch * params.groups * params.seqlen * 2);
  const int64_t rows = params.batch * params.dim;
  take(workspace.dA, true, rows);
  take(workspace.dD, params.dD.present(), rows);
  take(workspace.ddelta_bias, params.ddelta_bias.present(), rows);
  take(workspace.dB, !params.variable_B, rows);
  take(workspace.dC, !params.variable_C, rows);
}

BackwardArgs make_args(const BackwardParams& params) {
  BackwardArgs args{};
  args.params = params;
  args.strides = make_strides(params.u);
  args.u = make_sequence(params.u);
  args.delta = make_sequence(params.delta);
  args.z = make_sequence(params.z);
  args.dout = make_sequence(params.dout);
  args.du = make_sequence(params.du);
  args.ddelta = make_sequence(params.ddelta);
  args.dz = make_sequence(params.dz);
  choose_tile(args);
  return args;
}

constexpr int kFinishThreads = 256;

/// dB and dC of one (batch, group, step): adds the tiles.
__device__ void finish_step(const BackwardArgs& args, int64_t index) {
  const BackwardParams& params = args.params;
  const int64_t sequences = params.batch * params.groups;
  const auto* source = reinterpret_cast<const float2*>(args.workspace.dBC_partials) + index;
  float2 sum{0.0f, 0.0f};
#pragma unroll 4
  for (int64_t tile = 0; tile < args.tiles; ++tile) {
    const float2 part = source[tile * sequences * params.seqlen];
    sum.x += part.x;
    sum.y += part.y;
  }
  const int64_t sequence = index / params.seqlen;
  const auto store = [&](const ArrayView& view, float value) {
    store_component(view,
                    sequence / params.groups * view.batch + sequence % params.groups * view.group +
                        index % params.seqlen * view.step,
                    value);
  };
  if (params.variable_B) store(params.dB, sum.x);
  if (params.variable_C) store(params.dC, sum.y);
}

/// Gradients of one channel's parameters: a warp adds the batches, in fp64, since there may be very
/// many.
__device__ void finish_channel(const BackwardArgs& args, int64_t channel) {
  const BackwardParams& params = args.params;
  const int lane = threadIdx.x % kWarpSize;
  const auto finish = [&](const float* sums, const ArrayView& view) {
    if (sums == nullptr) return;
    double sum = 0;
    for (int64_t batch = lane; batch < params.batch; batch += kWarpSize) {
      sum += sums[channel * params.batch + batch];
    }
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kFullMask, sum, distance);
    }
    if (lane == 0) store_component(view, channel * view.channel, static_cast<float>(sum));
  };
  finish(args.workspace.dA, params.dA);
  finish(args.workspace.dD, params.dD);
  finish(args.workspace.ddelta_bias, params.ddelta_bias);
  finish(args.workspace.dB, params.dB);
  finish(args.workspace.dC, params.dC);
}

/// What follows the backward kernel: the first blocks take channels, a warp each; the others take
/// steps, a thread each.
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ BackwardArgs args, int64_t channel_blocks,
                  int64_t blocks) {
  constexpr int kWarps = kFinishThreads / kWarpSize;
  wait_for_primary();
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    if (block < channel_blocks) {
      const int64_t channel = block * kWarps + threadIdx.x / kWarpSize;
      if (channel < args.params.dim) finish_channel(args, channel);
    } else {
      const int64_t index = (block - channel_blocks) * kFinishThreads + threadIdx.x;
      const int64_t steps = args.params.batch * args.params.groups * args.params.seqlen;
      if (index < steps) finish_step(args, index);
    }
  }
}

cudaError_t finish(const BackwardArgs& args, cudaStream_t stream) {
  const BackwardParams& params = args.params;
  const int64_t channel_blocks = ceil_div(params.dim, kFinishThreads / kWarpSize);
  const int64_t steps =
      args.workspace.dBC_partials == nullptr ? 0 : params.batch * params.groups * params.seqlen;
  const int64_t blocks = channel_blocks + ceil_div(steps, kFinishThreads);
  constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();
  const LaunchShape shape{std::min(blocks, kMaxBlocks), kFinishThreads, 0, true};
  return launch_kernel(finish_kernel, shape, stream, args, channel_blocks, blocks);
}

struct Launches {
  cudaError_t (*forward)(const ForwardArgs&, cudaStream_t);
  cudaError_t (*backward)(const BackwardArgs&, cudaStream_t);
};

template <class Storage>
const Launches& launches_of(Method method) {
  static constexpr auto kTable = make_method_table<Launches>([&]<Method kMethod>() {
    using Instance = Kernels<kMethod, Storage>;
    return Launches{&Instance::forward, &Instance::backward};
  });
  return kTable[method];
}

const Launches& launches_for(const ScanParams& params, Views sequences) {
  const bool have_vectors =
      params.variable_B && params.variable_C && params.B.dtype == params.u.dtype &&
      params.C.dtype == params.u.dtype &&
      std::all_of(sequences.begin(), sequences.end(), [&](const ArrayView* view) {
        return !view->present() || has_vectors(params, *view);
      });
  const auto of_element = [&]<class Element>() -> const Launches& {
    return have_vectors ? launches_of<Vectors<Element>>(params.method)
                        : launches_of<Scattered<Element>>(params.method);
  };
  switch (params.u.dtype) {
    case DType::kBFloat16:
      return of_element.template operator()<BFloat16>();
    case DType::kFloat16:
      return of_element.template operator()<Half>();
    default:
      return of_element.template operator()<float>();
  }
}

}  // namespace
}  // namespace dstate1

std::optional<cudaError_t> dstate1_forward(const ForwardParams& params, const ScratchMemory&,
                                           cudaStream_t stream) {
  using namespace dstate1;
  const Views sequences = {&params.u, &params.delta, &params.z, &params.out};
  if (!is_supported(params, kWindowChannels, sequences)) return std::nullopt;
  const ForwardArgs args = make_args(params);
  return launches_for(params, sequences).forward(args, stream);
}

std::optional<cudaError_t> dstate1_backward(const BackwardParams& params,
                                            const ScratchMemory& memory, cudaStream_t stream) {
  using namespace dstate1;
  const Views sequences = {&params.u,  &params.delta,  &params.z, &params.dout,
                           &params.du, &params.ddelta, &params.dz};
  if (params.dstate != 1) return std::nullopt;
  BackwardArgs args = make_args(params);
  if (!is_supported(params, args.tile_channels(), sequences)) return std::nullopt;
  lay_out(memory, [&](Scratch& scratch) { take_workspace(args, scratch); });
  const cudaError_t error = launches_for(params, sequences).backward(args, stream);
  return error != cudaSuccess ? error : finish(args, stream);
}

}  // namespace selective_scan::cuda
