// The tile and steps that a block of the streamed backward scan works on, and the block that it
// waits for. Blocks wait only for blocks with lower numbers, which have begun before them.
//
// Two parts. If tiles do not fill the multiprocessors evenly, with s multiprocessors and more than
// s tiles, the first s tiles are split between two blocks: block k works on the last k/s of tile
// k's steps, and one of the last s blocks on the others. The blocks in between work on whole tiles.
// Multiprocessors take blocks in order. Each takes a first part, which ends the later the longer it
// is; the first ones to end take whole tiles, and whichever is free next takes the longest
// remaining second part. Thus all end at the same time. The first part of a tile hands the
// gradients of the states and the sums so far to the second.
//
// Rounds. If a group has several times as many tiles as it takes to fill the multiprocessors, tiles
// of several rounds (Geometry::tiles_per_sum) share a partial sum of dB and dC, to which each adds.
// A round fills the multiprocessors, so that the previous tile of the same sum is complete, or
// nearly so, when a tile starts. add_gradients() thus has less to read, and the sums take less
// memory: with 64 states (4, 2048, 2048, 64) half of 360 MB.
#pragma once

#include "../kit/states.cuh"
#include "backward_kernels.h"

namespace selective_scan::cuda::streamed {

class BlockOrder {
 public:
  explicit __device__ __forceinline__ BlockOrder(const BackwardArgs& args) : args_(args) {}

  __device__ __forceinline__ WorkItem item() const {
    const int block = static_cast<int>(blockIdx.x);
    const int tile = is_rest() ? block - tiles() : block;
    WorkItem item = work_item(args_.params, args_.geometry, tile);
    if (item.channels <= 0) item.end = item.begin;  // the last round has fewer tiles
    if (tile < args_.split_tiles) {
      const int64_t cut = cut_of(tile);
      if (!is_rest()) {
        item.begin = cut;
      } else if (cut < item.end) {
        item.end = cut;
      }
    }
    return item;
  }
  /// Returns whether the item is the second part of a tile that has a first part.
  __device__ __forceinline__ bool is_second(const WorkItem& item) const {
    return args_.split_tiles > 0 && item.end < args_.params.seqlen;
  }
  __device__ __forceinline__ bool is_first(const WorkItem& item) const {
    return args_.split_tiles > 0 && item.begin > 0;
  }

  /// Waits for the block that this one follows, if any; to be called by all threads. Returns the
  /// step of the item from which on its sums of dB and dC are added to those of other tiles.
  __device__ __forceinline__ int wait(const WorkItem& item) const {
    const auto steps = static_cast<int>(item.end - item.begin);
    const int block = static_cast<int>(blockIdx.x);
    const int round = last_round(item);
    int added = steps;
    int before = block - tiles();  // the first part
    if (is_rest()) {
      before += round * tiles_of_round();
      if (round > 0) added = 0;
    } else if (round > 0) {
      before = block - tiles_of_round();
      added = before < args_.split_tiles ? static_cast<int>(cut_of(before)) : 0;
    }
    if (is_second(item) || added < steps) {
      if (threadIdx.x == 0) {
        wait_for_primary();  // the kernel that clears the flags
        int done;
        do {
          asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                       : "=r"(done)
                       : "l"(args_.done + before)
                       : "memory");
        } while (done == 0);
      }
      __syncthreads();
    }
    return added;
  }
  /// Lets the block that follows this one proceed, if any; to be called by all threads.
  __device__ __forceinline__ void signal(const WorkItem& item) const {
    if (is_rest() || (args_.geometry.tiles_per_sum == 1 && !is_first(item))) return;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(args_.done + blockIdx.x), "r"(1)
                   : "memory");
    }
  }

 private:
  __device__ __forceinline__ int tiles_of_round() const {
    return static_cast<int>(args_.geometry.work_items);
  }
  /// Returns the tiles of all rounds.
  __device__ __forceinline__ int tiles() const {
    return static_cast<int>(args_.geometry.tiles_per_sum) * tiles_of_round();
  }
  /// Returns whether the block works on the second part of a split tile.
  __device__ __forceinline__ bool is_rest() const {
    return static_cast<int>(blockIdx.x) >= tiles();
  }
  /// Returns the step at which a split tile is cut.
  __device__ __forceinline__ int64_t cut_of(int tile) const {
    const int64_t chunks = ceil_div(args_.params.seqlen, kChunk);
    return (chunks - chunks * tile / args_.split_tiles) * kChunk;
  }
  /// For the second part of a split tile, returns the last round with a tile that has the same
  /// partial sum; for any other block, its own round. If this is round 0, no other block adds to
  /// the sum before this one.
  __device__ __forceinline__ int last_round(const WorkItem& item) const {
    const auto sums = static_cast<int>(args_.geometry.sums_per_group);
    const auto last =
        is_rest() ? static_cast<int>(args_.geometry.tiles) - 1 : static_cast<int>(item.tile);
    return (last - static_cast<int>(item.sum_index)) / sums;
  }

  const BackwardArgs& args_;
};

}  // namespace selective_scan::cuda::streamed
