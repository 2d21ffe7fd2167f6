// Device functions that the forward and the backward kernel share.
#pragma once

#include "../../core/affine_map.h"
#include "../kit/launch_tools.h"
#include "../kit/states.cuh"
#include "rows.cuh"

namespace selective_scan::cuda::dstate1 {

/// Returns the number of this warp's window in a round. Warps that share a channel take turns at
/// its windows, and a round is one window of each.
template <class Shape>
__device__ __forceinline__ int round_rank() {
  return threadIdx.x / kWarpSize % Shape::kWarps;
}

/// Carries `state` through the maps of a round; the lane that has this warp's map (`has_map`) hands
/// it over. Returns the state that enters this warp. All warps of the block call this with the same
/// half of the maps, alternating between the halves: thus one barrier per round suffices. A half
/// has a place for each warp.
template <class Shape, bool kBackwards>
__device__ __forceinline__ float carry_through_warps(const StepMap& own, bool has_map,
                                                     StepMap* maps, float& state) {
  const int warp = threadIdx.x / kWarpSize;
  const int rank = round_rank<Shape>();
  if (has_map) maps[warp] = own;
  __syncthreads();
  float entered = state;
#pragma unroll
  for (int i = 0; i < Shape::kWarps; ++i) {
    const int turn = kBackwards ? Shape::kWarps - 1 - i : i;
    if (turn == rank) entered = state;
    state = maps[warp - rank + turn](state);
  }
  return entered;
}

/// The states that enter and leave a lane.
struct LaneStates {
  float entered;
  float left;
};
/// Carries `state` through the lanes of a channel, from its first lane to its last, or from the
/// last to the first if kBackwards. `state` becomes the one that leaves the last lane, or the last
/// lane of a round. Windows that depend on no others of a round have no `maps`.
template <class Shape, bool kBackwards>
__device__ __forceinline__ LaneStates carry_through_lanes(StepMap own, float& state,
                                                          StepMap* maps = nullptr) {
  constexpr int kChannelLanes = Shape::kChannelLanes;
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
  constexpr bool kHasRounds = Shape::kWarps > 1;
  float first = state;
  if constexpr (kHasRounds) {
    if (maps != nullptr) {
      const bool has_map = position == kChannelLanes - 1;
      first = carry_through_warps<Shape, kBackwards>(own, has_map, maps, state);
    }
  }
  const float left = own(first);
  const float before = from_before(left, 1);
  const float entered = position == 0 ? first : before;
  if (!kHasRounds || maps == nullptr) {
    state = __shfl_sync(kFullMask, left, kBackwards ? 0 : kChannelLanes - 1, kChannelLanes);
  }
  return {entered, left};
}

/// Returns the sum over the lanes of a channel to all of them.
template <class Shape>
__device__ __forceinline__ float sum_over_lanes(float value) {
#pragma unroll
  for (int distance = 1; distance < Shape::kChannelLanes; distance *= 2) {
    value += __shfl_xor_sync(kFullMask, value, distance, Shape::kChannelLanes);
  }
  return value;
}

/// The channels that a warp or block works on.
struct ChannelTile {
  int64_t batch;
  int64_t group;
  int64_t tile;           // within the group
  int64_t first_channel;  // among all channels
  int channels;

  /// The plan ensures that the channels of all batch rows fit 32 bits, whose divisions are faster.
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

// B or C of a group. A lane fetches every 32nd step of a window, and shared memory hands them to
// all channels of the warp.
//   fetch()    loads the bits of the lane's steps in the window after the one fetched last (before
//              it, if time goes backward); `left` steps exist from the lane's first one on
//   put()      stores them to shared memory, where read_shared() finds those of a lane's steps
template <class Shape>
constexpr int kProjectedSteps = Shape::kSteps / kWarpSize;  // per lane
template <class Shape>
using ProjectedBits = Pack<uint32_t, kProjectedSteps<Shape>>;

/// B or C of a type that is known at compile time.
template <class Element, class Shape>
class KnownProjection {
 public:
  __device__ KnownProjection(const ArrayView& view, const ChannelTile& tile, int step, int steps)
      : source_(reinterpret_cast<const Element*>(tile.origin(view)) + step * view.step),
        window_stride_(steps * view.step),
        stride_(kWarpSize * view.step) {}

  __device__ ProjectedBits<Shape> fetch(int left) {
    ProjectedBits<Shape> bits{};
#pragma unroll
    for (int i = 0; i < kProjectedSteps<Shape>; ++i) {
      if (i * kWarpSize >= left) continue;
      const Element* const source = source_ + i * stride_;
      if constexpr (sizeof(Element) == sizeof(uint32_t)) {
        bits.v[i] = *reinterpret_cast<const uint32_t*>(source);
      } else {
        bits.v[i] = source->bits;
      }
    }
    source_ += window_stride_;
    return bits;
  }

  __device__ void put(const ProjectedBits<Shape>& bits, int lane, float* row) const {
#pragma unroll
    for (int i = 0; i < kProjectedSteps<Shape>; ++i) {
      if constexpr (sizeof(Element) == sizeof(uint32_t)) {
        row[lane + i * kWarpSize] = bit_cast<float>(bits.v[i]);
      } else {
        row[lane + i * kWarpSize] = to_real(Element{static_cast<uint16_t>(bits.v[i])});
      }
    }
  }

 private:
  const Element* source_;
  int64_t window_stride_;
  int64_t stride_;  // from one of the lane's steps to the next
};

/// B or C of any type.
template <class Shape>
class AnyProjection {
 public:
  __device__ AnyProjection(const ArrayView& view, const ChannelTile& tile, int step, int steps)
      : source_(tile.origin(view) + step * view.step * element_size(view.dtype)),
        window_stride_(steps * view.step * element_size(view.dtype)),
        stride_(kWarpSize * view.step * element_size(view.dtype)),
        dtype_(view.dtype) {}

  __device__ ProjectedBits<Shape> fetch(int left) {
    ProjectedBits<Shape> bits{};
#pragma unroll
    for (int i = 0; i < kProjectedSteps<Shape>; ++i) {
      if (i * kWarpSize >= left) continue;
      const char* const source = source_ + i * stride_;
      bits.v[i] = dtype_ == DType::kFloat32 ? *reinterpret_cast<const uint32_t*>(source)
                                            : *reinterpret_cast<const uint16_t*>(source);
    }
    source_ += window_stride_;
    return bits;
  }

  __device__ void put(const ProjectedBits<Shape>& bits, int lane, float* row) const {
#pragma unroll
    for (int i = 0; i < kProjectedSteps<Shape>; ++i) {
      const auto half = static_cast<uint16_t>(bits.v[i]);
      row[lane + i * kWarpSize] = dtype_ == DType::kFloat32    ? bit_cast<float>(bits.v[i])
                                  : dtype_ == DType::kBFloat16 ? to_real(BFloat16{half})
                                                               : to_real(Half{half});
    }
  }

 private:
  const char* source_;
  int64_t window_stride_;
  int64_t stride_;  // from one of the lane's steps to the next
  DType dtype_;
};

template <class Storage, class Shape>
struct ProjectionOf {
  using Type = AnyProjection<Shape>;
};
template <template <class> class Storage, class Element, class Shape>
struct ProjectionOf<Storage<Element>, Shape> {
  using Type = KnownProjection<Element, Shape>;
};
template <class Storage, class Shape>
using Projection = typename ProjectionOf<Storage, Shape>::Type;

/// True if (batch, channel, step) arrays are moved as vectors.
template <class Storage>
constexpr bool kHasVectors = kIsDense<Storage> || kIsStaged<Storage>;

}  // namespace selective_scan::cuda::dstate1
