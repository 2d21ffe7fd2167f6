// What the narrow kernels have in common: a warp's channels, and how their rows come to shared
// memory, and to the lanes that own them.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "../kit/elements.cuh"
#include "../kit/launch_tools.h"
#include "../kit/states.cuh"
#include "../kit/step_math.cuh"
#include "kernels.h"

namespace selective_scan::cuda::narrow {

/// A value for each of some steps.
template <int kCount>
struct Values {
  float v[kCount];
};

/// The channels of a warp, and the lane's.
struct Tile {
  int64_t batch;
  int64_t group;
  int64_t index;          // of the group's tiles
  int64_t first_channel;  // of all
  int channels;
  int lane;

  __device__ __forceinline__ Tile(const ScanParams& params, int64_t tiles)
      : batch(blockIdx.x / (tiles * params.groups)),
        group(blockIdx.x / tiles % params.groups),
        index(blockIdx.x % tiles),
        lane(static_cast<int>(threadIdx.x)) {
    const int64_t group_channels = params.dim / params.groups;
    const int64_t offset = index * kWarpSize;
    first_channel = group * group_channels + offset;
    const int64_t left = group_channels - offset;
    channels = static_cast<int>(left < kWarpSize ? left : kWarpSize);
  }
  __device__ __forceinline__ bool exists() const { return lane < channels; }
  /// The lane's; that of the first lane, if it has none.
  __device__ __forceinline__ int64_t channel() const {
    return first_channel + (exists() ? lane : 0);
  }
  __device__ __forceinline__ char* origin(const Sequence& sequence) const {
    return sequence.data + batch * sequence.batch + first_channel * sequence.channel;
  }
};

/// The states of the lane's channel in an array that has them.
template <int kStates>
__device__ __forceinline__ void load_states(const ArrayView& view, const Tile& tile,
                                            const ScanParams& params, float (&states)[kStates]) {
  const int64_t base = tile.batch * view.batch + tile.channel() * view.channel;
#pragma unroll
  for (int n = 0; n < kStates; ++n) {
    const bool is_there = view.present() && tile.exists() && n < params.dstate;
    states[n] = is_there ? load_component<float>(view, base + n * view.state) : 0.0f;
  }
}

/// Moves the rows of a tile between global and shared memory.
template <class Element, bool kDense>
class RowMover {
  static constexpr int kSize = sizeof(Element);

 public:
  __device__ __forceinline__ RowMover(const RowLayout& layout, const Tile& tile, int seqlen)
      : layout_(layout), tile_(tile), seqlen_(seqlen) {}

  /// The lane's row of an array whose rows begin at `rows`, at the first step of a chunk.
  __device__ __forceinline__ char* lane_row(char* rows, int chunk) const {
    return rows + tile_.lane * layout_.pitch + (kDense ? chunk * kChunk * kSize : 0);
  }
  /// Starts to copy a chunk; all steps, if rows are dense, with the first one.
  __device__ __forceinline__ void fetch(char* rows, const Sequence& sequence, int chunk) const {
    for_each_piece(sequence, chunk, [&]<int kBytes>(int at, char* global) {
      __pipeline_memcpy_async(rows + at, global, kBytes);
    });
  }
  /// Stores a chunk; all steps, if rows are dense, with the last one or, backwards, the first.
  __device__ __forceinline__ void store(const char* rows, const Sequence& sequence,
                                        int chunk) const {
    for_each_piece(sequence, chunk, [&]<int kBytes>(int at, char* global) {
      using Word = Vector<kBytes>;
      *reinterpret_cast<Word*>(global) = *reinterpret_cast<const Word*>(rows + at);
    });
  }

 private:
  template <class Move>
  __device__ __forceinline__ void for_each_piece(const Sequence& sequence, int chunk,
                                                 const Move& move) const {
    char* const origin = tile_.origin(sequence);
    if constexpr (kDense) {
      const int bytes = tile_.channels * layout_.pitch;
      for (int at = tile_.lane * 16; at < bytes; at += kWarpSize * 16) {
        move.template operator()<16>(at, origin + at);
      }
    } else if (layout_.access == 16) {
      for_each_vector<16>(origin, sequence.channel, chunk, move);
    } else if (layout_.access == 8) {
      for_each_vector<8>(origin, sequence.channel, chunk, move);
    } else {
      for_each_vector<4>(origin, sequence.channel, chunk, move);
    }
  }
  template <int kBytes, class Move>
  __device__ __forceinline__ void for_each_vector(char* origin, int64_t stride, int chunk,
                                                  const Move& move) const {
    constexpr int kPieces = kChunk * kSize / kBytes;  // of a row
    const int left = (seqlen_ - chunk * kChunk) * kSize;
    const int byte = tile_.lane % kPieces * kBytes;
    if (byte >= left) return;
    origin += chunk * kChunk * kSize + byte;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int channel = tile_.lane / kPieces + i * (kWarpSize / kPieces);
      if (channel < tile_.channels) {
        move.template operator()<kBytes>(channel * layout_.pitch + byte,
                                         origin + channel * stride);
      }
    }
  }

  const RowLayout& layout_;
  const Tile& tile_;
  int seqlen_;
};

/// Reads kCount steps of a lane's row; the first `steps` of them exist, the others are zero.
template <class Element, bool kDense, int kCount>
__device__ __forceinline__ void read_row(const char* row, int steps, Values<kCount>& values) {
  if constexpr (kDense) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values.v[i] = to_real(reinterpret_cast<const Element*>(row)[i]);
    }
  } else {
    constexpr int kWords = kCount * sizeof(Element) / 4;
    const auto words = load_pack<uint32_t, kWords>(reinterpret_cast<const uint32_t*>(row));
    words_to_reals<Element>(words.v, values.v);
  }
  if (steps >= kCount) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i >= steps) values.v[i] = 0;
  }
}

/// Writes the steps that exist; of padded rows all.
template <class Element, bool kDense, int kCount>
__device__ __forceinline__ void write_row(char* row, int steps, const Values<kCount>& values) {
  if constexpr (kDense) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < steps) reinterpret_cast<Element*>(row)[i] = from_real<Element>(values.v[i]);
    }
  } else {
    constexpr int kWords = kCount * sizeof(Element) / 4;
    Pack<uint32_t, kWords> words;
    reals_to_words<Element>(values.v, words.v);
    store_pack(reinterpret_cast<uint32_t*>(row), words);
  }
}

/// B and C of a step for all states.
template <int kStates>
struct Projected {
  float B[kStates];
  float C[kStates];
};

/// Brings B and C of a chunk, a step a lane, from global memory to registers and on to shared
/// memory.
template <class Element, int kStates>
class ProjectionMover {
 public:
  __device__ __forceinline__ ProjectionMover(const ScanParams& params, const Tile& tile,
                                             char* target)
      : params_(params),
        lane_(tile.lane),
        target_(reinterpret_cast<Projected<kStates>*>(target)),
        B_(origin(params.B, tile)),
        C_(origin(params.C, tile)) {}

  __device__ __forceinline__ void fetch(int chunk) {
    const int64_t step = chunk * kChunk + lane_;
    if (chunk < 0 || step >= params_.seqlen) return;
#pragma unroll
    for (int n = 0; n < kStates; ++n) {
      if (n >= params_.dstate) break;
      raw_B_[n] = B_[step * params_.B.step + n * params_.B.state];
      raw_C_[n] = C_[step * params_.C.step + n * params_.C.state];
    }
  }
  __device__ __forceinline__ void put() const {
    Pack<float, 2 * kStates> pack;
#pragma unroll
    for (int n = 0; n < kStates; ++n) {
      pack.v[n] = to_real(raw_B_[n]);
      pack.v[kStates + n] = to_real(raw_C_[n]);
    }
    store_pack(reinterpret_cast<float*>(target_ + lane_), pack);
  }
  /// What put() left of the chunk's step t.
  __device__ __forceinline__ Projected<kStates> operator[](int t) const {
    return bit_cast<Projected<kStates>>(
        load_pack<float, 2 * kStates>(reinterpret_cast<const float*>(target_ + t)));
  }

 private:
  static __device__ __forceinline__ const Element* origin(const ArrayView& view,
                                                          const Tile& tile) {
    return static_cast<const Element*>(view.data) + tile.batch * view.batch +
           tile.group * view.group;
  }

  const ScanParams& params_;
  int lane_;
  Projected<kStates>* target_;
  const Element* B_;
  const Element* C_;
  Element raw_B_[kStates] = {};
  Element raw_C_[kStates] = {};
};

}  // namespace selective_scan::cuda::narrow
