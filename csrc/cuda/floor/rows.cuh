// Rows of any dtype and layout, which a block moves element by element between global and shared
// memory.
#pragma once

#include "../kit/elements.cuh"
#include "layout.h"

namespace selective_scan::cuda::floor {

/// The steps of a chunk for 2^row_bits rows, ordered so that adjacent threads access elements along
/// rows or along steps, whichever are closer in memory.
struct RowOrder {
  bool along_rows;
  int row_bits;

  __device__ RowOrder(int64_t row_stride, int64_t step_stride, int row_bits)
      : along_rows(llabs(row_stride) < llabs(step_stride)), row_bits(row_bits) {}

  __device__ int count() const { return kChunk << row_bits; }
  __device__ int row(int i) const { return along_rows ? i & ((1 << row_bits) - 1) : i / kChunk; }
  __device__ int step(int i) const { return along_rows ? i >> row_bits : i % kChunk; }

  /// Calls visit(row, step) for all elements.
  template <class Visit>
  __device__ __forceinline__ void visit(const Visit& visit) const {
    for (int i = threadIdx.x; i < count(); i += blockDim.x) visit(row(i), step(i));
  }
  /// Calls use(row, step, fetch(row, step)) for all elements. Several fetches are in flight at a
  /// time, so fetch() must not compute with what it loads.
  template <class Fetch, class Use>
  __device__ __forceinline__ void visit(const Fetch& fetch, const Use& use) const {
    constexpr int kMany = 8;
    for (int first = threadIdx.x; first < count(); first += kMany * blockDim.x) {
      decltype(fetch(0, 0)) values[kMany] = {};
#pragma unroll
      for (int k = 0; k < kMany; ++k) {
        const int i = first + k * blockDim.x;
        if (i < count()) values[k] = fetch(row(i), step(i));
      }
#pragma unroll
      for (int k = 0; k < kMany; ++k) {
        const int i = first + k * blockDim.x;
        if (i < count()) use(row(i), step(i), values[k]);
      }
    }
  }
};

/// The part of (batch, channel, step) arrays that a block moves at a time: the steps of a chunk for
/// a tile of at most 2^row_bits channels.
struct ElementTile {
  int64_t batch;
  int64_t first_channel;
  int channels;
  int row_bits;
  int64_t first_step;
  int steps;

  __device__ bool has(int c, int t) const { return c < channels && t < steps; }
  __device__ int64_t index(const ArrayView& view, int c, int t) const {
    return batch * view.batch + (first_channel + c) * view.channel + (first_step + t) * view.step;
  }

  /// Fills rows with convert(element, channel, position in the rows), and with zero if the tile
  /// lacks the channel or the chunk the step. An absent array counts as zero.
  template <class R, class Convert>
  __device__ __forceinline__ void load(const ArrayView& view, R* rows,
                                       const Convert& convert) const {
    RowOrder(view.channel, view.step, row_bits)
        .visit([&](int c, int t) { return RawOf<R>(view, index(view, c, t), has(c, t)); },
               [&](int c, int t, RawOf<R> raw) {
                 const int at = c * kElementRow + t;
                 const R element = raw.value(view.dtype);
                 rows[at] = has(c, t) ? convert(element, first_channel + c, at) : R(0);
               });
  }
  template <class R>
  __device__ __forceinline__ void load(const ArrayView& view, R* rows) const {
    load(view, rows, [](R element, int64_t, int) { return element; });
  }
  /// Stores value(channel, position in the rows).
  template <class Value>
  __device__ __forceinline__ void store(const ArrayView& view, const Value& value) const {
    RowOrder(view.channel, view.step, row_bits).visit([&](int c, int t) {
      if (!has(c, t)) return;
      store_component(view, index(view, c, t), value(first_channel + c, c * kElementRow + t));
    });
  }
};

}  // namespace selective_scan::cuda::floor
