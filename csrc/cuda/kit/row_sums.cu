#include "row_sums.h"

#include <algorithm>

#include "config.h"
#include "dependent_launch.cuh"
#include "elements.cuh"
#include "launch_tools.h"

namespace selective_scan::cuda {
namespace {

constexpr int kTile = 64;  // channels, and also steps
constexpr int kThreads = 256;
constexpr int kLines = kThreads / kTile;  // of a tile at a time
constexpr int kItems = kTile / kLines;    // elements per thread
constexpr int kBlocks = 6;                // per multiprocessor; with more, values spill
constexpr int kMostSums = 4;              // per launch

struct Sums {
  RowSum sums[kMostSums];
};

/// The division of a tile among the threads of a block: neighboring threads lie along steps or
/// along channels, whichever are closer in memory.
struct TileWalk {
  bool along_steps;
  int64_t origin;  // of the thread's first element
  int64_t line;    // from one of its elements to the next
  int count;       // of its elements that exist, which are its first ones

  /// `channels` and `steps` remain from the tile's origin on; they may exceed the tile.
  __device__ __forceinline__ TileWalk(const ArrayView& view, int64_t batch, int64_t first_channel,
                                      int64_t first_step, int64_t channels, int64_t steps) {
    const auto size = [](int64_t stride) { return stride < 0 ? -stride : stride; };
    along_steps = size(view.step) <= size(view.channel);
    const int64_t near = along_steps ? view.step : view.channel;
    const int64_t far = along_steps ? view.channel : view.step;
    origin = batch * view.batch + first_channel * view.channel + first_step * view.step +
             threadIdx.x % kTile * near + threadIdx.x / kTile * far;
    line = kLines * far;
    const int near_end = static_cast<int>(min(along_steps ? steps : channels, int64_t{kTile}));
    const int far_end = static_cast<int>(min(along_steps ? channels : steps, int64_t{kTile}));
    const int far_left = far_end - static_cast<int>(threadIdx.x / kTile);
    const bool exists = static_cast<int>(threadIdx.x % kTile) < near_end && far_left > 0;
    count = exists ? (far_left + kLines - 1) / kLines : 0;
  }
  /// Calls function(i) for the thread's elements that exist; in a full tile without checks.
  template <class Function>
  __device__ __forceinline__ void for_each(const Function& function) const {
    if (__all_sync(kFullMask, count == kItems)) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) function(i);
    } else {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (i < count) function(i);
      }
    }
  }
};

/// A block processes one tile of one batch entry of one sum. Bound by memory: a thread issues all
/// loads before it uses the first value.
__global__ void __launch_bounds__(kThreads, fitting_blocks(kThreads, kBlocks))
    sum_rows_kernel(const __grid_constant__ Sums all) {
  __shared__ float tile[kTile][kTile + 1];  // [channel][step]
  const RowSum& sum = all.sums[blockIdx.y];
  wait_for_primary();
  const int64_t step_tiles = ceil_div(sum.steps, kTile);
  const int64_t channel_tiles = ceil_div(sum.channels, kTile);
  const int64_t tiles = sum.batch * channel_tiles * step_tiles;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t first_step = index % step_tiles * kTile;
    const int64_t row = index / step_tiles;
    const int64_t first_channel = row % channel_tiles * kTile;
    const int64_t batch = row / channel_tiles;
    const int64_t steps = sum.steps - first_step;
    const int64_t channels = sum.channels - first_channel;

    float values[kItems] = {};
    const TileWalk from(sum.source, batch, first_channel, first_step, channels, steps);
    with_element<float>(sum.source.dtype, [&](auto type) {
      using Element = decltype(type);
      const Element* source = static_cast<const Element*>(sum.source.data) + from.origin;
#pragma unroll 1
      for (int k = 0; k < sum.count; ++k, source += sum.stride) {
        Element elements[kItems]{};
        from.for_each([&](int i) { elements[i] = source[i * from.line]; });
#pragma unroll
        for (int i = 0; i < kItems; ++i) values[i] += to_real(elements[i]);
      }
    });

    const TileWalk to(sum.target, batch, first_channel, first_step, channels, steps);
    if (from.along_steps != to.along_steps) {
      const int near = threadIdx.x % kTile;
      const int far = threadIdx.x / kTile;
      const auto place = [&](bool along_steps, int i) -> float& {
        const int line = far + i * kLines;
        return along_steps ? tile[line][near] : tile[near][line];
      };
      __syncthreads();  // for reads of the previous tile
#pragma unroll
      for (int i = 0; i < kItems; ++i) place(from.along_steps, i) = values[i];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kItems; ++i) values[i] = place(to.along_steps, i);
    }
    with_element<float>(sum.target.dtype, [&](auto type) {
      using Element = decltype(type);
      Element* const target = static_cast<Element*>(sum.target.data) + to.origin;
      to.for_each([&](int i) { target[i * to.line] = to_element<Element>(values[i]); });
    });
  }
}

}  // namespace

cudaError_t sum_rows(const std::vector<RowSum>& sums, cudaStream_t stream) {
  for (size_t first = 0; first < sums.size(); first += kMostSums) {
    Sums part{};
    const size_t count = std::min(sums.size() - first, size_t{kMostSums});
    int64_t tiles = 0;
    for (size_t i = 0; i < count; ++i) {
      const RowSum& sum = part.sums[i] = sums[first + i];
      tiles =
          std::max(tiles, sum.batch * ceil_div(sum.channels, kTile) * ceil_div(sum.steps, kTile));
    }
    if (tiles == 0) continue;
    LaunchShape shape{std::min(tiles, kMaxBlocks), kThreads};
    shape.rows = static_cast<int64_t>(count);
    shape.is_dependent = true;
    const cudaError_t error = launch_kernel(&sum_rows_kernel, shape, stream, part);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace selective_scan::cuda
