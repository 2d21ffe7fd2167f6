// What a lane of the prompt kernels moves of rows, and where it lies.
#pragma once

#include "../kit/elements.cuh"
#include "kernels.h"

namespace selective_scan::cuda::prompt {

/// A chunk of a block's rows is divided into as many shares as warps scan. A lane moves kPieces
/// pieces of a share, kPieceSteps apart. A piece is kLength elements that lie side by side in
/// memory: steps of one channel, or all channels of a scanning warp at one step.
template <class S, Along kAlong>
struct LanePieces;

/// A warp's channels are a share: their pieces lie along its rows.
template <class S>
struct LanePieces<S, Along::kSteps> {
  static constexpr int kLength = kBlockSteps;
  static constexpr int kPieces = S::kGroups;
  static constexpr int kPieceSteps = S::kGroupSteps;
  int scanner;  // whose channels these are
  int channel = threadIdx.x % kWarpSize / S::kLanes;
  int step = threadIdx.x % S::kLanes * kBlockSteps;

  __device__ LanePieces(int share, int /*scanners*/) : scanner(share) {}
  __device__ int channel_of(int) const { return channel; }
};

template <class S>
struct LanePieces<S, Along::kElements> : LanePieces<S, Along::kSteps> {
  using LanePieces<S, Along::kSteps>::LanePieces;
};

/// Neighbouring lanes move what lies side by side: the channels of the block's warps at a step,
/// then those at the next one.
template <class S>
struct LanePieces<S, Along::kChannels> {
  static constexpr int kLength = S::kChannels;
  static constexpr int kPieces = S::kSteps / kWarpSize;
  static constexpr int kPieceSteps = kWarpSize;
  int scanner;
  static constexpr int channel = 0;
  int step;

  __device__ LanePieces(int share, int scanners) {
    const int piece = share * kWarpSize + threadIdx.x % kWarpSize;
    step = piece / scanners;
    scanner = piece - step * scanners;
  }
  __device__ int channel_of(int element) const { return element; }
};

/// A lane moves kPasses vectors of a chunk's B, and of C: some steps of a state, or some states at
/// a step. `row` is the former's state and the latter's step in the first pass.
template <class S, Along kAlong, int kSize>
struct LaneVectors {
  static constexpr bool kAlongSteps = is_along_steps(kAlong);
  static constexpr int kLength = 16 / kSize;
  static constexpr int kRowVectors = (kAlongSteps ? S::kSteps : kPaddedStates) / kLength;
  static constexpr int kPassRows = kWarpSize / kRowVectors;
  static constexpr int kPasses = (kAlongSteps ? kPaddedStates : S::kSteps) / kPassRows;
  // Neighbouring lanes have neighbouring steps of rows in shared memory.
  int row = kAlongSteps ? threadIdx.x % kWarpSize / kRowVectors : threadIdx.x % kPassRows;
  int place = (kAlongSteps ? threadIdx.x % kRowVectors : threadIdx.x % kWarpSize / kPassRows) *
              kLength;  // of the vector in its row

  __device__ int state() const { return kAlongSteps ? row : place; }
  __device__ int step() const { return kAlongSteps ? place : row; }
};

/// Bytes to a channel's, or state's, element of a step, where rows lie `row` bytes apart.
template <Along kAlong, int kSize>
__device__ __forceinline__ int64_t bytes_to(int row, int64_t channel, int64_t step) {
  return is_along_steps(kAlong) ? channel * row + step * kSize : step * row + channel * kSize;
}

/// Reads and writes those kLength elements of a row that exist, `count` of them. Of a vector all
/// exist or none.
template <Along kAlong, class Element, int kLength>
__device__ __forceinline__ void fetch_piece(const char* address, int count,
                                            Pack<Element, kLength>& piece) {
  const auto* const elements = reinterpret_cast<const Element*>(address);
  if constexpr (kAlong == Along::kElements) {
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      if (i < count) piece.v[i] = elements[i];
    }
  } else if (count > 0) {
    piece = load_pack<Element, kLength>(elements);
  }
}
template <Along kAlong, class Element, int kLength>
__device__ __forceinline__ void write_piece(char* address, int count,
                                            const Pack<Element, kLength>& piece) {
  auto* const elements = reinterpret_cast<Element*>(address);
  if constexpr (kAlong == Along::kElements) {
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      if (i < count) elements[i] = piece.v[i];
    }
  } else if (count > 0) {
    store_pack(elements, piece);
  }
}

/// Loads from shared memory a piece whose channels lie kStride apart there, if it has several.
template <Along kAlong, int kStride, int kLength>
__device__ __forceinline__ Pack<float, kLength> load_piece(const float* first) {
  if constexpr (is_along_steps(kAlong)) {
    return load_pack<float, kLength>(first);
  } else {
    Pack<float, kLength> values;
#pragma unroll
    for (int i = 0; i < kLength; ++i) values.v[i] = first[i * kStride];
    return values;
  }
}

template <Along kAlong, int kStride, int kLength>
__device__ __forceinline__ void store_piece(float* first, const Pack<float, kLength>& values) {
  if constexpr (is_along_steps(kAlong)) {
    store_pack(first, values);
  } else {
#pragma unroll
    for (int i = 0; i < kLength; ++i) first[i * kStride] = values.v[i];
  }
}

}  // namespace selective_scan::cuda::prompt
