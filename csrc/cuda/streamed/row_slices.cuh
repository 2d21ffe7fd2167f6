// Moves a warp's chunk of a (batch, channel, step) array between global memory and registers.
// row_array.h describes the division of a chunk among lanes.
//
// fetch() only starts loads: to_values() is the first to read the words, a chunk later.
#pragma once

#include "../kit/barriers.cuh"
#include "../kit/elements.cuh"
#include "../kit/geometry.cuh"
#include "row_array.h"

namespace selective_scan::cuda::streamed {

/// The values of its warp's chunk that a lane holds, and which of them exist. Values are in the
/// order of memory, which is the reverse of the scan's order if the scan runs backward in memory.
/// As long as all arrays have the same direction, only transfers through shared memory depend on it
/// (slice_to_shared(), slice_from_shared()).
struct LaneSlice {
  LaneMap map;  // preferably a compile-time constant
  bool is_backward;
  bool is_bfloat16;   // for 2-byte elements; the same in all arrays
  int channel;        // the first one
  int step;           // the first one in the order of the scan
  int position;       // of the slice in a shared-memory row in the order of memory
  int channels_left;  // of the warp, from its first channel on

  /// `like` is any of the arrays.
  template <int kItems>
  static __device__ __forceinline__ LaneSlice make(LaneMap map, const RowArray& like, int lane,
                                                   int channels_left) {
    constexpr int kLanes = kWarpSize / kItems;  // per channel
    LaneSlice slice{map,  like.step < 0, like.dtype == DType::kBFloat16, 0, lane,
                    lane, channels_left};
    if (map == LaneMap::kSteps) {
      slice.channel = lane / kLanes;
      slice.step = lane % kLanes * kItems;
      slice.position = slice.is_backward ? kChunk - kItems - slice.step : slice.step;
      asm volatile("" : "+r"(slice.position));  // so that it is not recomputed for every chunk
    } else if (map == LaneMap::kStepPairs) {
      slice.channel = lane % 2 * (kItems / 2);
      slice.step = slice.position = lane / 2 * 2;
    }
    return slice;
  }
  __device__ __forceinline__ bool has_vectors(const RowArray& rows) const {
    return map == LaneMap::kSteps || map == LaneMap::kStepPairs ||
           (map == LaneMap::kChannels && rows.has_vectors);
  }
  /// Returns whether any of the lane's values exists in a chunk that starts when `steps` steps are
  /// left.
  __device__ __forceinline__ bool exists(int steps) const {
    return channel < channels_left && step < steps;
  }
};

/// The raw words of a lane's values: packed if they were loaded as vectors, else one element per
/// word.
template <int kItems>
struct RawSlice {
  uint32_t words[kItems];
};
template <int kItems>
struct Slice {
  float v[kItems];
};

/// Calls move(i) for those of kItems channels that exist; if all of them do, without checks. The
/// code for fewer channels is a loop if `kLoops`, which is short.
template <int kItems, bool kLoops = false, class Move>
__device__ __forceinline__ void for_channels(int channels, const Move& move) {
  if (channels >= kItems) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) move(i);
  } else {
#pragma unroll(kLoops ? 1 : kItems)
    for (int i = 0; i < (kLoops ? channels : kItems); ++i) {
      if (kLoops || i < channels) move(i);
    }
  }
}

/// A lane's position in an array: the lowest address of its slice of a chunk. kSize is the size of
/// an element in bytes, 2 or 4.
template <int kItems, int kSize>
class RowCursor {
 public:
  /// Starts at chunk `chunk`. `first_channel` is that of the warp.
  __device__ __forceinline__ RowCursor(const RowArray& rows, const LaneSlice& slice, int64_t batch,
                                       int64_t first_channel, int64_t chunk)
      : address_(rows.at(batch, first_channel + slice.channel, chunk * kChunk + slice.step)) {
    if (slice.map == LaneMap::kSteps && rows.step < 0) address_ -= (kItems - 1) * kSize;
  }

  /// Starts at the lowest address of a slice.
  explicit __device__ __forceinline__ RowCursor(char* address) : address_(address) {}

  /// Moves forward by `steps` steps, which may be negative.
  __device__ __forceinline__ void advance(const RowArray& rows, int steps) {
    address_ += steps * rows.step;
  }

  /// Moves by bytes, for callers that know the distance between chunks.
  __device__ __forceinline__ void advance_bytes(int bytes) { address_ += bytes; }

  /// Starts loading. Missing values are zero.
  __device__ __forceinline__ RawSlice<kItems> fetch(const RowArray& rows, const LaneSlice& slice,
                                                    int steps) const {
    RawSlice<kItems> raw{};
    fetch_into(rows, slice, steps, raw);
    return raw;
  }
  /// Starts loading into `raw`, whose words stay unchanged if none of the lane's values exists.
  __device__ __forceinline__ void fetch_into(const RowArray& rows, const LaneSlice& slice,
                                             int steps, RawSlice<kItems>& raw) const {
    if (!slice.exists(steps)) return;
    if constexpr (kHasPairs) {
      if (slice.map == LaneMap::kStepPairs) {
        fetch_pairs(rows, slice.exists(steps - 1), raw);
        return;
      }
    }
    if (slice.has_vectors(rows)) {
      load(raw);
      return;
    }
    for_channels<kItems>(slice.channels_left, [&](int i) {
      raw.words[i] = *reinterpret_cast<const Element*>(element_address(rows, i));
    });
  }

  /// Starts loading a slice that is one vector in memory.
  __device__ __forceinline__ void load(RawSlice<kItems>& raw) const {
    const auto pack = load_pack<uint32_t, kWords>(reinterpret_cast<const uint32_t*>(address_));
#pragma unroll
    for (int i = 0; i < kWords; ++i) raw.words[i] = pack.v[i];
  }

  /// Prefetches the slice of a whole chunk into the L2 cache.
  __device__ __forceinline__ void prefetch(const RowArray& rows, const LaneSlice& slice) const {
    const int stride = static_cast<int>(rows.channel);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i > 0 && rows.has_vectors) break;
      if (slice.channel + i < slice.channels_left) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(address_ + i * stride));
      }
    }
  }

  /// Prefetches a slice that is contiguous in memory.
  __device__ __forceinline__ void prefetch_here() const {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address_));
  }

  __device__ __forceinline__ void store(const RowArray& rows, const LaneSlice& slice, int steps,
                                        const Slice<kItems>& values) const {
    if (!slice.exists(steps)) return;
    if constexpr (kHasPairs) {
      if (slice.map == LaneMap::kStepPairs) {
        store_pairs(rows, slice, slice.exists(steps - 1), values);
        return;
      }
    }
    if (slice.has_vectors(rows)) {
      store_words(to_words(slice, values));
      return;
    }
    Element elements[kItems];
    with_element_of<kSize>(slice.is_bfloat16, [&](auto type) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        elements[i] = bit_cast<Element>(to_element<decltype(type)>(values.v[i]));
      }
    });
    for_channels<kItems>(slice.channels_left, [&](int i) {
      *reinterpret_cast<Element*>(element_address(rows, i)) = elements[i];
    });
  }

  /// The words of a slice that is one vector in memory.
  static constexpr int kWords = kItems * kSize / 4;
  using Words = Pack<uint32_t, kWords>;

  static __device__ __forceinline__ Words to_words(const LaneSlice& slice,
                                                   const Slice<kItems>& values) {
    Words words;
    with_element_of<kSize>(slice.is_bfloat16,
                           [&](auto type) { reals_to_words<decltype(type)>(values.v, words.v); });
    return words;
  }
  __device__ __forceinline__ void store_words(const Words& words) const {
    store_pack(reinterpret_cast<uint32_t*>(address_), words);
  }

  /// Returns the values of a slice, in the order of memory.
  static __device__ __forceinline__ Slice<kItems> to_values(const RowArray& rows,
                                                            const LaneSlice& slice,
                                                            const RawSlice<kItems>& raw) {
    Slice<kItems> values;
    if constexpr (kHasPairs) {
      if (slice.map == LaneMap::kStepPairs) {
        pairs_to_values(slice, raw, values);
        return values;
      }
    }
    with_element_of<kSize>(slice.is_bfloat16, [&](auto type) {
      using Type = decltype(type);
      if (kSize == 4 || slice.has_vectors(rows)) {
        words_to_reals<Type>(raw.words, values.v);
      } else {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          values.v[i] = to_real(bit_cast<Type>(static_cast<Element>(raw.words[i])));
        }
      }
    });
    return values;
  }

 private:
  using Element = Vector<kSize>;

  static constexpr int kHalfWords = kWords / 2;  // per step with LaneMap::kStepPairs
  static constexpr bool kHasPairs = kHalfWords > 0;

  __device__ __forceinline__ void fetch_pairs(const RowArray& rows, bool both,
                                              RawSlice<kItems>& raw) const {
    const auto load = [&](int step) {
      const auto pack = load_pack<uint32_t, kHalfWords>(
          reinterpret_cast<const uint32_t*>(address_ + step * rows.step));
#pragma unroll
      for (int i = 0; i < kHalfWords; ++i) raw.words[step * kHalfWords + i] = pack.v[i];
    };
    load(0);
    if (both) load(1);
  }
  __device__ __forceinline__ void store_pairs(const RowArray& rows, const LaneSlice& slice,
                                              bool both, const Slice<kItems>& values) const {
    Pack<uint32_t, kHalfWords> packs[2];
    with_element_of<kSize>(slice.is_bfloat16, [&](auto type) {
#pragma unroll
      for (int i = 0; i < kHalfWords; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if constexpr (kSize == 4) {
            packs[j].v[i] = bit_cast<uint32_t>(values.v[2 * i + j]);
          } else {
            packs[j].v[i] = pack(values.v[4 * i + j], values.v[4 * i + 2 + j], type);
          }
        }
      }
    });
    store_pack(reinterpret_cast<uint32_t*>(address_), packs[0]);
    if (both) store_pack(reinterpret_cast<uint32_t*>(address_ + rows.step), packs[1]);
  }
  static __device__ __forceinline__ void pairs_to_values(const LaneSlice& slice,
                                                         const RawSlice<kItems>& raw,
                                                         Slice<kItems>& values) {
    with_element_of<kSize>(slice.is_bfloat16, [&](auto type) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int c = i / 2;
        const uint32_t word = raw.words[i % 2 * kHalfWords + c * kSize / 4];
        if constexpr (kSize == 4) {
          values.v[i] = bit_cast<float>(word);
        } else {
          values.v[i] = half_of(word, c % 2 == 0, type);
        }
      }
    });
  }

  /// Returns the address of the i-th channel's element. With an unsigned 32-bit stride, this is one
  /// instruction.
  __device__ __forceinline__ char* element_address(const RowArray& rows, int i) const {
    return address_ + static_cast<uint64_t>(static_cast<uint32_t>(rows.channel)) * i;
  }

  char* address_;
};

template <int kItems>
__device__ __forceinline__ Slice<kItems> reversed(const Slice<kItems>& values) {
  Slice<kItems> result;
#pragma unroll
  for (int i = 0; i < kItems; ++i) result.v[i] = values.v[kItems - 1 - i];
  return result;
}

/// The order of a row in shared memory. A scan that takes rows in the order of memory needs code
/// for each direction; reversing slices here would cost a few instructions per value in both
/// directions.
enum class SharedOrder : int8_t { kScan, kMemory };

/// Stores four floats to shared memory with one access. If the values come from several branches,
/// the compiler would otherwise emit four stores, with bank conflicts.
__device__ __forceinline__ void store_whole(float* row, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}

/// Stores a slice to the warp's [channel][step] rows in shared memory, whose stride is kRowStride.
template <SharedOrder kOrder = SharedOrder::kScan, int kItems>
__device__ __forceinline__ void slice_to_shared(const LaneSlice& slice, const Slice<kItems>& values,
                                                float* rows) {
  if (slice.map == LaneMap::kSteps) {
    float* row = rows + slice.channel * kRowStride;
    if constexpr (kOrder == SharedOrder::kMemory) {
#pragma unroll
      for (int i = 0; i < kItems; i += 4) {
        store_whole(row + slice.position + i, values.v[i], values.v[i + 1], values.v[i + 2],
                    values.v[i + 3]);
      }
    } else {
      store_pack(row + slice.step,
                 bit_cast<Pack<float, kItems>>(slice.is_backward ? reversed(values) : values));
    }
  } else if (slice.map == LaneMap::kStepPairs) {
#pragma unroll
    for (int c = 0; c < kItems / 2; ++c) {
      store_pack(rows + (slice.channel + c) * kRowStride + slice.step,
                 Pack<float, 2>{values.v[2 * c], values.v[2 * c + 1]});
    }
  } else {
#pragma unroll
    for (int i = 0; i < kItems; ++i) rows[i * kRowStride + slice.step] = values.v[i];
  }
}
/// Writes zeros for the steps of a slice that lie past the last step.
template <int kItems>
__device__ __forceinline__ void clear_missing_steps(const LaneSlice& slice, int steps,
                                                    float* rows) {
  if (!slice.exists(steps)) {
    slice_to_shared<SharedOrder::kMemory>(slice, Slice<kItems>{}, rows);
  } else if (slice.map == LaneMap::kStepPairs && !slice.exists(steps - 1)) {
#pragma unroll
    for (int c = 0; c < kItems / 2; ++c) {
      rows[(slice.channel + c) * kRowStride + slice.step + 1] = 0.0f;
    }
  }
}
/// Returns the sum of the slices of kPlanes such arrays, which are `plane` floats apart and have
/// rows in the order of memory.
template <int kItems, int kPlanes>
__device__ __forceinline__ Slice<kItems> slice_from_shared(const LaneSlice& slice,
                                                           const float* rows, int plane) {
  Slice<kItems> sum{};
#pragma unroll
  for (int p = 0; p < kPlanes; ++p, rows += plane) {
    Slice<kItems> values;
    if (slice.map == LaneMap::kSteps) {
      values = bit_cast<Slice<kItems>>(
          load_pack<float, kItems>(rows + slice.channel * kRowStride + slice.position));
    } else if (slice.map == LaneMap::kStepPairs) {
#pragma unroll
      for (int c = 0; c < kItems / 2; ++c) {
        const auto pair = load_pack<float, 2>(rows + (slice.channel + c) * kRowStride + slice.step);
        values.v[2 * c] = pair.v[0];
        values.v[2 * c + 1] = pair.v[1];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kItems; ++i) values.v[i] = rows[i * kRowStride + slice.step];
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) sum.v[i] = p == 0 ? values.v[i] : sum.v[i] + values.v[i];
  }
  return sum;
}

}  // namespace selective_scan::cuda::streamed
