// Rows of any dtype and layout, which a block moves between global and shared memory element by
// element.
#pragma once

#include "../kit/config.h"
#include "../kit/elements.cuh"

namespace selective_scan::cuda {

/// Calls visit(row, step) for a chunk's steps of 2^row_bits rows. Neighbouring threads visit
/// elements along whichever of rows and steps lie closer in memory.
template <class Visit>
__device__ __forceinline__ void visit_rows(int64_t row_stride, int64_t step_stride, int row_bits,
                                           const Visit& visit) {
  const bool along_rows = llabs(row_stride) < llabs(step_stride);
  for (int i = threadIdx.x; i < kChunk << row_bits; i += blockDim.x) {
    const int row = along_rows ? i & ((1 << row_bits) - 1) : i / kChunk;
    visit(row, along_rows ? i >> row_bits : i % kChunk);
  }
}

/// The part of (batch, channel, step) arrays that a block moves at a time: the steps of a chunk, of
/// a tile of at most 2^row_bits channels.
struct ElementTile {
  int64_t batch;
  int64_t first_channel;
  int channels;
  int row_bits;
  int64_t first_step;
  int steps;

  /// Calls visit(channel, index in the array, place in the rows).
  template <class Visit>
  __device__ __forceinline__ void visit(const ArrayView& view, const Visit& visit) const {
    const int64_t first =
        batch * view.batch + first_channel * view.channel + first_step * view.step;
    visit_rows(view.channel, view.step, row_bits, [&](int c, int t) {
      if (c >= channels || t >= steps) return;
      visit(first_channel + c, first + c * view.channel + t * view.step, c * kElementRow + t);
    });
  }
  /// Fills rows with convert(element, channel, place in the rows).
  template <class R, class Convert>
  __device__ __forceinline__ void load(const ArrayView& view, R* rows,
                                       const Convert& convert) const {
    visit(view, [&](int64_t channel, int64_t index, int at) {
      rows[at] = convert(load_component<R>(view, index), channel, at);
    });
  }
  template <class R>
  __device__ __forceinline__ void load(const ArrayView& view, R* rows) const {
    load(view, rows, [](R element, int64_t, int) { return element; });
  }
  /// Stores value(channel, place in the rows).
  template <class Value>
  __device__ __forceinline__ void store(const ArrayView& view, const Value& value) const {
    visit(view, [&](int64_t channel, int64_t index, int at) {
      store_component(view, index, value(channel, at));
    });
  }
};

}  // namespace selective_scan::cuda
