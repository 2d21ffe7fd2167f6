// Which steps of which tile a block of the streamed backward scan works on, and what it has to wait
// for: blocks wait for blocks with lower numbers only, which have begun before them.
//
// Two parts. Where tiles do not fill the multiprocessors evenly, with s multiprocessors and more
// than s tiles, the first s of these, the split ones, are worked on in two parts: of tile k the
// last k/s of its steps, by block k, and the others by one of the last s blocks. Between these
// blocks come the whole tiles. Multiprocessors take blocks in order: first a part, the longer the
// later it ends; the first to end it take whole tiles, and the longest of the rests that are left
// goes to who is free first. Thus all end at the same time. The second part of a tile is handed the
// states' gradients and the sums so far by the first.
//
// Rounds. Where a group has several times as many tiles as it takes to fill the multiprocessors,
// tiles of several rounds (Geometry::tiles_per_sum) share a partial sum of dB and dC, each adding
// to what those before it have left there. A round fills the multiprocessors, so that a tile
// follows one which is done, or nearly so. That leaves less for add_gradients() to read and takes
// less memory: with 64 states (4, 2048, 2048, 64) half of 360 MB.
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
  /// Whether the item is the second part of a tile, of which there is a first one.
  __device__ __forceinline__ bool is_second(const WorkItem& item) const {
    return args_.split_tiles > 0 && item.end < args_.params.seqlen;
  }
  __device__ __forceinline__ bool is_first(const WorkItem& item) const {
    return args_.split_tiles > 0 && item.begin > 0;
  }

  /// Waits for the block that this one follows, if it follows one; called by all threads. Returns
  /// from which step of the item on sums of dB and dC are added to what others have left.
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
        wait_for_primary();  // which clears the flags
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
  /// Lets the block that follows this one go on, if any does; called by all threads.
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
  /// Whether the block has what is left of a split tile.
  __device__ __forceinline__ bool is_rest() const {
    return static_cast<int>(blockIdx.x) >= tiles();
  }
  /// Returns where a split tile is cut.
  __device__ __forceinline__ int64_t cut_of(int tile) const {
    const int64_t chunks = ceil_div(args_.params.seqlen, kChunk);
    return (chunks - chunks * tile / args_.split_tiles) * kChunk;
  }
  /// Returns, for a rest, the last round with a tile that has the same partial sum; for other
  /// blocks, their own. If that is round 0, nobody adds to the sum before the block does.
  __device__ __forceinline__ int last_round(const WorkItem& item) const {
    const auto sums = static_cast<int>(args_.geometry.sums_per_group);
    const auto last =
        is_rest() ? static_cast<int>(args_.geometry.tiles) - 1 : static_cast<int>(item.tile);
    return (last - static_cast<int>(item.sum_index)) / sums;
  }

  const BackwardArgs& args_;
};

}  // namespace selective_scan::cuda::streamed
