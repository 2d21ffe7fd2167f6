// Between global memory, in any dtype and layout, and the compute type in shared memory.
//
// Everything that depends on dtypes and strides is here; the scans see [channel][step] rows and
// [step][state] projections of the compute type.
#pragma once

#include <type_traits>

#include "device_math.cuh"
#include "geometry.cuh"

namespace selective_scan::cuda {

/// kCount values that move as one access where the hardware can.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount >= 16 ? 16 : sizeof(T) * kCount) Pack {
  T v[kCount];
};

template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> load_pack(const T* address) {
  return *reinterpret_cast<const Pack<T, kCount>*>(address);
}
template <class T, int kCount>
__device__ __forceinline__ void store_pack(T* address, const Pack<T, kCount>& pack) {
  *reinterpret_cast<Pack<T, kCount>*>(address) = pack;
}

__device__ inline float to_real(float value) {
  return value;
}
__device__ inline double to_real(double value) {
  return value;
}
__device__ inline float to_real(Half value) {
  return to_float(value);
}
__device__ inline float to_real(BFloat16 value) {
  return to_float(value);
}

template <class Element, class Real>
__device__ Element from_real(Real value) {
  if constexpr (std::is_same_v<Element, Half>) {
    return to_half(static_cast<float>(value));
  } else if constexpr (std::is_same_v<Element, BFloat16>) {
    return to_bfloat16(static_cast<float>(value));
  } else {
    return static_cast<Element>(value);
  }
}

/// Calls body(Element{}) for the element type that `dtype` names, so that a loop is entered with
/// its type known. With fp32 arithmetic no array is fp64.
template <class Real, class Body>
__device__ __forceinline__ void with_element_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      body(float{});
      break;
    case DType::kFloat16:
      body(Half{});
      break;
    case DType::kBFloat16:
      body(BFloat16{});
      break;
    case DType::kFloat64:
      if constexpr (std::is_same_v<Real, double>) body(double{});
      break;
  }
}

/// The first element that a block reads of an array that has channels.
struct Window {
  char* data;
  DType dtype;
  int64_t channel;
  int64_t step;
  int element_bytes;

  __device__ Window(const ArrayView& view, const WorkItem& item)
      : data(static_cast<char*>(view.data)),
        dtype(view.dtype),
        channel(view.channel),
        step(view.step),
        element_bytes(static_cast<int>(element_size(view.dtype))) {
    data += (item.batch * view.batch + item.first_channel * view.channel) * element_bytes;
  }

  /// Of type Element, from step `first_step` of channel `first_channel` of the tile on.
  template <class Element>
  __device__ Element* at(int first_channel, int64_t first_step) const {
    return reinterpret_cast<Element*>(data) + first_channel * channel + first_step * step;
  }
};

/// The elements of one warp's channels in one chunk, and the order in which its lanes visit them.
struct WarpTile {
  int first_channel;  // in the block's tile
  int channels;       // that exist; the others are zero
  int64_t first_step;
  int steps;  // likewise
  int lane;
  int channel_bits;    // log2 of the warp's channels, existing or not
  bool channel_major;  // neighbouring lanes visit neighbouring channels, not steps

  struct Element {
    int channel;
    int step;
  };
  __device__ Element element(int i) const {
    const int e = i * kWarpSize + lane;
    if (channel_major) return {e & ((1 << channel_bits) - 1), e >> channel_bits};
    return {e / kChunk, e % kChunk};
  }
  __device__ bool exists(Element e) const { return e.channel < channels && e.step < steps; }
  /// Each lane visits so many elements.
  __device__ int visits() const { return (kChunk << channel_bits) / kWarpSize; }
};

/// Calls store(element, value) for every element of the tile; absent elements are zero.
template <class Real, class Store>
__device__ __forceinline__ void load_rows(const Window& window, const WarpTile& tile,
                                          const Store& store) {
  with_element_type<Real>(window.dtype, [&](auto type) {
    using Element = decltype(type);
    const Element* data = window.at<Element>(tile.first_channel, tile.first_step);
#pragma unroll 4
    for (int i = 0; i < tile.visits(); ++i) {
      const auto e = tile.element(i);
      Real value = 0;
      if (tile.exists(e)) {
        value = static_cast<Real>(to_real(data[e.channel * window.channel + e.step * window.step]));
      }
      store(e, value);
    }
  });
}

/// Writes value(element) for every element of the tile that exists.
template <class Real, class Value>
__device__ __forceinline__ void store_rows(const Window& window, const WarpTile& tile,
                                           const Value& value) {
  with_element_type<Real>(window.dtype, [&](auto type) {
    using Element = decltype(type);
    Element* data = window.at<Element>(tile.first_channel, tile.first_step);
#pragma unroll 4
    for (int i = 0; i < tile.visits(); ++i) {
      const auto e = tile.element(i);
      if (tile.exists(e)) {
        data[e.channel * window.channel + e.step * window.step] = from_real<Element>(value(e));
      }
    }
  });
}

/// Element `index` of an array, of the compute type; an array that is absent is zero.
template <class T>
__device__ T load_component(const ArrayView& view, int64_t index) {
  using R = real_t<T>;
  if (!view.present()) return T{};
  if constexpr (is_complex_v<T>) {
    return {load_element<R>(view.data, view.dtype, index),
            load_element<R>(view.data, view.dtype, index + view.imag)};
  } else {
    return load_element<R>(view.data, view.dtype, index);
  }
}

template <class T>
__device__ void store_component(const ArrayView& view, int64_t index, T value) {
  if constexpr (is_complex_v<T>) {
    store_element(view.data, view.dtype, index, value.re);
    store_element(view.data, view.dtype, index + view.imag, value.im);
  } else {
    store_element(view.data, view.dtype, index, value);
  }
}

/// The states of one lane from a (channel, state) or (batch, channel, state) array.
template <class T, int kStates>
__device__ Pack<T, kStates> load_states(const ArrayView& view, int64_t base, int first_state,
                                        int64_t dstate) {
  Pack<T, kStates> states;
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    const int n = first_state + s;
    states.v[s] = n < dstate ? load_component<T>(view, base + n * view.state) : T{};
  }
  return states;
}

template <class T, int kStates>
__device__ void store_states(const ArrayView& view, int64_t base, int first_state, int64_t dstate,
                             const Pack<T, kStates>& states) {
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    const int n = first_state + s;
    if (n < dstate) store_component(view, base + n * view.state, states.v[s]);
  }
}

/// The states of one lane in a contiguous [dstate] array of the compute type.
template <class T, int kStates>
__device__ void store_states(T* array, int first_state, int64_t dstate,
                             const Pack<T, kStates>& states) {
  if (dstate % kStates == 0) {
    if (first_state < dstate) store_pack(array + first_state, states);
    return;
  }
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    if (first_state + s < dstate) array[first_state + s] = states.v[s];
  }
}

template <class T, int kStates>
__device__ Pack<T, kStates> load_states(const T* array, int first_state, int64_t dstate) {
  if (dstate % kStates == 0 && first_state < dstate) {
    return load_pack<T, kStates>(array + first_state);
  }
  Pack<T, kStates> states;
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    states.v[s] = first_state + s < dstate ? array[first_state + s] : T{};
  }
  return states;
}

/// Fills rows[step][state], rows `row_stride` apart, from a variable projection, by all threads of
/// the block. Steps and states that do not exist become zero.
template <class T>
__device__ void stage_projection(const ArrayView& view, const WorkItem& item, int64_t first_step,
                                 int steps, int64_t dstate, int padded_states, int row_stride,
                                 T* rows) {
  using R = real_t<T>;
  const int64_t base =
      item.batch * view.batch + item.group * view.group + first_step * view.step;
  with_element_type<R>(view.dtype, [&](auto type) {
    using Element = decltype(type);
    const Element* data = static_cast<const Element*>(view.data) + base;
    const int count = kChunk * padded_states;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      // Neighbouring threads read neighbouring steps, or states where those are contiguous.
      const bool state_major = view.state == view.imag + 1 && view.step != view.imag + 1;
      const int t = state_major ? i / padded_states : i % kChunk;
      const int n = state_major ? i % padded_states : i / kChunk;
      T value{};
      if (t < steps && n < dstate) {
        const Element* element = data + t * view.step + n * view.state;
        if constexpr (is_complex_v<T>) {
          value = {static_cast<R>(to_real(element[0])), static_cast<R>(to_real(element[view.imag]))};
        } else {
          value = static_cast<R>(to_real(*element));
        }
      }
      rows[t * row_stride + n] = value;
    }
  });
}

/// B or C as a lane reads it: its states of step t lie at first + t·stride. A constant projection
/// has stride 0 and a slot of its own for each thread.
template <class T>
struct ProjectionRows {
  const T* first;
  int stride;
};

}  // namespace selective_scan::cuda
