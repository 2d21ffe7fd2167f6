// Products of a few rows of activations with the block's rows of a matrix.
//
// A stage of the ring holds some columns of 16 rows of the matrix. Two-byte weights are the A
// operand of m16n8k16 mma, whose narrow side is the rows of activations, 8 or 16 of them: one costs
// as much as 8. The multiplying warps share a stage's columns. With fp32 weights each of these
// warps has two rows of the tile, whose columns its lanes share. At the end of a tile the finishing
// warps add up the parts of each sum in the order of the warps, while the multiplying warps go on
// with the next tile. In either case a row's sum does not depend on the number of rows of
// activations.
//
// Bound by the data that come through the ring, or else by the latency of one stage after the
// other.
#pragma once

#include <type_traits>

#include "../../core/dtype.h"
#include "../kit/elements.cuh"
#include "../kit/states.cuh"
#include "ring.cuh"

namespace selective_scan::cuda::step {

/// Synchronizes all compute threads.
__device__ __forceinline__ void meet() {
  cuda::meet(1, kComputeWarps);
}
__device__ __forceinline__ bool is_multiplier() {
  return threadIdx.x < kProductThreads;
}

/// Sums each value over kLanes adjacent lanes.
template <int kLanes, int kCount>
__device__ __forceinline__ void sum_lanes(float (&values)[kCount]) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
#pragma unroll
    for (float& value : values) value += __shfl_xor_sync(kFullMask, value, mask);
  }
}
template <int kLanes>
__device__ __forceinline__ float sum_of_lanes(float value) {
  float values[] = {value};
  sum_lanes<kLanes>(values);
  return values[0];
}

__device__ __forceinline__ void load_matrices(const void* row, uint32_t (&values)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void load_matrices(const void* row, uint32_t (&values)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(values[0]), "=r"(values[1])
               : "r"(shared_address(row))
               : "memory");
}

/// Computes d += a·b.
template <class W>
__device__ __forceinline__ void multiply_tiles(float (&d)[4], const uint32_t (&a)[4],
                                               const uint32_t (&b)[2]) {
#define SELECTIVE_SCAN_MMA(type)                                   \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type       \
      ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])             \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (std::is_same_v<W, BFloat16>) {
    SELECTIVE_SCAN_MMA("bf16");
  } else {
    SELECTIVE_SCAN_MMA("f16");
  }
#undef SELECTIVE_SCAN_MMA
}

/// The operand of activations: [row][column] in shared memory.
template <class W>
struct Activations {
  W* data;
  int pitch;  // elements
};

/// A thread's parts of the sums of a tile.
template <class W, int kRows>
class TileSums {
  static constexpr int kParts = kRows / 8;

 public:
  /// Every warp stores one summand of every sum.
  static constexpr int kSummands = kProductWarps;

  /// Adds the products with `columns` columns of a stage, which start at `column` of the
  /// activations.
  __device__ __forceinline__ void add(const char* stage, const Activations<W>& activations,
                                      int column, int columns, int rows) {
    constexpr int kDepth = 16;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const char* const weights =
        stage + lane % 16 * kRowPitch + lane / 16 * 8 * static_cast<int>(sizeof(W));
    const W* values[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      // The sums of a missing row are never used.
      const int row = min(part * 8 + lane % 8, rows - 1);
      values[part] = activations.data + row * activations.pitch + column + lane / 8 % 2 * 8;
    }
#pragma unroll 4
    for (int k = warp * kDepth; k < columns; k += kProductWarps * kDepth) {
      uint32_t a[4];
      load_matrices(weights + k * static_cast<int>(sizeof(W)), a);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        uint32_t b[2];
        load_matrices(values[part] + k, b);
        multiply_tiles<W>(sums_[part], a, b);
      }
    }
  }

  /// Stores the parts to `room`, as [summand][value_index()] of a tile.
  __device__ __forceinline__ void leave(float* room, int /*rows*/) const {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    float* const own = room + (warp * kTileRows + lane / 4) * row_pitch(kRows);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int at = part * 8 + lane % 4 * 2;
      store_pack(own + at, Pack<float, 2>{{sums_[part][0], sums_[part][1]}});
      store_pack(own + 8 * row_pitch(kRows) + at, Pack<float, 2>{{sums_[part][2], sums_[part][3]}});
    }
  }

 private:
  float sums_[kParts][4] = {};
};

template <int kRows>
class TileSums<float, kRows> {
  static_assert(kTileRows % kProductWarps == 0);
  static constexpr int kOwn = kTileRows / kProductWarps;  // rows of a tile that a warp has

 public:
  static constexpr int kSummands = 1;

  __device__ __forceinline__ void add(const char* stage, const Activations<float>& activations,
                                      int column, int columns, int rows) {
    constexpr int kPack = 4;
    const int warp = threadIdx.x / kWarpSize;
    for (int k = threadIdx.x % kWarpSize * kPack; k < columns; k += kWarpSize * kPack) {
      Pack<float, kPack> weights[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const char* const row = stage + (warp + i * kProductWarps) * kRowPitch;
        weights[i] = load_pack<float, kPack>(reinterpret_cast<const float*>(row) + k);
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row >= rows) break;
        const auto values =
            load_pack<float, kPack>(activations.data + row * activations.pitch + column + k);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
#pragma unroll
          for (int j = 0; j < kPack; ++j) {
            sums_[i][row] = fmaf(weights[i].v[j], values.v[j], sums_[i][row]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void leave(float* room, int rows) const {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float own = 0;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row >= rows) break;
        const float sum = sum_of_lanes<kWarpSize>(sums_[i][row]);
        if (lane == row) own = sum;
      }
      const int tile_row = static_cast<int>(threadIdx.x) / kWarpSize + i * kProductWarps;
      if (lane < rows) room[tile_row * row_pitch(kRows) + lane] = own;
    }
  }

 private:
  float sums_[kOwn][kRows] = {};
};

/// An own channel or row of a matrix (`local`), and a row of activations or batch entry (`row`).
struct Cell {
  int local;
  int row;
  bool exists;
};

/// Passes the results of a tile of a matrix of `count` rows to the threads that do not multiply,
/// each result always to the same thread. The results of one row of activations go to as many
/// adjacent lanes as the tile has rows, or somewhat more.
template <int kRows>
struct TileResults {
  static constexpr int kTurns = kTileRows * kRows / kFinishThreads;

  int tile;
  int count;
  int rows;

  /// Calls use(cell, find(cell)). If any cell of a warp exists, it is called for the warp's other
  /// cells too. A thread finds all of its values before it uses the first one.
  template <class Find, class Use>
  __device__ __forceinline__ void for_each(const Find& find, const Use& use) const {
    const int left = count - tile * kTileRows;
    const int row_bits = kTurns == 1 || left > 8 ? 4 : left > 4 ? 3 : 2;
    const int thread = opaque(threadIdx.x) - kProductThreads;
    const int warp_row = thread / kWarpSize * kWarpSize >> row_bits;
    const int local = tile * kTileRows + (thread & ((1 << row_bits) - 1));
    const auto first_row = [&](int turn) { return turn * kFinishThreads >> row_bits; };
    const auto cell = [&](int turn) -> Cell {
      const int row = (thread >> row_bits) + first_row(turn);
      return {local, row, local < count && row < rows};
    };
    float values[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (warp_row + first_row(turn) < rows) values[turn] = find(cell(turn));
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (warp_row + first_row(turn) < rows) use(cell(turn), values[turn]);
    }
  }
};

/// Returns the sum of the summands in `room` for a row of the tile and a row of activations.
template <int kSummands, int kRows>
__device__ __forceinline__ float tile_sum(const float* room, int tile_row, int row) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kSummands; ++i) {
    sum += room[value_index<kRows>(i * kTileRows + tile_row, row)];
  }
  return sum;
}

}  // namespace selective_scan::cuda::step
