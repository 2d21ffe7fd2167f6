// Shares each warp's result for its part of time with all warps of the block.
#pragma once

#include <cuda_runtime.h>

#include "config.h"

namespace selective_scan::cuda {

/// The exchange alternates between two buffers, so that one barrier per exchange is enough.
template <class Map, int kWarps>
struct Exchange {
  using Maps = Map[kWarps][kWarpSize];
  using Storage = Maps[2];

  Storage& storage;
  int next = 0;

  /// Publishes the thread's map and returns the maps of all warps, which may be read until the next
  /// call but one. All threads of the block call this.
  __device__ const Maps& share(const Map& own) {
    Maps& maps = storage[next];
    next ^= 1;
    maps[threadIdx.x / kWarpSize][threadIdx.x % kWarpSize] = own;
    __syncthreads();
    return maps;
  }
};

}  // namespace selective_scan::cuda
