// Device functions that the forward and the backward kernel share.
#pragma once

#include "../../core/affine_map.h"
#include "../kit/launch_tools.h"
#include "../kit/states.cuh"
#include "rows.cuh"

namespace selective_scan::cuda::dstate1 {

using StepMap = AffineMap<float>;

/// Carries `state` through the lanes of a channel, from its first lane to its last, or from the
/// last to the first. Returns what enters this lane; `state` becomes what leaves the last one.
template <bool kBackwards>
__device__ __forceinline__ float carry_through_lanes(StepMap own, float& state) {
  const int lane = threadIdx.x % kChannelLanes;
  const int position = kBackwards ? kChannelLanes - 1 - lane : lane;
  const auto from_before = [](float value, int distance) {
    return kBackwards ? __shfl_down_sync(kFullMask, value, distance, kChannelLanes)
                      : __shfl_up_sync(kFullMask, value, distance, kChannelLanes);
  };
#pragma unroll
  for (int distance = 1; distance < kChannelLanes; distance *= 2) {
    const StepMap before{from_before(own.product, distance), from_before(own.offset, distance)};
    if (position >= distance) own = Compose()(before, own);
  }
  const float left = own(state);
  const float entered = from_before(left, 1);
  const float result = position == 0 ? state : entered;
  state = __shfl_sync(kFullMask, left, kBackwards ? 0 : kChannelLanes - 1, kChannelLanes);
  return result;
}

/// Sums over the lanes of a channel; all of them get the sum.
__device__ __forceinline__ float sum_over_lanes(float value) {
#pragma unroll
  for (int distance = 1; distance < kChannelLanes; distance *= 2) {
    value += __shfl_xor_sync(kFullMask, value, distance, kChannelLanes);
  }
  return value;
}

/// Which channels a warp or block works on.
struct ChannelTile {
  int64_t batch;
  int64_t group;
  int64_t tile;           // of the group
  int64_t first_channel;  // of all
  int channels;

  /// The plan sees to it that channels of all batch rows fit 32 bits, which divide faster.
  __device__ ChannelTile(const ScanParams& params, uint32_t index, uint32_t tiles,
                         int tile_channels) {
    const auto groups = static_cast<uint32_t>(params.groups);
    const int group_channels = static_cast<int>(static_cast<uint32_t>(params.dim) / groups);
    const uint32_t row = index / tiles;
    tile = index - row * tiles;
    batch = row / groups;
    group = row - static_cast<uint32_t>(batch) * groups;
    const int offset = static_cast<int>(tile) * tile_channels;
    first_channel = group * group_channels + offset;
    channels = min(group_channels - offset, tile_channels);
  }

  __device__ char* origin(const Sequence& sequence) const {
    return sequence.data + batch * sequence.batch;
  }
  __device__ const char* origin(const ArrayView& projection) const {
    return static_cast<const char*>(projection.data) +
           (batch * projection.batch + group * projection.group) * element_size(projection.dtype);
  }
};

// B or C of a group. A lane fetches one step of every chunk, and shared memory hands them to all
// channels of the warp.
//   fetch()    the lane's step as it lies in memory, of the chunk after the one fetched before, or
//              of the chunk before it if time goes back
//   put()      to shared memory, where read_shared() finds those of a lane's steps

/// B or C of this type.
template <class Element>
class KnownProjection {
 public:
  __device__ KnownProjection(const ArrayView& view, const ChannelTile& tile, int step, int chunk)
      : source_(reinterpret_cast<const Element*>(tile.origin(view)) + step * view.step),
        chunk_stride_(chunk * view.step) {}

  __device__ uint32_t fetch(bool exists) {
    uint32_t bits = 0;
    if (exists) {
      if constexpr (sizeof(Element) == sizeof(uint32_t)) {
        bits = *reinterpret_cast<const uint32_t*>(source_);
      } else {
        bits = source_->bits;
      }
    }
    source_ += chunk_stride_;
    return bits;
  }

  __device__ void put(uint32_t bits, int lane, float* row) const {
    if constexpr (sizeof(Element) == sizeof(uint32_t)) {
      row[lane] = bit_cast<float>(bits);
    } else {
      row[lane] = to_real(Element{static_cast<uint16_t>(bits)});
    }
  }

 private:
  const Element* source_;
  int64_t chunk_stride_;
};

/// B or C of any type.
class AnyProjection {
 public:
  __device__ AnyProjection(const ArrayView& view, const ChannelTile& tile, int step, int chunk)
      : source_(tile.origin(view) + step * view.step * element_size(view.dtype)),
        chunk_stride_(chunk * view.step * element_size(view.dtype)),
        dtype_(view.dtype) {}

  __device__ uint32_t fetch(bool exists) {
    const char* const source = source_;
    source_ += chunk_stride_;
    if (!exists) return 0;
    if (dtype_ == DType::kFloat32) return *reinterpret_cast<const uint32_t*>(source);
    return *reinterpret_cast<const uint16_t*>(source);
  }

  __device__ void put(uint32_t bits, int lane, float* row) const {
    const auto half = static_cast<uint16_t>(bits);
    row[lane] = dtype_ == DType::kFloat32    ? bit_cast<float>(bits)
                : dtype_ == DType::kBFloat16 ? to_real(BFloat16{half})
                                             : to_real(Half{half});
  }

 private:
  const char* source_;
  int64_t chunk_stride_;
  DType dtype_;
};

template <class Storage>
struct ProjectionOf {
  using Type = AnyProjection;
};
template <class Element>
struct ProjectionOf<Vectors<Element>> {
  using Type = KnownProjection<Element>;
};
template <class Element>
struct ProjectionOf<DenseRows<Element>> {
  using Type = KnownProjection<Element>;
};
template <class Storage>
using Projection = typename ProjectionOf<Storage>::Type;

/// Whether arrays with steps are vectors.
template <class Storage>
constexpr bool kHasVectors = !std::is_same_v<Projection<Storage>, AnyProjection>;

}  // namespace selective_scan::cuda::dstate1
