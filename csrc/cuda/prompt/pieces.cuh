// The pieces of rows that a lane of the prompt kernels moves, and their positions.
#pragma once

#include "../kit/elements.cuh"
#include "kernels.h"

namespace selective_scan::cuda::prompt {

/// A chunk of a block's rows is divided into as many shares as there are scanning warps. A lane
/// moves kPieces pieces of a share, kPieceSteps steps apart. A piece is kLength elements that are
/// contiguous in memory: steps of one channel, or all channels of a scanning warp at one step.
template <class S, Along kAlong>
struct LanePieces;

/// Along steps, a share is one warp's channels, and its pieces lie along their rows.
template <class S>
struct LanePieces<S, Along::kSteps> {
  static constexpr int kLength = kBlockSteps;
  static constexpr int kPieces = S::kGroups;
  static constexpr int kPieceSteps = S::kGroupSteps;
  int scanner;  // the warp that scans the piece's channels
  int channel = threadIdx.x % kWarpSize / S::kLanes;
  int step = threadIdx.x % S::kLanes * kBlockSteps;

  __device__ LanePieces(int share, int /*scanners*/) : scanner(share) {}
  __device__ int channel_of(int) const { return channel; }
};

template <class S>
struct LanePieces<S, Along::kFourSteps> : LanePieces<S, Along::kSteps> {
  using LanePieces<S, Along::kSteps>::LanePieces;
};
template <class S>
struct LanePieces<S, Along::kElements> : LanePieces<S, Along::kSteps> {
  using LanePieces<S, Along::kSteps>::LanePieces;
};

/// Along channels, neighboring lanes move contiguous pieces: the channels of all the block's warps
/// at one step, then those at the next step.
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

/// A lane moves kPasses vectors of a chunk's B, and as many of C. A vector is several steps of one
/// state or several states at one step; `row` is that state or step in the first pass.
template <class S, Along kAlong, int kSize>
struct LaneVectors {
  static constexpr bool kAlongSteps = is_along_steps(kAlong);
  static constexpr int kLength = kAlong == Along::kFourSteps ? kBlockSteps : 16 / kSize;
  static constexpr int kRowVectors = (kAlongSteps ? S::kSteps : kPaddedStates) / kLength;
  static constexpr int kPassRows = kWarpSize / kRowVectors;
  static constexpr int kPasses = (kAlongSteps ? kPaddedStates : S::kSteps) / kPassRows;
  // Neighboring lanes have neighboring steps of rows in shared memory.
  int row = kAlongSteps ? threadIdx.x % kWarpSize / kRowVectors : threadIdx.x % kPassRows;
  int place = (kAlongSteps ? threadIdx.x % kRowVectors : threadIdx.x % kWarpSize / kPassRows) *
              kLength;  // the vector's position in its row

  __device__ int state() const { return kAlongSteps ? row : place; }
  __device__ int step() const { return kAlongSteps ? place : row; }
};

/// Returns the offset in bytes of a channel or state at a step, if rows are `row` bytes apart.
template <Along kAlong, int kSize>
__device__ __forceinline__ int64_t bytes_to(int row, int64_t channel, int64_t step) {
  return is_along_steps(kAlong) ? channel * row + step * kSize : step * row + channel * kSize;
}

/// Both move only the elements of a piece that exist: the first `count` of single elements, or a
/// whole vector if `count` is positive.
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

/// Loads a piece from shared memory. Its channels, if it has several, are kStride floats apart.
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
