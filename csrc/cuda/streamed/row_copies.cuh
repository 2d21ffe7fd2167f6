// Moves the rows of a warp's next chunk to shared memory while the warp works on the present one,
// and moves gradients back to arrays whose layout differs from the lanes' slices.
//
// A chunk is kChunk steps of kItems channels. Asynchronous copies bring an array's elements to its
// stage, from which every lane takes a slice of consecutive steps of one channel (see
// row_slices.cuh). Slices that are contiguous in memory are copied as they are. If channels are
// neighbors in memory, up to 16 bytes of a step are copied at a time and lanes pick their slices
// from these, for 2-byte elements by transposing 8 x 8 matrices. Single elements of 4 bytes are
// copied straight to their places.
#pragma once

#include "../kit/bulk_copy.cuh"
#include "row_slices.cuh"

namespace selective_scan::cuda::streamed {

/// Starts an asynchronous copy to shared memory.
template <int kBytes>
__device__ __forceinline__ void copy_async(int target, const char* source) {
  const uint32_t address = shared_address(shared_memory()) + target;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(source)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(source),
                 "n"(kBytes)
                 : "memory");
  }
}
/// Commits the copies since the last call as a group, which wait_for_copies() waits for.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits for the thread's own copies, but not for its pending loads to registers.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
}

/// Moves a chunk of an array between global memory, its stage and the lanes' slices.
template <int kItems, int kSize, LaneMap kMap>
struct RowCopies {
  using Raw = RawSlice<kItems>;
  using Words = typename RowCursor<kItems, kSize>::Words;
  static constexpr int kLanes = kWarpSize / kItems;   // per channel
  static constexpr int kSliceBytes = kItems * kSize;  // also those of a step's channels
  static constexpr int kAccess = kSliceBytes < 16 ? kSliceBytes : 16;

  static constexpr int kRow = kChunk * kSize;  // bytes of a row of the stage
  static constexpr int kStageBytes = kItems * kRow;

  /// Copies the lane's slice, which is contiguous in memory.
  static __device__ __forceinline__ void copy_slice(int stage, const LaneSlice& slice,
                                                    const char* source) {
#pragma unroll
    for (int at = 0; at < kSliceBytes; at += kAccess) {
      copy_async<kAccess>(stage + offset(slice.channel, slice.step + at / kSize), source + at);
    }
  }

  /// Returns the distance from a chunk's first element to the lowest address of the lane's slice,
  /// which is contiguous in memory.
  static __device__ __forceinline__ int slice_offset(const RowArray& array,
                                                     const LaneSlice& slice) {
    return slice.channel * static_cast<int>(array.channel) + slice.step * kSize;
  }

  /// Copies a chunk of any layout, whose first element is at `source`.
  static __device__ __forceinline__ void copy(int stage, const RowArray& array, const char* source,
                                              int lane, int steps, const LaneSlice& slice) {
    const int channels = slice.channels_left;
    if (array.has_vectors) {
      if (channels <= 0) return;
      const Vectors own(lane);
      source += own.step * static_cast<int>(array.step) + own.byte;
#pragma unroll
      for (int i = 0; i < Vectors::kCount; ++i) {
        const int step = own.step + i * Vectors::kSteps;
        if (step < steps) {
          copy_async<kAccess>(stage + tile_offset(step, own.byte),
                              source + i * Vectors::kSteps * static_cast<int>(array.step));
        }
      }
    } else if (array.has_step_vectors) {
      if (slice.exists(steps)) copy_slice(stage, slice, source + slice_offset(array, slice));
    } else if constexpr (kSize == 4) {
      if (lane >= steps) return;
      source += lane * static_cast<int>(array.step);
      const int target = offset(0, lane);
      for_channels<kItems, true>(channels, [&](int i) {
        copy_async<4>(stage + (target ^ i * 16) + i * kRow, source + channel_offset(array, i));
      });
    } else {
      prefetch(array, source, lane, steps, channels);
    }
  }

  /// True if single elements of 2 bytes occur. These cannot be copied asynchronously, so they pass
  /// through registers, one step of all channels per lane, to the stage.
  static constexpr bool kHasElements = kMap != LaneMap::kSteps && kSize == 2;

  static __device__ __forceinline__ void load_elements(const RowArray& array, const char* source,
                                                       int lane, int steps, int channels,
                                                       Raw& raw) {
    if (lane >= steps) return;
    source += lane * static_cast<int>(array.step);
    for_channels<kItems>(channels, [&](int i) {
      raw.words[i] = *reinterpret_cast<const uint16_t*>(source + channel_offset(array, i));
    });
  }
  static __device__ __forceinline__ void stage_elements(int stage, int lane, const Raw& raw) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      *reinterpret_cast<uint16_t*>(shared_memory() + stage + offset(i, lane)) =
          static_cast<uint16_t>(raw.words[i]);
    }
  }

  /// Prefetches a chunk into the L2 cache.
  static __device__ __forceinline__ void prefetch(const RowArray& array, const char* source,
                                                  int lane, int steps, int channels) {
    if (array.has_vectors || array.step != kSize) {
      source += lane * static_cast<int>(array.step);
      if (lane >= steps || channels <= 0) return;
    } else {
      const int channel = lane / kLanes;
      constexpr int kSector = 32 / kSize;  // steps
      const int step = min(lane % kLanes * kSector, kChunk - 1);
      if (channel >= channels || step >= steps) return;
      source += channel * static_cast<int>(array.channel) + step * kSize;
    }
    asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
  }

  /// Loads the lane's slice from the stage.
  static __device__ __forceinline__ void load(int stage, const LaneSlice& slice,
                                              const RowArray& array, int lane, Raw& raw) {
    if constexpr (kMap != LaneMap::kSteps) {
      if (array.has_vectors) {
        load_tile(stage, slice, lane, raw);
        return;
      }
    }
    constexpr int kWords = kSliceBytes / 4;
#pragma unroll
    for (int i = 0; i < kWords; i += kAccess / 4) {
      const auto pack = load_pack<uint32_t, kAccess / 4>(reinterpret_cast<const uint32_t*>(
          shared_memory() + stage + offset(slice.channel, slice.step + i * 4 / kSize)));
#pragma unroll
      for (int k = 0; k < kAccess / 4; ++k) raw.words[i + k] = pack.v[k];
    }
  }

  /// Stores kItems rows to an array of any layout, multiplied by the gate's rows if there is a
  /// gate.
  static __device__ __forceinline__ void store(const RowArray& array, char* target, int lane,
                                               int steps, const LaneSlice& slice, const float* rows,
                                               const float* gate) {
    using Element = Vector<kSize>;
    const auto element = [&](int at) {
      const float value = gate == nullptr ? rows[at] : rows[at] * gate[at];
      if constexpr (kSize == 4) {
        return bit_cast<uint32_t>(value);
      } else {
        return slice.is_bfloat16 ? to_bfloat16(value).bits : to_half(value).bits;
      }
    };
    if (array.has_vectors) {
      if (slice.channels_left <= 0) return;
      const Vectors own(lane);
      constexpr int kEach = kAccess / kSize;
      const int channel = own.byte / kSize;
      target += own.step * static_cast<int>(array.step) + own.byte;
#pragma unroll
      for (int i = 0; i < Vectors::kCount; ++i) {
        const int step = own.step + i * Vectors::kSteps;
        Pack<Element, kEach> elements;
#pragma unroll
        for (int k = 0; k < kEach; ++k) elements.v[k] = element((channel + k) * kRowStride + step);
        if (step < steps) {
          store_pack(reinterpret_cast<Element*>(target +
                                                i * Vectors::kSteps * static_cast<int>(array.step)),
                     elements);
        }
      }
      return;
    }
    target += lane * static_cast<int>(array.step);
    if (lane >= steps) return;
    for_channels<kItems, true>(slice.channels_left, [&](int i) {
      *reinterpret_cast<Element*>(target + channel_offset(array, i)) =
          element(i * kRowStride + lane);
    });
  }

  /// The number of words of a slice, and whether these are transposed in registers.
  static constexpr int kTurned = kSliceBytes / 4;
  static constexpr bool kTransposes = kMap != LaneMap::kSteps && kSize == 2 && kItems == 8;

  /// Stores the lane's slices to an array whose channels are neighbors: after the transposition, a
  /// lane has two channels of each of four steps.
  static __device__ __forceinline__ void store_transposed(const RowArray& array, char* target,
                                                          int lane, int steps, int channels,
                                                          const Words& words) {
    const int step = lane / 8 * 8 + lane / 4 % 2;
    const int stride = static_cast<int>(array.step);
    target += step * stride + lane % 4 * 4;
    uint32_t turned[kTurned];
#pragma unroll
    for (int i = 0; i < kTurned; ++i) {
      asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
                   : "=r"(turned[i])
                   : "r"(words.v[i]));
    }
    if (channels <= 0) return;
#pragma unroll
    for (int i = 0; i < kTurned; ++i) {
      if (step + 2 * i < steps) {
        *reinterpret_cast<uint32_t*>(target + 2 * i * stride) = turned[i];
      }
    }
  }

 private:
  /// The parts of a step's channels that a lane moves, each of 16 bytes, or of all bytes if a step
  /// has fewer. Neighboring lanes share a sector.
  struct Vectors {
    static constexpr int kParts = kSliceBytes / kAccess;  // per step
    static constexpr int kSteps = kWarpSize / kParts;     // that a warp moves at a time
    static constexpr int kCount = kParts;
    int step;
    int byte;
    explicit __device__ __forceinline__ Vectors(int lane)
        : step(lane / kParts), byte(lane % kParts * kAccess) {}
  };

  /// Returns the offset of a channel in an array without vectors, whose channel stride is never
  /// negative. In 32 bits, the product and its sum with an address are one instruction.
  static __device__ __forceinline__ uint64_t channel_offset(const RowArray& array, int channel) {
    return static_cast<uint64_t>(static_cast<uint32_t>(array.channel)) *
           static_cast<uint32_t>(channel);
  }
  /// Returns the offset in a stage of rows [channel][step]. For 4-byte elements, the order of the
  /// quads of steps differs from row to row, which spreads both slices and columns over the banks.
  static __device__ __forceinline__ int offset(int channel, int step) {
    if constexpr (kSize == 2) return channel * kRow + step * kSize;
    return channel * kRow + ((step / 4 ^ channel) & 7) * 16 + step % 4 * 4;
  }
  /// Returns the offset in a stage of rows [step][channel], swizzled so that both copies to it and
  /// loads from it are spread over the banks.
  static __device__ __forceinline__ int tile_offset(int step, int byte) {
    return (step * kSliceBytes + byte) ^ step / 8 * (kSize == 2 ? 32 : kSliceBytes);
  }
  static __device__ __forceinline__ void load_tile(int stage, const LaneSlice& slice, int lane,
                                                   Raw& raw) {
    if constexpr (kTransposes) {
      // This lane passes the address of a step of matrix i; the lane gets the words of its channel.
      const int step = lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
      const uint32_t from = shared_address(shared_memory()) + stage + tile_offset(step, 0);
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(raw.words[0]), "=r"(raw.words[1]), "=r"(raw.words[2]), "=r"(raw.words[3])
                   : "r"(from)
                   : "memory");
    } else {
      const auto element = [&](int i) {
        return static_cast<uint32_t>(*reinterpret_cast<const Vector<kSize>*>(
            shared_memory() + stage + tile_offset(slice.step + i, slice.channel * kSize)));
      };
      constexpr int kEach = 4 / kSize;
#pragma unroll
      for (int i = 0; i < kItems / kEach; ++i) {
        raw.words[i] = element(i * kEach);
        if constexpr (kEach == 2) raw.words[i] |= element(i * kEach + 1) << 16;
      }
    }
  }
};

}  // namespace selective_scan::cuda::streamed
