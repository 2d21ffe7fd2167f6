// Code that both narrow kernels share: a warp's tile of channels, and the transfer of their rows to
// shared memory and on to the lanes that own them.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "../kit/barriers.cuh"
#include "../kit/elements.cuh"
#include "../kit/launch_tools.h"
#include "../kit/states.cuh"
#include "../kit/step_math.cuh"
#include "kernels.h"

namespace selective_scan::cuda::narrow {

/// A warp's channels, and the lane's share of them.
template <class Shape>
struct Tile {
  int64_t batch;
  int64_t group;
  int64_t index;          // among the group's tiles
  int64_t first_channel;  // among all channels
  int channels;
  int lane;
  int own;   // the lane's channel in the tile
  int part;  // which part of the channel's states the lane has

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
  /// Returns the lane's channel, or the tile's first one if the lane has none.
  __device__ __forceinline__ int64_t channel() const {
    return first_channel + (exists() ? own : 0);
  }
  /// Returns how many states exist from the lane's first one on; may be negative.
  __device__ __forceinline__ int states(const ScanParams& params) const {
    return exists() ? static_cast<int>(params.dstate) - part * Shape::kOwn : 0;
  }
  __device__ __forceinline__ char* origin(const Sequence& sequence) const {
    return sequence.data + batch * sequence.batch + first_channel * sequence.channel;
  }
};

/// Returns the offset of the lane's states in an array with a state dimension.
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

/// Sums the values of a channel's lanes.
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

  /// Returns the lane's row at a chunk's first step, for an array whose rows begin at `rows`.
  __device__ __forceinline__ char* lane_row(char* rows, int chunk) const {
    return rows + tile_.own * layout_.pitch + (kDense ? chunk * kChunk * kSize : 0);
  }
  /// Starts to copy a chunk of the arrays that are present. Dense rows are copied with all their
  /// steps in one call.
  template <int kCount>
  __device__ __forceinline__ void fetch(char* rows, const Sequence (&arrays)[kCount],
                                        int chunk) const {
    for_each_piece(arrays, chunk, [&]<int kBytes>(int at, char* global) {
      __pipeline_memcpy_async(rows + at, global, kBytes);
    });
  }
  /// Stores a chunk, or all steps of dense rows in one call.
  template <int kCount>
  __device__ __forceinline__ void store(const char* rows, const Sequence (&arrays)[kCount],
                                        int chunk) const {
    for_each_piece(arrays, chunk, [&]<int kBytes>(int at, char* global) {
      using Word = Vector<kBytes>;
      *reinterpret_cast<Word*>(global) = *reinterpret_cast<const Word*>(rows + at);
    });
  }

 private:
  /// Short sequences are bound by fetching instructions. So the loop over arrays is not unrolled in
  /// the backward kernel, which has much other code.
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
    constexpr int kPieces = kChunk * kSize / kBytes;  // pieces of a row
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

/// Reads kCount steps of a lane's row. The first `steps` of them exist, the others become zero.
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

/// Writes the steps that exist or, if rows are padded, all kCount. Lanes that share a channel wait
/// until all of them have read the row, then the first one writes it.
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
      if (i < steps) reinterpret_cast<Element*>(row)[i] = to_element<Element>(values.v[i]);
    }
  } else {
    constexpr int kWords = kCount * sizeof(Element) / 4;
    Pack<uint32_t, kWords> words;
    reals_to_words<Element>(values.v, words.v);
    store_pack(reinterpret_cast<uint32_t*>(row), words);
  }
}

/// B and C of a step, for the lane's states.
template <int kOwn>
struct Projected {
  float B[kOwn];
  float C[kOwn];
};

/// Loads a chunk's B and C, one step per lane, from global memory to registers, and stores them to
/// shared memory.
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
  /// Stores the chunk's values as [step][part][B | C][state].
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
  /// Returns the values that put() stored for step t of the chunk, for the lane's states.
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
