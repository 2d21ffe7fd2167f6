// Conversion, loads and stores of single elements and small packs of them.
#pragma once

#include <type_traits>

#include "../../core/complex.h"
#include "../../core/element.h"
#include "../../core/params.h"

namespace selective_scan::cuda {

/// kCount values that are moved in one access if the hardware can.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Pack {
  T v[kCount];
};

/// Built-in vector types, because the compiler always moves these with one instruction.
template <int kBytes>
using Vector = std::conditional_t<
    kBytes % 16 == 0, uint4,
    std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;

template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> load_pack(const T* address) {
  using Word = Vector<sizeof(Pack<T, kCount>)>;
  constexpr int kWords = sizeof(Pack<T, kCount>) / sizeof(Word);
  Pack<Word, kWords> words;
#pragma unroll
  for (int i = 0; i < kWords; ++i) words.v[i] = reinterpret_cast<const Word*>(address)[i];
  return bit_cast<Pack<T, kCount>>(words);
}
template <class T, int kCount>
__device__ __forceinline__ void store_pack(T* address, const Pack<T, kCount>& pack) {
  using Word = Vector<sizeof(Pack<T, kCount>)>;
  constexpr int kWords = sizeof(Pack<T, kCount>) / sizeof(Word);
  const auto words = bit_cast<Pack<Word, kWords>>(pack);
#pragma unroll
  for (int i = 0; i < kWords; ++i) reinterpret_cast<Word*>(address)[i] = words.v[i];
}

/// Returns an element's value in the narrowest type of arithmetic that holds it.
template <class Element>
__device__ __forceinline__ auto to_real(Element element) {
  if constexpr (std::is_floating_point_v<Element>) {
    return element;
  } else {
    return to_float(element);
  }
}

/// Returns one of the two 2-byte elements of a word. Converting both takes no longer than one.
__device__ __forceinline__ float half_of(uint32_t word, bool is_low, BFloat16) {
  return bit_cast<float>(is_low ? word << 16 : word & 0xffff0000u);
}
__device__ __forceinline__ float half_of(uint32_t word, bool is_low, Half) {
  const float2 both = __half22float2(bit_cast<__half2>(word));
  return is_low ? both.x : both.y;
}
__device__ __forceinline__ uint32_t pack(float low, float high, BFloat16) {
  return bit_cast<uint32_t>(__floats2bfloat162_rn(low, high));
}
__device__ __forceinline__ uint32_t pack(float low, float high, Half) {
  return bit_cast<uint32_t>(__floats2half2_rn(low, high));
}

/// Convert between elements in words, in memory order, and their values.
template <class Element, int kWords, int kCount>
__device__ __forceinline__ void words_to_reals(const uint32_t (&words)[kWords],
                                               float (&values)[kCount]) {
  if constexpr (sizeof(Element) == 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = half_of(words[i / 2], i % 2 == 0, Element{});
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = bit_cast<float>(words[i]);
  }
}
template <class Element, int kWords, int kCount>
__device__ __forceinline__ void reals_to_words(const float (&values)[kCount],
                                               uint32_t (&words)[kWords]) {
  if constexpr (sizeof(Element) == 2) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      words[i] = pack(values[2 * i], values[2 * i + 1], Element{});
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = bit_cast<uint32_t>(values[i]);
  }
}

/// Converts the kCount elements that `raw` holds.
template <class Element, class Raw, int kCount>
__device__ __forceinline__ void to_reals(const Raw& raw, float (&values)[kCount]) {
  if constexpr (std::is_same_v<Element, BFloat16> && kCount % 2 == 0) {
    const auto words = bit_cast<Pack<uint32_t, kCount / 2>>(raw);
    words_to_reals<Element>(words.v, values);
  } else {
    const auto elements = bit_cast<Pack<Element, kCount>>(raw);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = to_real(elements.v[i]);
  }
}

/// Calls work(Element{}) for elements of kSize bytes; a branch selects between the 2-byte types.
template <int kSize, class Work>
__device__ __forceinline__ void with_element_of(bool is_bfloat16, const Work& work) {
  if constexpr (kSize == 4) {
    work(float{});
  } else if (is_bfloat16) {
    work(BFloat16{});
  } else {
    work(Half{});
  }
}

/// Calls function(Element{}) with the type of an array's elements. With fp32 arithmetic no array is
/// fp64.
template <class R, class Function>
__device__ __forceinline__ void with_element(DType dtype, const Function& function) {
  if (dtype == DType::kFloat32) {
    function(float{});
  } else if (dtype == DType::kBFloat16) {
    function(BFloat16{});
  } else if (std::is_same_v<R, float> || dtype == DType::kFloat16) {
    function(Half{});
  } else if constexpr (std::is_same_v<R, double>) {
    function(double{});
  }
}

/// Stores consecutive elements to an array of `dtype`, aligned as a Pack of them.
template <class R, int kCount>
__device__ __forceinline__ void store_elements(void* address, DType dtype,
                                               const Pack<R, kCount>& values) {
  with_element<R>(dtype, [&](auto type) {
    using Element = decltype(type);
    Pack<Element, kCount> pack;
#pragma unroll
    for (int j = 0; j < kCount; ++j) pack.v[j] = to_element<Element>(values.v[j]);
    store_pack(static_cast<Element*>(address), pack);
  });
}

/// Loads element `index` of an array in the compute type, or zero if the array is absent.
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

/// Loads a lane's states from a (channel, state) or (batch, channel, state) array.
///
/// These functions run once per work item, so they are kept out of line.
template <class T, int kStates>
__device__ __noinline__ Pack<T, kStates> load_states(ArrayView view, int64_t base, int first_state,
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
__device__ __noinline__ void store_states(ArrayView view, int64_t base, int first_state,
                                          int64_t dstate, Pack<T, kStates> states) {
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    const int n = first_state + s;
    if (n < dstate) store_component(view, base + n * view.state, states.v[s]);
  }
}

/// Stores a lane's states to a contiguous [dstate] array of the compute type.
template <class T, int kStates>
__device__ __forceinline__ void store_states(T* array, int first_state, int64_t dstate,
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

/// An element whose real type, no wider than R, is only known at run time. It is loaded first and
/// converted once all loads have arrived: a conversion after each choice of type would wait for the
/// element before the next one is loaded.
template <class R>
struct RawOf {
  std::conditional_t<sizeof(R) == 8, uint64_t, uint32_t> bits = 0;  // zero in every dtype

  RawOf() = default;
  __device__ __forceinline__ RawOf(const void* data, DType dtype, int64_t index) {
    if (dtype == DType::kFloat32) {
      bits = static_cast<const uint32_t*>(data)[index];
    } else if (sizeof(R) == 8 && dtype == DType::kFloat64) {
      bits = static_cast<const decltype(bits)*>(data)[index];
    } else {
      bits = static_cast<const uint16_t*>(data)[index];
    }
  }
  /// Zero if the array is absent or `exists` is false.
  __device__ __forceinline__ RawOf(const ArrayView& view, int64_t index, bool exists) {
    if (exists && view.present()) *this = RawOf(view.data, view.dtype, index);
  }

  __device__ __forceinline__ R value(DType dtype) const {
    if constexpr (sizeof(R) == 8) {
      if (dtype == DType::kFloat64) return bit_cast<R>(bits);
    }
    const auto low = static_cast<uint32_t>(bits);
    if (dtype == DType::kFloat32) return bit_cast<float>(low);
    if (dtype == DType::kBFloat16) return bit_cast<float>(low << 16);
    return to_float(Half{static_cast<uint16_t>(low)});
  }
};
using RawElement = RawOf<float>;

}  // namespace selective_scan::cuda
