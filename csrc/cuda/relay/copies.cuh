// Between global memory and a warp's shared memory, chunk after chunk, on the relay path.
//
// What a chunk needs is copied asynchronously while the chunk before it is scanned, as it lies in
// memory; it becomes fp32 when it is its turn. For each Storage there is
//   Items<S>          a lane's S::kItems steps of one channel, in a slot of the lane's own
//   Projection<S>     B or C of the tile, in rows along time
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

/// kCount elements in shared memory, of kSize bytes, to fp32.
template <int kSize, int kCount>
__device__ __forceinline__ Pack<float, kCount> convert_elements(const void* address,
                                                                bool is_bfloat16) {
  const auto words = load_pack<uint32_t, kCount * kSize / 4>(static_cast<const uint32_t*>(address));
  Pack<float, kCount> values;
  with_element_of<kSize>(is_bfloat16,
                         [&](auto type) { words_to_reals<decltype(type)>(words.v, values.v); });
  return values;
}

template <int kSize>
struct Vectors {
  static constexpr int kMathSize = kSize;  // of the elements whose rounding hides errors

  /// Where a lane's vectors of chunk 0 lie is kept in shared memory too: in registers it would
  /// crowd out the scan, and forming it again takes longer than loading it.
  template <class S>
  class Items {
   public:
    using Values = Pack<float, S::kItems>;
    static constexpr int kSlotStride = kWarpSize * S::kItems * 4;  // from all lanes' slots to more

    __device__ __forceinline__ Items(const ArrayView& view, const Place<S>& place, char* slot,
                                     char** origin)
        : view_(view), slot_(slot), origin_(origin) {
      if (!view.present()) return;
      *origin = static_cast<char*>(view.data) +
                (place.batch * view.batch + place.item_channel_index() * view.channel +
                 place.item_step() * view.step) *
                    kSize -
                (view.step < 0 ? (S::kItems - 1) * kSize : 0);
    }

    /// Starts copying a chunk to slot `which`; `exists` tells whether the lane has items in it.
    __device__ __forceinline__ void copy(const Chunk& chunk, bool exists, int which = 0) const {
      char* const slot = slot_ + which * kSlotStride;
      if (exists) {
        __pipeline_memcpy_async(slot, address(chunk), S::kItems * kSize);
      } else {
#pragma unroll
        for (int i = 0; i < S::kItems * kSize / 4; ++i) reinterpret_cast<uint32_t*>(slot)[i] = 0;
      }
    }
    __device__ __forceinline__ Values read(int which = 0) const {
      const Values values = convert_elements<kSize, S::kItems>(slot_ + which * kSlotStride,
                                                               view_.dtype == DType::kBFloat16);
      return view_.step < 0 ? reversed(values) : values;
    }
    __device__ __forceinline__ void write(const Chunk& chunk, bool exists, Values values) const {
      if (!exists) return;
      char* const target = address(chunk);
      if (view_.step < 0) values = reversed(values);
      Pack<uint32_t, S::kItems * kSize / 4> words;
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

  template <class S>
  class Projection {
   public:
    static constexpr int kRowBytes = raw_row_bytes(S::kSteps, kSize);

    __device__ __forceinline__ Projection(const ArrayView& view, const Place<S>& place,
                                          int64_t dstate, char* rows, char** origin)
        : view_(view),
          rows_(rows),
          origin_(origin),
          lane_(place.lane),
          dstate_(static_cast<int>(dstate)) {
      *origin =
          static_cast<char*>(view.data) +
          (place.batch * view.batch + place.group * view.group + first_row() * view.state) * kSize -
          (view.step < 0 ? (S::kSteps - 1) * kSize : 0) + at();
      // The rows of states that do not exist are never written again.
#pragma unroll
      for (int row = first_row(); row < kPaddedStates; row += kRowsAtATime) {
        if (row >= dstate) clear(row);
      }
    }

    /// Starts copying a chunk; reversed rows keep the order of memory.
    __device__ __forceinline__ void copy(const Chunk& chunk) const {
      const char* source =
          *origin_ + (view_.step < 0 ? -chunk.first_step : chunk.first_step) * kSize;
      const int step = view_.step < 0 ? S::kSteps - (at() + 16) / kSize : at() / kSize;
      const bool exists = step < chunk.steps;
#pragma unroll
      for (int k = 0; k < kPaddedStates / kRowsAtATime; ++k) {
        const int row = first_row() + k * kRowsAtATime;
        if (row < dstate_) {
          if (exists) {
            __pipeline_memcpy_async(rows_ + row * kRowBytes + at(), source, 16);
          } else {
            clear(row);
          }
        }
        source += kRowsAtATime * kSize * view_.state;
      }
    }
    /// One row in fp32, in the order of the scan, eight steps at a time.
    template <class Store>
    __device__ __forceinline__ void convert(int row, const Store& store) const {
      const char* const source = rows_ + row * kRowBytes;
      const bool is_bfloat16 = view_.dtype == DType::kBFloat16;
      if (view_.step < 0) {
#pragma unroll
        for (int t = 0; t < S::kSteps; t += 8) {
          store(t, reversed(convert_elements<kSize, 8>(source + (S::kSteps - 8 - t) * kSize,
                                                       is_bfloat16)));
        }
      } else {
#pragma unroll
        for (int t = 0; t < S::kSteps; t += 8) {
          store(t, convert_elements<kSize, 8>(source + t * kSize, is_bfloat16));
        }
      }
    }

   private:
    static constexpr int kVectors = S::kSteps * kSize / 16;  // of a row
    static constexpr int kRowsAtATime =
        kWarpSize / kVectors < kPaddedStates ? kWarpSize / kVectors : kPaddedStates;

    __device__ int first_row() const { return lane_ / kVectors; }
    __device__ int at() const { return lane_ % kVectors * 16; }
    __device__ void clear(int row) const {
      *reinterpret_cast<uint4*>(rows_ + row * kRowBytes + at()) = uint4{};
    }
    const ArrayView& view_;
    char* rows_;
    char** origin_;
    int lane_;
    int dstate_;
  };

  /// Converts the lane's row of B or C, which lie one behind the other.
  template <class S, class Store>
  static __device__ __forceinline__ void convert_row(const Projection<S>& B, const Projection<S>&,
                                                     int lane, const Store& store) {
    B.convert(lane, store);
  }
};

/// Copies one element of 2 or 4 bytes, or zero where it does not exist.
__device__ __forceinline__ void copy_item(char* target, const char* source, int size, bool exists) {
  if (size == 2) {
    *reinterpret_cast<uint16_t*>(target) =
        exists ? *reinterpret_cast<const uint16_t*>(source) : uint16_t{0};
  } else if (exists) {
    __pipeline_memcpy_async(target, source, 4);
  } else {
    *reinterpret_cast<uint32_t*>(target) = 0;
  }
}

struct Scattered {
  static constexpr int kMathSize = 4;

  template <class S>
  class Items {
   public:
    using Values = Pack<float, S::kItems>;
    static constexpr int kSlotStride = kWarpSize * S::kItems * 4;

    __device__ __forceinline__ Items(const ArrayView& view, const Place<S>& place, char* slot,
                                     char** origin)
        : view_(view), slot_(slot), origin_(origin), step_(place.item_step()) {
      if (!view.present()) return;
      *origin = static_cast<char*>(view.data) +
                (place.batch * view.batch + place.item_channel_index() * view.channel) * size();
    }
    __device__ __forceinline__ void copy(const Chunk& chunk, bool exists, int which = 0) const {
      char* const slot = slot_ + which * kSlotStride;
      const char* source = address(chunk.first_step + step_);
#pragma unroll
      for (int i = 0; i < S::kItems; ++i) {
        copy_item(slot + i * size(), source, size(), exists && step_ + i < chunk.steps);
        source += view_.step * size();
      }
    }
    __device__ __forceinline__ Values read(int which = 0) const {
      return load_elements<float, S::kItems>(slot_ + which * kSlotStride, view_.dtype);
    }
    __device__ __forceinline__ void write(const Chunk& chunk, bool exists,
                                          const Values& values) const {
      char* target = address(chunk.first_step + step_);
#pragma unroll
      for (int i = 0; i < S::kItems; ++i) {
        if (exists && step_ + i < chunk.steps) {
          store_elements(target, view_.dtype, Pack<float, 1>{values.v[i]});
        }
        target += view_.step * size();
      }
    }

   private:
    __device__ int size() const { return static_cast<int>(element_size(view_.dtype)); }
    __device__ char* address(int64_t step) const { return *origin_ + step * view_.step * size(); }
    const ArrayView& view_;
    char* slot_;
    char** origin_;
    int step_;
  };

  template <class S>
  class Projection {
   public:
    static constexpr int kRowBytes = raw_row_bytes(S::kSteps, 4);

    __device__ __forceinline__ Projection(const ArrayView& view, const Place<S>& place,
                                          int64_t dstate, char* rows, char** origin)
        : view_(view),
          rows_(rows),
          origin_(origin),
          lane_(place.lane),
          dstate_(static_cast<int>(dstate)) {
      *origin = static_cast<char*>(view.data) +
                (place.batch * view.batch + place.group * view.group) * size();
    }
    __device__ __forceinline__ void copy(const Chunk& chunk) const {
      // Neighbouring lanes take neighbouring states or neighbouring steps, whichever lie together.
      const bool along_states = view_.state == 1;
#pragma unroll 8
      for (int i = lane_; i < kPaddedStates * S::kSteps; i += kWarpSize) {
        const int state = along_states ? i % kPaddedStates : i / S::kSteps;
        const int step = along_states ? i / kPaddedStates : i % S::kSteps;
        copy_item(
            rows_ + state * kRowBytes + step * size(),
            *origin_ + (state * view_.state + (chunk.first_step + step) * view_.step) * size(),
            size(), state < dstate_ && step < chunk.steps);
      }
    }
    template <class Store>
    __device__ __forceinline__ void convert(int row, const Store& store) const {
#pragma unroll
      for (int t = 0; t < S::kSteps; t += 8) {
        store(t, load_elements<float, 8>(rows_ + row * kRowBytes + t * size(), view_.dtype));
      }
    }

   private:
    __device__ int size() const { return static_cast<int>(element_size(view_.dtype)); }
    const ArrayView& view_;
    char* rows_;
    char** origin_;
    int lane_;
    int dstate_;
  };

  template <class S, class Store>
  static __device__ __forceinline__ void convert_row(const Projection<S>& B, const Projection<S>& C,
                                                     int lane, const Store& store) {
    if (lane < kPaddedStates) {
      B.convert(lane, store);
    } else {
      C.convert(lane - kPaddedStates, store);
    }
  }
};

/// Converts the rows of B and C to the tile that TileReader reads, of a shape that has them as
/// rows; every lane takes one.
template <class S, class Storage, class Projection>
__device__ __forceinline__ void convert_projections(const Projection& B, const Projection& C,
                                                    int lane, float* tile) {
  Storage::template convert_row<S>(B, C, lane, [&](int step, const Pack<float, 8>& values) {
    static_assert(!S::kStepMajor);
    store_pack(tile + lane * S::kRow + step, values);
  });
}

}  // namespace selective_scan::cuda::relay
