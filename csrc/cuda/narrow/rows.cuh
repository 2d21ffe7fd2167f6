// What the narrow kernels have in common: a warp's channels, and how their rows come to shared
// memory, and to the lanes that own them.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "../kit/barriers.cuh"
#include "../kit/elements.cuh"
#include "../kit/launch_tools.h"
#include "../kit/states.cuh"
#include "../kit/step_math.cuh"
#include "kernels.h"

namespace selective_scan::cuda::narrow {

/// The channels of a warp, and the lane's part of one.
template <class Shape>
struct Tile {
  int64_t batch;
  int64_t group;
  int64_t index;          // of the group's tiles
  int64_t first_channel;  // of all
  int channels;
  int lane;
  int own;   // the lane's channel in the tile
  int part;  // of the channel's states

  __device__ __forceinline__ Tile(const ScanParams& params, int64_t tiles)
      : batch(blockIdx.x / (tiles * params.groups)),
        group(blockIdx.x / tiles % params.groups),
        index(blockIdx.x % tiles),
        lane(static_cast<int>(threadIdx.x)),
        own(lane % Shape::kChannels),
        part(lane / Shape::kChannels) {
    const int64_t group_channels = params.dim / params.groups;
    const int64_t offset = index * Shape::kChannels;
    first_channel = group * group_channels + offset;
    const int64_t left = group_channels - offset;
    channels = static_cast<int>(left < Shape::kChannels ? left : Shape::kChannels);
  }
  __device__ __forceinline__ bool exists() const { return own < channels; }
  /// The lane's; that of the first lane, if it has none.
  __device__ __forceinline__ int64_t channel() const {
    return first_channel + (exists() ? own : 0);
  }
  /// How many of the lane's states there are.
  __device__ __forceinline__ int states(const ScanParams& params) const {
    return exists() ? static_cast<int>(params.dstate) - part * Shape::kOwn : 0;
  }
  __device__ __forceinline__ char* origin(const Sequence& sequence) const {
    return sequence.data + batch * sequence.batch + first_channel * sequence.channel;
  }
};

/// Where the lane's states begin in an array that has them.
template <class Shape>
__device__ __forceinline__ int64_t own_states(const ArrayView& view, const Tile<Shape>& tile) {
  return tile.batch * view.batch + tile.channel() * view.channel +
         tile.part * Shape::kOwn * view.state;
}
template <class Shape, int kOwn>
__device__ __forceinline__ void load_states(const ArrayView& view, const Tile<Shape>& tile,
                                            const ScanParams& params, float (&states)[kOwn]) {
  const int64_t first = own_states(view, tile);
  const int count = view.present() ? tile.states(params) : 0;
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    states[n] = n < count ? load_component<float>(view, first + n * view.state) : 0.0f;
  }
}
template <class Shape, int kOwn>
__device__ __forceinline__ void store_states(const ArrayView& view, const Tile<Shape>& tile,
                                             const ScanParams& params,
                                             const float (&states)[kOwn]) {
  const int64_t first = own_states(view, tile);
  const int count = view.present() ? tile.states(params) : 0;
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    if (n < count) store_component(view, first + n * view.state, states[n]);
  }
}

/// Adds up what the lanes of a channel have.
template <class Shape>
__device__ __forceinline__ float add_parts(float value) {
#pragma unroll
  for (int distance = Shape::kChannels; distance < kWarpSize; distance *= 2) {
    value += __shfl_xor_sync(kFullMask, value, distance);
  }
  return value;
}

/// Moves the rows of a tile between global and shared memory.
template <class Element, class Shape, bool kDense>
class RowMover {
  static constexpr int kSize = sizeof(Element);

 public:
  __device__ __forceinline__ RowMover(const RowLayout& layout, const Tile<Shape>& tile, int seqlen)
      : layout_(layout), tile_(tile), seqlen_(seqlen) {}

  /// The lane's row of an array whose rows begin at `rows`, at the first step of a chunk.
  __device__ __forceinline__ char* lane_row(char* rows, int chunk) const {
    return rows + tile_.own * layout_.pitch + (kDense ? chunk * kChunk * kSize : 0);
  }
  /// Starts to copy a chunk of the arrays that are there; all steps, if rows are dense, with the
  /// first one.
  template <int kCount>
  __device__ __forceinline__ void fetch(char* rows, const Sequence (&arrays)[kCount],
                                        int chunk) const {
    for_each_piece(arrays, chunk, [&]<int kBytes>(int at, char* global) {
      __pipeline_memcpy_async(rows + at, global, kBytes);
    });
  }
  /// Stores a chunk; all steps, if rows are dense, with the last one or, backwards, the first.
  template <int kCount>
  __device__ __forceinline__ void store(const char* rows, const Sequence (&arrays)[kCount],
                                        int chunk) const {
    for_each_piece(arrays, chunk, [&]<int kBytes>(int at, char* global) {
      using Word = Vector<kBytes>;
      *reinterpret_cast<Word*>(global) = *reinterpret_cast<const Word*>(rows + at);
    });
  }

 private:
  /// Short sequences take as long as their instructions to come: loops remain loops, but where
  /// there is little else.
  template <int kCount, class Move>
  __device__ __forceinline__ void for_each_piece(const Sequence (&arrays)[kCount], int chunk,
                                                 const Move& move) const {
#pragma unroll(kCount < BackwardArgs::kRows ? kCount : 1)
    for (int i = 0; i < kCount; ++i) {
      if (!arrays[i].present()) continue;
      char* const origin = tile_.origin(arrays[i]);
      const int64_t stride = arrays[i].channel;
      const int rows = i * layout_.bytes;
      if constexpr (kDense) {
        const int bytes = tile_.channels * layout_.pitch;
        for (int at = tile_.lane * 16; at < bytes; at += kWarpSize * 16) {
          move.template operator()<16>(rows + at, origin + at);
        }
      } else if (layout_.access == 16) {
        for_each_vector<16>(rows, origin, stride, chunk, move);
      } else if (layout_.access == 8) {
        for_each_vector<8>(rows, origin, stride, chunk, move);
      } else {
        for_each_vector<4>(rows, origin, stride, chunk, move);
      }
    }
  }
  template <int kBytes, class Move>
  __device__ __forceinline__ void for_each_vector(int rows, char* origin, int64_t stride, int chunk,
                                                  const Move& move) const {
    constexpr int kPieces = kChunk * kSize / kBytes;  // of a row
    const int left = (seqlen_ - chunk * kChunk) * kSize;
    const int byte = tile_.lane % kPieces * kBytes;
    if (byte >= left) return;
    origin += chunk * kChunk * kSize + byte;
    constexpr int kStride = kWarpSize / kPieces;
#pragma unroll 8
    for (int first = 0; first < Shape::kChannels; first += kStride) {
      const int channel = first + tile_.lane / kPieces;
      if (channel < tile_.channels) {
        move.template operator()<kBytes>(rows + channel * layout_.pitch + byte,
                                         origin + channel * stride);
      }
    }
  }

  const RowLayout& layout_;
  const Tile<Shape>& tile_;
  int seqlen_;
};

/// Reads kCount steps of a lane's row; the first `steps` of them exist, the others are zero.
template <class Element, bool kDense, int kCount>
__device__ __forceinline__ void read_row(const char* row, int steps, Pack<float, kCount>& values) {
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

/// Writes the steps that exist; of padded rows all. Lanes that share a channel have all read the
/// row before, and the first of them writes.
template <class Element, class Shape, bool kDense, int kCount>
__device__ __forceinline__ void write_row(char* row, const Tile<Shape>& tile, int steps,
                                          const Pack<float, kCount>& values) {
  if constexpr (Shape::kLanes > 1) {
    __syncwarp();
    if (tile.part > 0) return;
  }
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

/// B and C of a step for a lane's states.
template <int kOwn>
struct Projected {
  float B[kOwn];
  float C[kOwn];
};

/// Brings B and C of a chunk, a step a lane, from global memory to registers and on to shared
/// memory.
template <class Element, int kStates>
class ProjectionMover {
  using Shape = WarpShape<kStates>;
  static constexpr int kOwn = Shape::kOwn;

 public:
  __device__ __forceinline__ ProjectionMover(const ScanParams& params, const Tile<Shape>& tile,
                                             char* target)
      : params_(params),
        lane_(tile.lane),
        part_(tile.part),
        target_(reinterpret_cast<float*>(target)),
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
  /// [step][part][B | C][state]
  __device__ __forceinline__ void put() const {
    Pack<float, 2 * kStates> pack;
#pragma unroll
    for (int n = 0; n < kStates; ++n) {
      const int at = n / kOwn * 2 * kOwn + n % kOwn;
      pack.v[at] = to_real(raw_B_[n]);
      pack.v[at + kOwn] = to_real(raw_C_[n]);
    }
    store_pack(target_ + lane_ * 2 * kStates, pack);
  }
  /// What put() left of the chunk's step t for the lane's states.
  __device__ __forceinline__ Projected<kOwn> operator[](int t) const {
    return bit_cast<Projected<kOwn>>(
        load_pack<float, 2 * kOwn>(target_ + t * 2 * kStates + part_ * 2 * kOwn));
  }

 private:
  static __device__ __forceinline__ const Element* origin(const ArrayView& view,
                                                          const Tile<Shape>& tile) {
    return static_cast<const Element*>(view.data) + tile.batch * view.batch +
           tile.group * view.group;
  }

  const ScanParams& params_;
  int lane_;
  int part_;
  float* target_;
  const Element* B_;
  const Element* C_;
  Element raw_B_[kStates] = {};
  Element raw_C_[kStates] = {};
};

}  // namespace selective_scan::cuda::narrow
