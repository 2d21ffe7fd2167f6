// Products of a few rows of activations with the rows of a matrix that a block has.
//
// A stage of the ring holds some columns of 16 rows of the matrix. Two-byte weights are the A
// operand of m16n8k16 mma, whose narrow side the rows of activations are, 8 or 16 of them: one
// costs what 8 cost. Warps share a stage's columns and add up what they have, in their order, at
// the end of a tile. Of fp32 weights each warp has two rows of the tile, whose columns its lanes
// share. Either way a row's sum does not depend on how many rows of activations there are.
//
// Bound by: what comes through the ring; else by the latency of one stage after the other.
#pragma once

#include <type_traits>

#include "../../core/dtype.h"
#include "../kit/elements.cuh"
#include "ring.cuh"

namespace selective_scan::cuda::step {

/// All threads that compute meet.
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(kComputeThreads) : "memory");
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

/// d += a·b
template <class W>
__device__ __forceinline__ void multiply_tiles(float (&d)[4], const uint32_t (&a)[4],
                                               const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<W, BFloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

/// What activations are multiplied from: [row][column] in shared memory.
template <class W>
struct Activations {
  W* data;
  int pitch;  // elements
};

/// Sums of a tile that a thread has a part of.
template <class W, int kRows>
class TileSums {
  static constexpr int kParts = kRows / 8;

 public:
  /// Adds what `columns` columns of a stage give.
  __device__ __forceinline__ void add(const char* stage, const Activations<W>& activations,
                                      int column, int columns, int /*rows*/) {
    constexpr int kDepth = 16;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int steps = columns / kDepth;
    const int end = steps * (warp + 1) / kComputeWarps;
    const char* const weights =
        stage + lane % 16 * kRowPitch + lane / 16 * 8 * static_cast<int>(sizeof(W));
    const W* const values =
        activations.data + lane % 8 * activations.pitch + column + lane / 8 % 2 * 8;
    for (int k = steps * warp / kComputeWarps; k < end; ++k) {
      uint32_t a[4];
      load_matrices(weights + k * kDepth * static_cast<int>(sizeof(W)), a);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        uint32_t b[2];
        load_matrices(values + part * 8 * activations.pitch + k * kDepth, b);
        multiply_tiles<W>(sums_[part], a, b);
      }
    }
  }

  /// Calls finish(row of the tile, row of activations, sum), each by one thread, once all threads
  /// have come here; `room` is for one tile.
  template <class Finish>
  __device__ __forceinline__ void finish(float* room, int /*rows*/, const Finish& finish) {
    const int lane = threadIdx.x % kWarpSize;
    float* const own = room + (threadIdx.x / kWarpSize * kTileRows + lane / 4) * kRows;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int at = part * 8 + lane % 4 * 2;
      store_pack(own + at, Pack<float, 2>{{sums_[part][0], sums_[part][1]}});
      store_pack(own + 8 * kRows + at, Pack<float, 2>{{sums_[part][2], sums_[part][3]}});
    }
    meet();
    constexpr int kSums = kTileRows * kRows;
    for (int i = threadIdx.x; i < kSums; i += kComputeThreads) {
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < kComputeWarps; ++warp) sum += room[warp * kSums + i];
      finish(i / kRows, i % kRows, sum);
    }
  }

 private:
  float sums_[kParts][4] = {};
};

template <int kRows>
class TileSums<float, kRows> {
  static constexpr int kOwn = kTileRows / kComputeWarps;  // rows of the tile

 public:
  __device__ __forceinline__ void add(const char* stage, const Activations<float>& activations,
                                      int column, int columns, int rows) {
    constexpr int kPack = 4;
    const int lane = threadIdx.x % kWarpSize;
    const int first = threadIdx.x / kWarpSize * kOwn;
    for (int k = lane * kPack; k < columns; k += kWarpSize * kPack) {
      Pack<float, kPack> weights[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        weights[i] = load_pack<float, kPack>(
            reinterpret_cast<const float*>(stage + (first + i) * kRowPitch) + k);
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

  template <class Finish>
  __device__ __forceinline__ void finish(float* /*room*/, int rows, const Finish& finish) {
    const int lane = threadIdx.x % kWarpSize;
    const int first = threadIdx.x / kWarpSize * kOwn;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float own = 0;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row >= rows) break;
        float sum = sums_[i][row];
#pragma unroll
        for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
          sum += __shfl_xor_sync(kFullMask, sum, mask);
        }
        if (lane == row) own = sum;
      }
      if (lane < rows) finish(first + i, lane, own);
    }
  }

 private:
  float sums_[kOwn][kRows] = {};
};

/// Multiplies `rows` rows of activations with those of a matrix. fill(first, count) puts `count`
/// columns from `first` on into `activations`, of which there is room for `room_columns`, a
/// multiple of what a stage holds; finish(row of the matrix, row of activations, value) takes the
/// results, for existing rows alone. All threads that compute come here, and none has to have
/// waited for another before; when they are back, not all results may be there.
template <class W, int kRows, class Fill, class Finish>
__device__ __forceinline__ void multiply(const MatrixRows& matrix, WeightRing& ring,
                                         const Activations<W>& activations, int room_columns,
                                         float* sums_room, int rows, const Fill& fill,
                                         const Finish& finish) {
  constexpr int kTiles = kTilesTogether<W>;
  constexpr int kColumns = kRowBytes / static_cast<int>(sizeof(W));
  constexpr int kSums = kComputeWarps * kTileRows * kRows;
  const int tiles = ceil_div(matrix.count, kTileRows);
  int filled = -1;  // the first column that activations hold
  for (int first = 0; first < tiles; first += kTiles) {
    TileSums<W, kRows> sums[kTiles];
    for (int column = 0; column < matrix.columns; column += kColumns) {
      const int chunk = column / room_columns * room_columns;
      if (chunk != filled) {
        meet();  // whoever reads what is there has done so
        fill(chunk, min(room_columns, matrix.columns - chunk));
        meet();
        filled = chunk;
      }
      const int columns = min(kColumns, matrix.columns - column);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (first + i >= tiles) break;
        const char* const stage = ring.acquire();
        sums[i].add(stage, activations, column - chunk, columns, rows);
        ring.release();
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (first + i >= tiles) break;
      const int row = (first + i) * kTileRows;
      sums[i].finish(sums_room + i % 2 * kSums, rows, [&](int own, int at, float sum) {
        if (row + own < matrix.count && at < rows) finish(row + own, at, sum);
      });
    }
  }
}

}  // namespace selective_scan::cuda::step
