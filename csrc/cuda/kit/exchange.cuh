// Hands what each warp of a block has found out about its part of time to all warps.
#pragma once

#include <cuda_runtime.h>

#include "config.h"

namespace selective_scan::cuda {

/// Two sets, used in turn, so that one barrier for each exchange is enough.
template <class Map, int kWarps>
struct Exchange {
  using Maps = Map[kWarps][kWarpSize];
  using Storage = Maps[2];

  Storage& storage;
  int next = 0;

  /// Every thread of the block leaves its map; then each may read those of all warps until the next
  /// call but one.
  __device__ const Maps& share(const Map& own) {
    Maps& maps = storage[next];
    next ^= 1;
    maps[threadIdx.x / kWarpSize][threadIdx.x % kWarpSize] = own;
    __syncthreads();
    return maps;
  }
};

}  // namespace selective_scan::cuda
