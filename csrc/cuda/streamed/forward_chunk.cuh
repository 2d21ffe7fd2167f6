// The scan of one chunk by a lane of the streamed forward kernels, from rows in shared memory.
#pragma once

#include "../kit/elements.cuh"
#include "../kit/step_math.cuh"
#include "forward_kernels.h"

namespace selective_scan::cuda::streamed {

/// The blocks of steps that the scan unrolls: a whole chunk if its code is short enough, except for
/// single elements of 4 bytes, which gain nothing from it.
template <class T, int kStates, int kSize, LaneMap kMap>
constexpr int kUnrolledBlocks =
    kIsCommonShape<T, kStates> && (kMap != LaneMap::kElements || kSize == 2) ? kBlocksPerChunk
                                                                             : kBlocksPerChunk / 2;

/// B and C of one step for a lane's states.
template <class T, int kQuads, int kQuad>
struct StepProjections {
  Pack<T, kQuad> B[kQuads];
  Pack<T, kQuad> C[kQuads];

  /// Loads both. `row` begins with the lane's first state; quads are `stride` states apart.
  __device__ __forceinline__ void load(const T* row, int stride, int padded_states) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      B[q] = load_pack<T, kQuad>(row + q * stride);
      C[q] = load_pack<T, kQuad>(row + padded_states + q * stride);
    }
  }
};

/// Takes one lane's states through the first `steps` steps of a chunk, rounded up to the unrolled
/// number; missing steps have Δ = 0. Stores the lane's part of y to y_row. If kBackward, rows are
/// in the reverse of the scan's order: step t of the chunk is element kChunk - 1 - t.
///
/// The compiler moves no load across a store. The results of a block of steps are therefore stored
/// after the loads of the next block, so that the last steps of one overlap with the first
/// exponentials of the other.
template <class T, int kStates, int kLaneBits, int kSize, LaneMap kMap, Method kMethod,
          bool kVariable, bool kBackward, class Constants>
__device__ __forceinline__ void scan_chunk(const float* delta_row, const float* input_row,
                                           const T* projections, int steps,
                                           const Constants (&constants)[kStates],
                                           const T (&constant_B)[kStates],
                                           const T (&constant_C)[kStates], T (&h)[kStates],
                                           float* y_row) {
  using Shape = WarpShape<T, kStates, kLaneBits>;
  constexpr int kStride = kUnrolledBlocks<T, kStates, kSize, kMap> * kBlockSteps;
  // Sequences whose rows are not aligned often end early in a chunk, which is then scanned in
  // shorter pieces.
  constexpr int kLastSteps = 2 * kBlockSteps;
  constexpr int kFirst = kBackward ? kChunk - kBlockSteps : 0;
  constexpr int kSign = kBackward ? -1 : 1;
  constexpr int kAhead = kBlockSteps / Shape::kQuads;  // steps of B and C loaded before the store
  using Projections = StepProjections<T, Shape::kQuads, Shape::kQuad>;
  const auto load_projections = [&](Projections& target, int t) {
    if constexpr (kVariable) {
      target.load(projections + t * 2 * Shape::kPadded, Shape::kLanes * Shape::kQuad,
                  Shape::kPadded);
    }
  };
  const auto scan_block = [&](int t, const auto& delta, const auto& input,
                              Projections(&projected)[kBlockSteps]) {
    Pack<float, kBlockSteps> y;
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      const int k = kBackward ? kBlockSteps - 1 - j : j;
      if (j >= kAhead) load_projections(projected[j], t + j);
      float sum = 0;
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const int q = s / Shape::kQuad;
        const int i = s % Shape::kQuad;
        const T b = kVariable ? projected[j].B[q].v[i] : constant_B[s];
        const T c = kVariable ? projected[j].C[q].v[i] : constant_C[s];
        h[s] = advance(step_of<kMethod, T>(delta.v[k], input.v[k], constants[s]), h[s], b);
        const T state = state_of<kMethod>(constants[s], h[s]);
        sum = s == 0 ? real_of_product(c, state) : add_real_of_product(c, state, sum);
      }
      y.v[k] = sum;
    }
    return y;
  };
  const auto scan_blocks = [&]<int kSteps>(std::integral_constant<int, kSteps>) {
    Pack<float, kBlockSteps> y;
#pragma unroll
    for (int t = 0; t < kSteps; t += kBlockSteps) {
      const int block = kFirst + kSign * t;
      const auto delta = load_pack<float, kBlockSteps>(delta_row + block);
      const auto input = load_pack<float, kBlockSteps>(input_row + block);
      Projections projected[kBlockSteps];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) load_projections(projected[j], t + j);
      if (t > 0) store_pack(y_row + block - kSign * kBlockSteps, y);
      y = scan_block(t, delta, input, projected);
    }
    store_pack(y_row + kFirst + kSign * (kSteps - kBlockSteps), y);
    delta_row += kSign * kSteps;
    input_row += kSign * kSteps;
    y_row += kSign * kSteps;
    projections += kSteps * 2 * Shape::kPadded;
  };
  if (kMap == LaneMap::kElements && steps < kChunk) {
#pragma unroll 1
    for (; steps > 0; steps -= kLastSteps) scan_blocks(std::integral_constant<int, kLastSteps>{});
    return;
  }
#pragma unroll 1
  for (; steps > 0; steps -= kStride) scan_blocks(std::integral_constant<int, kStride>{});
}

}  // namespace selective_scan::cuda::streamed
