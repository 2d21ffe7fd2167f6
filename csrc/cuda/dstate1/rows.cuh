// Moves rows of (batch, channel, step) arrays between global memory and registers for the dstate 1
// kernels.
//
// A warp works on windows (layout.h). Neighboring lanes hold one channel, kItems consecutive steps
// each. Rows that are aligned to 16 bytes are copied to shared memory one window at a time, while
// the window before is scanned. Rows of 2-byte types that are aligned to 8 bytes are copied in the
// same way in long windows, and as a whole in wide ones if they are short. So neighboring lanes
// move neighboring vectors, and registers hold no data in flight. Other layouts are read element by
// element, along steps or along channels, whichever are closer in memory, and elements change lanes
// through a tile in shared memory.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "../kit/elements.cuh"
#include "../kit/states.cuh"
#include "kernels.h"

namespace selective_scan::cuda::dstate1 {

/// A value for each of a lane's steps.
using Items = float[kItems];

/// The existing part of a warp's window, as seen by a lane.
template <class Shape>
struct Window {
  int channels;
  int steps;
  int lane;

  __device__ int channel() const { return lane / Shape::kChannelLanes; }
  __device__ int first_step() const { return lane % Shape::kChannelLanes * kItems; }
  /// Returns the number of the lane's steps that exist, if positive.
  __device__ int items() const { return channel() < channels ? steps - first_step() : 0; }
};

/// Reads kItems values from shared memory, aligned to 16 bytes.
__device__ __forceinline__ void read_shared(const float* row, Items& items) {
  const auto pack = load_pack<float, kItems>(row);
#pragma unroll
  for (int i = 0; i < kItems; ++i) items[i] = pack.v[i];
}

/// Moves windows of one Storage. All functions take the address of the lane, which is that of the
/// window's first channel and step plus lane_offset().
///   Raw        a lane's part of a window as it is in memory
///   fetch()    starts reading; missing elements are zero
///   convert()  turns Raw into the values of the lane's steps
///   store()    stores the values of the lane's steps
template <class Storage, class Shape>
struct RowAccess;

/// Accesses vectors in shared memory, to which StagedWindow or DenseWindow has copied them, by
/// their strides there. A vector has kSteps steps, of which all exist or none. A lane that takes
/// all of its steps as one vector moves missing ones as well, for which staged rows have room.
template <class Element, int kSteps, class Shape>
struct VectorAccess {
  using Window = dstate1::Window<Shape>;
  static constexpr int kSize = sizeof(Element);
  static constexpr int kWords = kItems * kSize / sizeof(uint32_t);
  using Raw = Pack<uint32_t, kWords>;

  static __device__ __forceinline__ int lane_offset(const SequenceStrides& strides, int lane) {
    // The lowest address of the lane's steps.
    const int step = lane % Shape::kChannelLanes * kItems + (strides.step < 0 ? kItems - 1 : 0);
    return lane / Shape::kChannelLanes * static_cast<int>(strides.channel) + step * strides.step;
  }

  static __device__ __forceinline__ Raw fetch(const SequenceStrides& strides, const char* address,
                                              const Window& window) {
    Raw raw{};
    for_each_vector(strides, window, [&](int word) {
      const auto vector =
          load_pack<uint32_t, kVectorWords>(reinterpret_cast<const uint32_t*>(address) + word);
#pragma unroll
      for (int i = 0; i < kVectorWords; ++i) raw.v[word + i] = vector.v[i];
    });
    return raw;
  }

  static __device__ __forceinline__ void convert(const SequenceStrides& strides, const Raw& raw,
                                                 const Window&, float*, Items& items) {
    const Raw ordered = in_order(raw, strides.step < 0);
    words_to_reals<Element>(ordered.v, items);
  }

  static __device__ __forceinline__ void store(const SequenceStrides& strides, char* address,
                                               const Window& window, float*, const Items& items) {
    Raw raw;
    reals_to_words<Element>(items, raw.v);
    raw = in_order(raw, strides.step < 0);
    for_each_vector(strides, window, [&](int word) {
      Pack<uint32_t, kVectorWords> vector;
#pragma unroll
      for (int i = 0; i < kVectorWords; ++i) vector.v[i] = raw.v[word + i];
      store_pack(reinterpret_cast<uint32_t*>(address) + word, vector);
    });
  }

 private:
  static constexpr int kVectors = kItems / kSteps;
  static constexpr int kVectorWords = kWords / kVectors;

  /// Calls visit(first word) for every vector that may be accessed.
  template <class Visit>
  static __device__ __forceinline__ void for_each_vector(const SequenceStrides& strides,
                                                         const Window& window, const Visit& visit) {
    if constexpr (kVectors == 1) {
      visit(0);
      return;
    }
    const int items = window.items();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int first_step = (strides.step < 0 ? kVectors - 1 - i : i) * kSteps;
      if (first_step < items) visit(i * kVectorWords);
    }
  }

  /// Returns the elements, from the last to the first if `is_reversed`: a byte permutation of a
  /// word and its mirror image.
  static __device__ __forceinline__ Raw in_order(const Raw& raw, bool is_reversed) {
    constexpr uint32_t kMirrored = sizeof(Element) == sizeof(float) ? 0x7654 : 0x5476;
    const uint32_t selector = is_reversed ? kMirrored : 0x3210;
    Raw result;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      result.v[word] = __byte_perm(raw.v[word], raw.v[kWords - 1 - word], selector);
    }
    return result;
  }
};

template <class Element, class Shape>
struct RowAccess<Vectors<Element>, Shape> : VectorAccess<Element, kItems, Shape> {};
template <class Element, class Shape>
struct RowAccess<HalfVectors<Element>, Shape> : VectorAccess<Element, kItems, Shape> {};
template <class Element, class Shape>
struct RowAccess<DenseRows<Element>, Shape> : VectorAccess<Element, kItems / 2, Shape> {};

template <class Storage>
constexpr bool kIsDense = false;
template <class Element>
constexpr bool kIsDense<DenseRows<Element>> = true;

/// Copies dense rows of a window to shared memory, where every array has the same number of bytes,
/// and back.
class DenseWindow {
 public:
  __device__ DenseWindow(const SequenceStrides& strides, int seqlen)
      : bytes_(WideWindow::kChannels * static_cast<int>(strides.channel)),
        first_step_(strides.step < 0 ? (1 - seqlen) * strides.step : 0) {}

  /// Starts to copy an array whose first channel's first step is at `address`.
  __device__ void fetch(char* memory, int number, const char* address, int lane) const {
    for (int at = lane * kPiece; at < bytes_; at += kWarpSize * kPiece) {
      __pipeline_memcpy_async(memory + number * bytes_ + at, address - first_step_ + at, kPiece);
    }
  }
  __device__ void store(const char* memory, int number, char* address, int lane) const {
    for (int at = lane * kPiece; at < bytes_; at += kWarpSize * kPiece) {
      *reinterpret_cast<uint4*>(address - first_step_ + at) =
          *reinterpret_cast<const uint4*>(memory + number * bytes_ + at);
    }
  }
  /// Returns the address of the first channel's first step of an array in shared memory.
  __device__ char* origin(char* memory, int number) const {
    return memory + number * bytes_ + first_step_;
  }
  __device__ int bytes() const { return bytes_; }

 private:
  static constexpr int kPiece = sizeof(uint4);

  int bytes_;
  int first_step_;  // bytes from a row's lowest address to its first step
};

template <class Storage>
constexpr bool kHasHalfVectors = false;
template <class Element>
constexpr bool kHasHalfVectors<HalfVectors<Element>> = true;

template <class Storage>
constexpr bool kIsStaged = kHasHalfVectors<Storage>;
template <class Element>
constexpr bool kIsStaged<Vectors<Element>> = true;

/// Copies rows of vectors of a window to shared memory, where their strides differ, and back.
/// Neighboring lanes move neighboring vectors.
template <class Storage, class Shape>
class StagedWindow {
  static constexpr int kSize = RowAccess<Storage, Shape>::kSize;
  static constexpr int kRow = staged_row<Shape>(kSize);
  using Piece = std::conditional_t<kHasHalfVectors<Storage>, uint2, uint4>;
  static constexpr int kPiece = sizeof(Piece);
  static constexpr int kRowPieces = Shape::kSteps * kSize / kPiece;
  static constexpr int kCount = Shape::kChannels * kRowPieces / kWarpSize;  // per lane
  static constexpr int kRowLanes = kRowPieces < kWarpSize ? kRowPieces : kWarpSize;

 public:
  static constexpr int kBytes = staged_bytes<Shape>(kSize);  // per array

  /// The pieces that a lane moves, with their places in shared memory and their offsets from a
  /// window's first channel and step in global memory.
  struct Pieces {
    int places[kCount];
    int offsets[kCount];
    bool exist[kCount];
  };

  __device__ explicit StagedWindow(const SequenceStrides& strides)
      : strides_(strides), is_backward_(strides.step < 0) {}

  __device__ Pieces pieces(const Window<Shape>& window) const {
    const int lane = window.lane;
    const int lowest = is_backward_ ? (1 - Shape::kSteps) * kSize : 0;
    Pieces result;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // A lane's pieces belong to several channels, or all to one.
      const int piece = lane % kRowLanes + (kRowPieces > kRowLanes ? i * kRowLanes : 0);
      const int channel =
          lane / kRowLanes + (kRowPieces > kRowLanes ? 0 : i * (kWarpSize / kRowLanes));
      const int byte = piece * kPiece;
      const int first_step = (is_backward_ ? kRowPieces - 1 - piece : piece) * (kPiece / kSize);
      result.places[i] = channel * kRow + byte;
      result.offsets[i] = channel * static_cast<int>(strides_.channel) + lowest + byte;
      result.exist[i] = channel < window.channels && first_step < window.steps;
    }
    return result;
  }
  /// Starts to copy an array's window to `memory`; missing pieces are zero.
  static __device__ void fetch(const Pieces& pieces, char* memory, const char* source) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      __pipeline_memcpy_async(memory + pieces.places[i], source + pieces.offsets[i], kPiece,
                              pieces.exist[i] ? 0 : kPiece);
    }
  }
  static __device__ void store(const Pieces& pieces, const char* memory, char* target) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto piece = *reinterpret_cast<const Piece*>(memory + pieces.places[i]);
      if (pieces.exist[i]) *reinterpret_cast<Piece*>(target + pieces.offsets[i]) = piece;
    }
  }

  /// Returns the strides by which lanes find their parts of rows: if rows are staged, those in
  /// shared memory, where the first step is at origin().
  __device__ decltype(auto) lane_strides() const {
    if constexpr (kIsStaged<Storage>) {
      return SequenceStrides{strides_.dtype, kRow, is_backward_ ? -kSize : kSize, false};
    } else {
      return (strides_);
    }
  }
  __device__ int origin() const { return is_backward_ ? (Shape::kSteps - 1) * kSize : 0; }

 private:
  const SequenceStrides& strides_;
  bool is_backward_;
};

template <int kBytes, class Shape>
struct RowAccess<Scattered<kBytes>, Shape> {
  using Window = dstate1::Window<Shape>;
  static constexpr int kSize = kBytes;
  using Bits = std::conditional_t<kBytes == 2, uint16_t, uint32_t>;
  using Raw = Pack<Bits, kItems>;

  static __device__ __forceinline__ int lane_offset(const SequenceStrides& strides, int lane) {
    const Places places(strides, lane);
    return places.channel * static_cast<int>(strides.channel) + places.step * strides.step;
  }

  static __device__ __forceinline__ Raw fetch(const SequenceStrides& strides, const char* address,
                                              const Window& window) {
    const Places places(strides, window.lane);
    const int count = places.count(window);
    const int64_t increment = places.increment(strides);
    Raw raw{};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i < count) raw.v[i] = *reinterpret_cast<const Bits*>(address + i * increment);
    }
    return raw;
  }

  static __device__ __forceinline__ void convert(const SequenceStrides& strides, const Raw& raw,
                                                 const Window& window, float* tile, Items& items) {
    const Places places(strides, window.lane);
    with_element_of<kBytes>(strides.dtype == DType::kBFloat16, [&]<class Element>(Element) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        tile[places.tile_index(i)] = to_real(bit_cast<Element>(raw.v[i]));
      }
    });
    __syncwarp();
    read_shared(tile + window.channel() * Shape::kTileStride + window.first_step(), items);
    __syncwarp();
  }

  static __device__ __forceinline__ void store(const SequenceStrides& strides, char* address,
                                               const Window& window, float* tile,
                                               const Items& items) {
    Pack<float, kItems> pack;
#pragma unroll
    for (int i = 0; i < kItems; ++i) pack.v[i] = items[i];
    store_pack(tile + window.channel() * Shape::kTileStride + window.first_step(), pack);
    __syncwarp();
    const Places places(strides, window.lane);
    const int count = places.count(window);
    const int64_t increment = places.increment(strides);
    with_element_of<kBytes>(strides.dtype == DType::kBFloat16, [&]<class Element>(Element) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const auto value = to_element<Element>(tile[places.tile_index(i)]);
        if (i < count) *reinterpret_cast<Element*>(address + i * increment) = value;
      }
    });
    __syncwarp();
  }

 private:
  /// The elements of a window that a lane moves: one step of all channels, or every fourth step of
  /// one channel. In a window of one channel it is every 32nd step, whichever dimension is closer
  /// in memory.
  struct Places {
    static constexpr int kStride = kWarpSize / Shape::kChannels;

    bool along_channels;
    int channel;  // of the first element
    int step;

    __device__ __forceinline__ Places(const SequenceStrides& strides, int lane)
        : along_channels(strides.channels_are_closer || Shape::kChannels == 1),
          channel(along_channels ? lane % Shape::kChannels : 0),
          step(along_channels ? lane / Shape::kChannels : lane) {}

    __device__ int count(const Window& window) const {
      if (!along_channels) return step < window.steps ? window.channels : 0;
      return channel < window.channels ? (window.steps - step + kStride - 1) / kStride : 0;
    }
    __device__ int64_t increment(const SequenceStrides& strides) const {
      return along_channels ? static_cast<int64_t>(kStride) * strides.step : strides.channel;
    }
    __device__ int tile_index(int i) const {
      return channel * Shape::kTileStride + step +
             i * (along_channels ? kStride : Shape::kTileStride);
    }
  };
};

}  // namespace selective_scan::cuda::dstate1
