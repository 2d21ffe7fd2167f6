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

/// Returns the value of the lane of the same channel that is `distance` lanes before this one, in
/// the direction in which states are carried.
template <class Shape, bool kBackwards>
__device__ __forceinline__ float from_before(float value, int distance) {
  return kBackwards ? __shfl_down_sync(kFullMask, value, distance, Shape::kChannelLanes)
                    : __shfl_up_sync(kFullMask, value, distance, Shape::kChannelLanes);
}
/// Returns the lane's position among those of its channel, in the same direction.
template <class Shape, bool kBackwards>
__device__ __forceinline__ int lane_position() {
  const int lane = threadIdx.x % Shape::kChannelLanes;
  return kBackwards ? Shape::kChannelLanes - 1 - lane : lane;
}
/// Composes each lane's maps, which belong to different states, with those of the lanes before it.
template <class Shape, bool kBackwards, int kCount>
__device__ __forceinline__ void compose_lanes(StepMap (&own)[kCount]) {
  const int position = lane_position<Shape, kBackwards>();
#pragma unroll
  for (int distance = 1; distance < Shape::kChannelLanes; distance *= 2) {
    StepMap before[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      before[i] = {from_before<Shape, kBackwards>(own[i].product, distance),
                   from_before<Shape, kBackwards>(own[i].offset, distance)};
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (position >= distance) own[i] = Compose()(before[i], own[i]);
    }
  }
}

/// The states that enter and leave a lane.
struct LaneStates {
  float entered;
  float left;
};
/// Returns the states of a lane with the composed map `own`, if `first` enters the first lane.
template <class Shape, bool kBackwards>
__device__ __forceinline__ LaneStates states_of_lane(const StepMap& own, float first) {
  const float left = own(first);
  const float before = from_before<Shape, kBackwards>(left, 1);
  return {lane_position<Shape, kBackwards>() == 0 ? first : before, left};
}
/// Returns what leaves the last lane.
template <class Shape, bool kBackwards>
__device__ __forceinline__ float of_last_lane(float left) {
  constexpr int kChannelLanes = Shape::kChannelLanes;
  return __shfl_sync(kFullMask, left, kBackwards ? 0 : kChannelLanes - 1, kChannelLanes);
}
/// Carries `state` through the lanes of a channel, from its first lane to its last, or from the
/// last to the first if kBackwards. `state` becomes the one that leaves the last lane, or the last
/// lane of a round. Windows that depend on no others of a round have no `maps`.
template <class Shape, bool kBackwards>
__device__ __forceinline__ LaneStates carry_through_lanes(StepMap map, float& state,
                                                          StepMap* maps = nullptr) {
  StepMap own[] = {map};
  compose_lanes<Shape, kBackwards>(own);
  constexpr bool kHasRounds = Shape::kWarps > 1;
  float first = state;
  if constexpr (kHasRounds) {
    if (maps != nullptr) {
      const bool has_map = lane_position<Shape, kBackwards>() == Shape::kChannelLanes - 1;
      first = carry_through_warps<Shape, kBackwards>(own[0], has_map, maps, state);
    }
  }
  const LaneStates states = states_of_lane<Shape, kBackwards>(own[0], first);
  if (!kHasRounds || maps == nullptr) state = of_last_lane<Shape, kBackwards>(states.left);
  return states;
}

/// Turns a lane's delta into its steps Δ, and finds their slopes: the derivatives of Δ by delta. A
/// missing step is 0, which leaves the state unchanged.
template <int kSize, class Shape>
__device__ __forceinline__ void make_window_steps(const Window<Shape>& window, float delta_bias,
                                                  bool is_softplus, Items& delta, Items& slope) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) delta[i] += delta_bias;
  make_steps<kSize>(delta, is_softplus, slope);
  if (window.steps < Shape::kSteps) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (window.first_step() + i >= window.steps) delta[i] = slope[i] = 0.0f;
    }
  }
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

/// The steps of B or C that a lane fetches in a window. If the window has one channel, these are
/// the steps that the lane holds.
template <class Shape>
constexpr int kProjectedSteps = Shape::kSteps / kWarpSize;

// The lane's steps of B or C of a group in memory.
//   fetch()    loads those of the window after the one fetched last (before it, if time goes
//              backward); `left` steps exist from the window's first one on
//   convert()  turns them into floats

/// B or C of a type that is known at compile time.
template <class Element, class Shape>
class KnownProjection {
  static constexpr int kCount = kProjectedSteps<Shape>;
  static constexpr int kWords = ceil_div(kCount * sizeof(Element), sizeof(uint32_t));
  static constexpr int kVectorSteps = sizeof(uint2) / sizeof(Element);

 public:
  using Bits = Pack<uint32_t, kWords>;

  /// `step` is the first step of the window that is fetched first, and `steps` the distance from
  /// there to the next one.
  __device__ KnownProjection(const ArrayView& view, const ChannelTile& tile, int step, int steps)
      : first_(static_cast<int>(threadIdx.x) % kWarpSize * kCount),
        source_(reinterpret_cast<const Element*>(tile.origin(view)) + (step + first_) * view.step),
        window_stride_(steps * view.step),
        stride_(view.step),
        has_vectors_(kCount > 1 && stride_ == 1 &&
                     reinterpret_cast<uintptr_t>(source_) % sizeof(uint2) == 0) {}

  __device__ Bits fetch(int left) {
    left -= first_;
    Bits bits{};
    // A vector exists as a whole or not at all, which holds for all lanes alike.
    if (has_vectors_ && left % kVectorSteps == 0) {
#pragma unroll
      for (int i = 0; i < kCount / kVectorSteps; ++i) {
        if (i * kVectorSteps >= left) break;
        const auto vector = reinterpret_cast<const uint2*>(source_)[i];
        bits.v[2 * i] = vector.x;
        bits.v[2 * i + 1] = vector.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i < left) insert(bits, i, source_[i * stride_]);
      }
    }
    source_ += window_stride_;
    return bits;
  }

  __device__ void convert(const Bits& bits, float (&values)[kCount]) const {
    words_to_reals<Element>(bits.v, values);
  }

 private:
  static __device__ void insert(Bits& bits, int i, Element element) {
    if constexpr (sizeof(Element) == sizeof(uint32_t)) {
      bits.v[i] = bit_cast<uint32_t>(element);
    } else {
      bits.v[i / 2] |= static_cast<uint32_t>(element.bits) << i % 2 * 16;
    }
  }

  int first_;  // the first of the lane's steps in a window
  const Element* source_;
  int64_t window_stride_;
  int64_t stride_;  // from one of the lane's steps to the next
  bool has_vectors_;
};

/// B or C of any type.
template <class Shape>
class AnyProjection {
  static constexpr int kCount = kProjectedSteps<Shape>;

 public:
  using Bits = Pack<uint32_t, kCount>;

  __device__ AnyProjection(const ArrayView& view, const ChannelTile& tile, int step, int steps)
      : first_(static_cast<int>(threadIdx.x) % kWarpSize * kCount),
        source_(tile.origin(view) + (step + first_) * view.step * element_size(view.dtype)),
        window_stride_(steps * view.step * element_size(view.dtype)),
        stride_(view.step * element_size(view.dtype)),
        state_stride_(view.state * element_size(view.dtype)),
        dtype_(view.dtype) {}

  __device__ Bits fetch(int left) {
    const Bits bits = fetch_state(left, 0);
    advance();
    return bits;
  }
  __device__ Bits fetch_state(int left, int n) const {
    const char* source = source_ + n * state_stride_;
    Bits bits{};
#pragma unroll
    for (int i = 0; i < kCount; ++i, source += stride_) {
      if (first_ + i >= left) continue;
      bits.v[i] = dtype_ == DType::kFloat32 ? *reinterpret_cast<const uint32_t*>(source)
                                            : *reinterpret_cast<const uint16_t*>(source);
    }
    return bits;
  }
  /// Goes on to the next window.
  __device__ void advance() { source_ += window_stride_; }

  __device__ void convert(const Bits& bits, float (&values)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto half = static_cast<uint16_t>(bits.v[i]);
      values[i] = dtype_ == DType::kFloat32    ? bit_cast<float>(bits.v[i])
                  : dtype_ == DType::kBFloat16 ? to_real(BFloat16{half})
                                               : to_real(Half{half});
    }
  }

 private:
  int first_;
  const char* source_;
  int64_t window_stride_;
  int64_t stride_;  // from one of the lane's steps to the next
  int64_t state_stride_;
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

/// B or C of a window, which lanes hand to one another through `row` in shared memory if the window
/// has several channels.
template <class Storage, class Shape>
class Projection : public ProjectionOf<Storage, Shape>::Type {
  using Source = typename ProjectionOf<Storage, Shape>::Type;
  static constexpr bool kIsShared = Shape::kChannels > 1;
  static_assert(kProjectedSteps<Shape> == (kIsShared ? 1 : kItems));

 public:
  using Bits = typename Source::Bits;
  using Source::Source;

  __device__ void put(const Bits& bits, float* row) const {
    if constexpr (kIsShared) {
      float value[1];
      Source::convert(bits, value);
      row[threadIdx.x % kWarpSize] = value[0];
    }
  }
  /// Reads the values of the steps that the lane holds, from `first_step` on. `bits` are those of
  /// the steps that it has fetched.
  __device__ void read(const Bits& bits, const float* row, int first_step, Items& items) const {
    if constexpr (kIsShared) {
      read_shared(row + first_step, items);
    } else {
      Source::convert(bits, items);
    }
  }
};

/// True if (batch, channel, step) arrays are moved as vectors.
template <class Storage>
constexpr bool kHasVectors = kIsDense<Storage> || kIsStaged<Storage>;

}  // namespace selective_scan::cuda::dstate1
