// How a warp of LaneMap::kMixed moves a chunk of an array that lies along steps or along channels.
//
// Kernels for elements of 4 bytes also take arrays of 2-byte elements that lie along steps.
//
// Lanes take slices of consecutive steps of one channel either way. Of neighbouring channels of 2
// bytes a chunk is four 8 x 8 matrices, of which every lane moves a pair of channels of every other
// step of eight, and which are turned round in registers. Of 4 bytes lanes move the elements of
// their slices one by one: those of a warp fill whole sectors.
#pragma once

#include "row_slices.cuh"

namespace selective_scan::cuda::streamed {

/// Of an 8 x 8 matrix of 2-byte elements, of which lane l has those of row l / 4 from column
/// l % 4 * 2 on. To be called by all lanes of a warp together.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

/// Where a lane stands in such an array, in place of a RowCursor. Slices are those of
/// LaneMap::kSteps; where `has_vectors` is set, channels are neighbours.
template <int kItems, int kSize>
class MixedCursor {
  static_assert(kItems == 8);
  using Rows = RowCursor<kItems, kSize>;
  using NarrowRows = RowCursor<kItems, 2>;

 public:
  __device__ __forceinline__ MixedCursor(const RowArray& rows, const LaneSlice& slice,
                                         int64_t batch, int64_t first_channel, int64_t chunk) {
    int channel = slice.channel;
    int step = slice.step;
    if (kSize == 2 && rows.has_vectors) {
      channel = slice.step / kItems * 2;
      step = slice.channel / 2 * kItems;
    }
    first_step_ = channel < slice.channels_left ? step : kChunk;
    const auto stride = static_cast<int>(slice.is_backward ? -rows.step : rows.step);
    stride_ = stride * (4 / kSize);
    address_ = rows.data + batch * rows.batch + (first_channel + channel) * rows.channel +
               (chunk * kChunk + step) * rows.step;
    if (slice.is_backward) address_ += (kItems - 1) * rows.step;
    if (kSize == 2 && rows.has_vectors) address_ += slice.channel % 2 * stride;
    // In registers, not to be made again for every chunk.
    asm volatile("" : "+r"(first_step_), "+r"(stride_));
  }

  __device__ __forceinline__ void advance(const RowArray& rows) { address_ += kChunk * rows.step; }

  __device__ __forceinline__ RawSlice<kItems> fetch(const RowArray& rows, const LaneSlice& slice,
                                                    int steps) const {
    RawSlice<kItems> raw{};
    fetch_into(rows, slice, steps, raw);
    return raw;
  }
  /// Starts loading. What is loaded is to be turned, once.
  __device__ __forceinline__ void fetch_into(const RowArray& rows, const LaneSlice&, int steps,
                                             RawSlice<kItems>& raw) const {
    if (!rows.has_vectors) {
      if (first_step_ >= steps) return;
      if (is_narrow(rows)) {
        NarrowRows(address_).load(raw);
      } else {
        Rows(address_).load(raw);
      }
      return;
    }
    __syncwarp();  // or the compiler would execute both ways always, under predicates
    if (first_step_ >= steps) return;
#pragma unroll
    for (int i = 0; i < Rows::kWords; ++i) {
      raw.words[i] = *reinterpret_cast<const uint32_t*>(word_address(i));
    }
  }
  template <int kCount>
  static __device__ __forceinline__ void turn(const RowArray& rows, uint32_t (&words)[kCount]) {
    if constexpr (kSize == 2) {
      if (!rows.has_vectors) return;
#pragma unroll
      for (int i = 0; i < Rows::kWords; ++i) words[i] = transpose(words[i]);
    }
  }
  static __device__ __forceinline__ Slice<kItems> to_values(const RowArray& rows,
                                                            const LaneSlice& slice,
                                                            const RawSlice<kItems>& raw) {
    if (is_narrow(rows)) return NarrowRows::to_values(rows, of_type(slice, rows), raw);
    return Rows::to_values(rows, slice, raw);
  }

  __device__ __forceinline__ void store(const RowArray& rows, const LaneSlice& slice, int steps,
                                        const Slice<kItems>& values) const {
    if (is_narrow(rows)) {
      if (first_step_ >= steps) return;
      NarrowRows(address_).store_words(NarrowRows::to_words(of_type(slice, rows), values));
      return;
    }
    auto words = Rows::to_words(slice, values);
    turn(rows, words.v);
    if (first_step_ >= steps) return;
    if (!rows.has_vectors) {
      Rows(address_).store_words(words);
      return;
    }
#pragma unroll
    for (int i = 0; i < Rows::kWords; ++i) {
      *reinterpret_cast<uint32_t*>(word_address(i)) = words.v[i];
    }
  }

 private:
  static __device__ __forceinline__ bool is_narrow(const RowArray& rows) {
    return kSize == 4 && rows.dtype != DType::kFloat32;
  }
  static __device__ __forceinline__ LaneSlice of_type(LaneSlice slice, const RowArray& rows) {
    slice.is_bfloat16 = rows.dtype == DType::kBFloat16;
    return slice;
  }
  __device__ __forceinline__ char* word_address(int i) const {
    return address_ + static_cast<uint64_t>(stride_) * i;
  }

  char* address_;    // the lowest one of what the lane moves
  int first_step_;   // of it, in the order of the scan
  uint32_t stride_;  // from one word to the next, where channels are neighbours
};

}  // namespace selective_scan::cuda::streamed
