// Device functions that the forward and the backward kernel share.
#pragma once

#include "../../core/affine_map.h"
#include "../kit/launch_tools.h"
#include "../kit/shuffle.cuh"
#include "../kit/states.cuh"
#include "../kit/step_math.cuh"
#include "rows.cuh"

namespace selective_scan::cuda::dstate1 {

/// Carries `state` through the lanes of a channel, from its first lane to its last, or from the
/// last to the first. Returns what enters this lane; `state` becomes what leaves the last one.
template <bool kBackwards, class T>
__device__ __forceinline__ T carry_through_lanes(AffineMap<T> own, T& state) {
  const int lane = threadIdx.x % kChannelLanes;
  const int position = kBackwards ? kChannelLanes - 1 - lane : lane;
  const auto from_before = [](T value, int distance) {
    return kBackwards ? shuffle_down<kChannelLanes>(value, distance, kFullMask)
                      : shuffle_up<kChannelLanes>(value, distance, kFullMask);
  };
#pragma unroll
  for (int distance = 1; distance < kChannelLanes; distance *= 2) {
    const AffineMap<T> before{from_before(own.product, distance),
                              from_before(own.offset, distance)};
    if (position >= distance) own = Compose()(before, own);
  }
  const T left = own(state);
  const T entered = from_before(left, 1);
  const T result = position == 0 ? state : entered;
  state = shuffle<kChannelLanes>(left, kBackwards ? 0 : kChannelLanes - 1, kFullMask);
  return result;
}

/// Of real poles, and of complex ones whose exponent is prepared: see step_pole().
struct TurnMath : DeviceMath {
  using DeviceMath::exp_of;
  static __device__ __forceinline__ Complex<float> exp_of(float delta,
                                                          const ScanMath::ComplexRate& rate) {
    return ScanMath::exp_at(delta, rate);
  }
  /// exp(x) and (exp(x) − 1)/A
  static __device__ __forceinline__ Coefficients<Complex<float>> exact_hold(
      float delta, const Pole<Complex<float>, ScanMath::ComplexHold>& pole) {
    const auto growth = ScanMath::growth_at(delta, pole.exponent.rate);
    return {growth.abar, growth.expm1 * pole.exponent.inverse};
  }
};

/// The pole as steps take it. Polynomials in turns cost less than the sine and the cosine of any
/// angle, and have more of its digits.
template <Method kMethod, class T>
__device__ __forceinline__ auto step_pole(const Pole<T>& pole) {
  if constexpr (!is_complex_v<T> || !Formula<kMethod>::kTakesPowers) {
    return pole;
  } else if constexpr (std::is_base_of_v<ExactHold, Formula<kMethod>>) {
    return pole.with_exponent(ScanMath::exact_hold_constants(pole.A));
  } else {
    return pole.with_exponent(ScanMath::turn_rate(pole.A));
  }
}

/// abar and bbar, given a step_pole().
template <Method kMethod, class T, class Exponent>
__device__ __forceinline__ Coefficients<T> step_coefficients(float delta,
                                                             const Pole<T, Exponent>& pole) {
  return Formula<kMethod>::template value<TurnMath>(delta, pole);
}

/// bbar·B·u
template <Method kMethod, class T>
__device__ __forceinline__ T step_input(float delta, float u, const Coefficients<T>& value, T B) {
  return held_input<kMethod>(delta, u, value) * B;
}

/// Sums over the lanes of a channel; all of them get the sum.
template <class T>
__device__ __forceinline__ T sum_over_lanes(T value) {
#pragma unroll
  for (int distance = 1; distance < kChannelLanes; distance *= 2) {
    value += shuffle_xor<kChannelLanes>(value, distance, kFullMask);
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

  __device__ ChannelTile(const ScanParams& params, int64_t index, int64_t tiles, int tile_channels)
      : batch(index / (tiles * params.groups)),
        group(index / tiles % params.groups),
        tile(index % tiles) {
    const int64_t group_channels = params.dim / params.groups;
    const int64_t offset = tile * tile_channels;
    first_channel = group * group_channels + offset;
    const int64_t left = group_channels - offset;
    channels = static_cast<int>(left < tile_channels ? left : tile_channels);
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
//   Raw        a step as it lies in memory
//   fetch()    the lane's step of the chunk that begins with `first_step`
//   put()      to shared memory
//   read()     the values for a lane's steps

/// Variable, real, and of this type.
template <class Element>
class KnownProjection {
 public:
  using Raw = uint32_t;

  __device__ KnownProjection(const ArrayView& view, bool, const ChannelTile& tile, int lane)
      : origin_(reinterpret_cast<const Element*>(tile.origin(view)) + lane * view.step),
        step_(static_cast<int>(view.step)) {}

  __device__ Raw fetch(int first_step, int lane, int seqlen) const {
    if (first_step + lane >= seqlen) return 0;
    const Element* source = origin_ + first_step * step_;
    if constexpr (sizeof(Element) == sizeof(uint32_t)) {
      return *reinterpret_cast<const uint32_t*>(source);
    } else {
      return source->bits;
    }
  }

  __device__ void put(Raw bits, int lane, float* row) const {
    if constexpr (sizeof(Element) == sizeof(uint32_t)) {
      row[lane] = bit_cast<float>(bits);
    } else {
      row[lane] = to_real(Element{static_cast<uint16_t>(bits)});
    }
  }

  __device__ void read(const float* row, const Window& window, float, Items& items) const {
    read_shared(row + window.first_step(), items);
  }

 private:
  const Element* origin_;
  int step_;
};

/// Variable of any type; or constant, `constant` being the channel's value.
template <class T>
class AnyProjection {
  static constexpr int kComponents = sizeof(T) / sizeof(float);

 public:
  using Raw = Pack<uint32_t, kComponents>;

  __device__ AnyProjection(const ArrayView& view, bool is_variable, const ChannelTile& tile,
                           int lane)
      : origin_(tile.origin(view) + lane * view.step * element_size(view.dtype)),
        dtype_(view.dtype),
        is_variable_(is_variable),
        step_(static_cast<int>(view.step)),
        imag_(view.imag) {}

  __device__ Raw fetch(int first_step, int lane, int seqlen) const {
    Raw raw{};
    if (!is_variable_ || first_step + lane >= seqlen) return raw;
#pragma unroll
    for (int c = 0; c < kComponents; ++c) {
      const int64_t offset = first_step * step_ + c * imag_;
      raw.v[c] = dtype_ == DType::kFloat32 ? reinterpret_cast<const uint32_t*>(origin_)[offset]
                                           : reinterpret_cast<const uint16_t*>(origin_)[offset];
    }
    return raw;
  }

  __device__ void put(const Raw& raw, int lane, T* row) const {
    if (!is_variable_) return;
    Pack<float, kComponents> value;
#pragma unroll
    for (int c = 0; c < kComponents; ++c) {
      const auto half = static_cast<uint16_t>(raw.v[c]);
      value.v[c] = dtype_ == DType::kFloat32    ? bit_cast<float>(raw.v[c])
                   : dtype_ == DType::kBFloat16 ? to_real(BFloat16{half})
                                                : to_real(Half{half});
    }
    row[lane] = bit_cast<T>(value);
  }

  __device__ void read(const T* row, const Window& window, T constant, ItemsOf<T>& items) const {
    if (is_variable_) {
      read_shared(row + window.first_step(), items);
    } else {
#pragma unroll
      for (int i = 0; i < kItems; ++i) items[i] = constant;
    }
  }

 private:
  const char* origin_;
  DType dtype_;
  bool is_variable_;
  int step_;
  int64_t imag_;
};

template <class T, class Storage>
struct ProjectionOf {
  using Type = AnyProjection<T>;
};
template <class Element>
struct ProjectionOf<float, Vectors<Element>> {
  using Type = KnownProjection<Element>;
};
template <class T, class Storage>
using Projection = typename ProjectionOf<T, Storage>::Type;

/// Whether B and C may be constant.
template <class T, class Storage>
constexpr bool kMayBeConstant = std::is_same_v<Projection<T, Storage>, AnyProjection<T>>;

}  // namespace selective_scan::cuda::dstate1
