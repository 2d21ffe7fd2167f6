// The position of a block of the prompt kernels, and the resources that its warps share.
#pragma once

#include "../kit/barriers.cuh"
#include "../kit/elements.cuh"
#include "../kit/states.cuh"
#include "kernels.h"

namespace selective_scan::cuda::prompt {

/// The named barriers of the first buffer; the second buffer's have the next numbers. At kFull
/// makers hand a filled buffer to scanners, at kFree scanners return a used one to makers.
constexpr int kFull = 1;
constexpr int kFree = 3;

/// Returns lane 0's value. The compiler then knows that the result is the same in all lanes.
__device__ __forceinline__ int uniform(int value) {
  return __shfl_sync(kFullMask, value, 0);
}

template <class Element, int kCount>
__device__ __forceinline__ Pack<float, kCount> to_values(const Pack<Element, kCount>& raw) {
  Pack<float, kCount> values;
  to_reals<Element>(raw, values.v);
  return values;
}

/// The channels of a block.
struct Tile {
  int64_t batch;
  int group;
  int first_channel;
  int channels;  // from first_channel to the group's end
};

/// The positions of a block's arrays in shared memory.
template <class S, class Element, Along kAlong>
struct Shared {
  static constexpr int kSize = sizeof(Element);
  char* base = shared_memory();
  int scanners;

  __device__ explicit Shared(int scanners) : scanners(scanners) {}

  __device__ char* raw_projections() const { return base; }
  __device__ float* projections(int buffer) const {
    return reinterpret_cast<float*>(base + S::raw_projection_bytes(kSize)) +
           buffer * S::kProjections;
  }
  __device__ float* planes(int scanner) const {
    return projections(kBuffers) + scanner * S::scanner_floats(kAlong);
  }
  __device__ float* rows(int scanner, int buffer) const {
    return planes(scanner) + S::kChannels * S::kPlanes + buffer * S::kRows;
  }
  __device__ float* biases(int scanner) const { return rows(scanner, kBuffers); }
  __device__ float* skips(int scanner) const { return biases(scanner) + S::kBiases; }
  /// Returns the rows of y of a warp's channels. They exist only if rows lie along channels.
  __device__ float* sums(int scanner) const { return skips(scanner) + S::kBiases; }
  __device__ char* raw_rows() const { return reinterpret_cast<char*>(planes(scanners)); }
  /// Returns the barrier at which scanning warps meet if they store one another's output.
  __device__ BarrierState& summed() const {
    return *reinterpret_cast<BarrierState*>(raw_rows() + scanners * S::raw_row_bytes(kSize));
  }
};

}  // namespace selective_scan::cuda::prompt
