// Between global memory and a warp's shared memory, chunk after chunk, on the relay path.
//
// What a chunk needs is copied asynchronously while the chunk before it is scanned, as it lies in
// memory; it becomes fp32 when it is its turn.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "kernels.h"
#include "place.cuh"

namespace selective_scan::cuda::relay {

/// A warp's chunk.
struct Chunk {
  int64_t first_step;
  int steps;  // that exist
};

/// A lane's kItems steps of one channel of an array of vectors, elements of kSize bytes, in a slot
/// of the lane's own. Where a lane's vectors of chunk 0 lie is kept in shared memory too: in
/// registers it would crowd out the scan, and forming it again takes longer than loading it.
template <int kSize>
class Items {
 public:
  using Values = Pack<float, kItems>;
  static constexpr int kSlotStride = kWarpSize * kItems * 4;  // from all lanes' slots to more

  __device__ __forceinline__ Items(const ArrayView& view, const Place& place, char* slot,
                                   char** origin)
      : view_(view), slot_(slot), origin_(origin) {
    if (!view.present()) return;
    *origin = static_cast<char*>(view.data) +
              (place.batch * view.batch + place.item_channel_index() * view.channel +
               place.item_step() * view.step) *
                  kSize -
              (view.step < 0 ? (kItems - 1) * kSize : 0);
  }

  /// Starts copying a chunk to slot `which`; `exists` tells whether the lane has items in it.
  __device__ __forceinline__ void copy(const Chunk& chunk, bool exists, int which = 0) const {
    char* const slot = slot_ + which * kSlotStride;
    if (exists) {
      __pipeline_memcpy_async(slot, address(chunk), kItems * kSize);
    } else {
#pragma unroll
      for (int i = 0; i < kItems * kSize / 4; ++i) reinterpret_cast<uint32_t*>(slot)[i] = 0;
    }
  }
  __device__ __forceinline__ Values read(int which = 0) const {
    const auto words = load_pack<uint32_t, kItems * kSize / 4>(
        reinterpret_cast<const uint32_t*>(slot_ + which * kSlotStride));
    Values values;
    with_element_of<kSize>(view_.dtype == DType::kBFloat16,
                           [&](auto type) { words_to_reals<decltype(type)>(words.v, values.v); });
    return view_.step < 0 ? reversed(values) : values;
  }
  __device__ __forceinline__ void write(const Chunk& chunk, bool exists, Values values) const {
    if (!exists) return;
    char* const target = address(chunk);
    if (view_.step < 0) values = reversed(values);
    Pack<uint32_t, kItems * kSize / 4> words;
    with_element_of<kSize>(view_.dtype == DType::kBFloat16,
                           [&](auto type) { reals_to_words<decltype(type)>(values.v, words.v); });
    store_pack(reinterpret_cast<uint32_t*>(target), words);
  }

 private:
  __device__ __forceinline__ char* address(const Chunk& chunk) const {
    return *origin_ + (view_.step < 0 ? -chunk.first_step : chunk.first_step) * kSize;
  }
  const ArrayView& view_;
  char* slot_;
  char** origin_;
};

}  // namespace selective_scan::cuda::relay
