// Loads that are separate from conversions. A thread that converted each number before loading the
// next one would wait for memory once per array. So everything that a row needs is fetched as it
// lies in memory, whatever its type, and converted when all loads are under way.
#pragma once

#include "../../core/element.h"
#include "../kit/elements.cuh"

namespace selective_scan::cuda::update {

/// kReals numbers of at most kSize bytes each.
template <class R, int kReals, int kSize = sizeof(R)>
struct Fetched {
  uint32_t words[ceil_div(kReals * kSize, 4)] = {};

  __device__ __forceinline__ Pack<R, kReals> converted(DType dtype) const {
    Pack<R, kReals> values;
    if (kSize >= 4 && dtype == DType::kFloat32) {
#pragma unroll
      for (int i = 0; i < kReals; ++i) values.v[i] = bit_cast<float>(words[kSize >= 4 ? i : 0]);
    } else if (dtype == DType::kBFloat16) {
#pragma unroll
      for (int i = 0; i < kReals; ++i) values.v[i] = to_float(BFloat16{half_word(i)});
    } else if (kSize <= 4 || dtype == DType::kFloat16) {
#pragma unroll
      for (int i = 0; i < kReals; ++i) values.v[i] = to_float(Half{half_word(i)});
    } else if constexpr (kSize == 8) {
#pragma unroll
      for (int i = 0; i < kReals; ++i) {
        const uint64_t high = words[2 * i + 1];
        values.v[i] = bit_cast<double>(high << 32 | words[2 * i]);
      }
    }
    return values;
  }

  /// Sets value i as if it had been fetched together with its neighbors.
  __device__ __forceinline__ void set(int i, const void* address, int size) {
    if (kSize == 2 || size == 2) {
      const uint32_t bits = *reinterpret_cast<const uint16_t*>(address);
      words[i / 2] |= bits << (i % 2 * 16);
    } else if (size == 4) {
      words[i] = *reinterpret_cast<const uint32_t*>(address);
    } else if constexpr (kSize == 8) {
      words[2 * i] = reinterpret_cast<const uint32_t*>(address)[0];
      words[2 * i + 1] = reinterpret_cast<const uint32_t*>(address)[1];
    }
  }

  /// Fetches all values from consecutive addresses. kStreamed: bypasses the first-level cache,
  /// which is for data that rows share.
  template <bool kStreamed>
  __device__ __forceinline__ void set_all(const void* address, int size) {
    if (kSize == 2 || size == 2) {
      take<kReals * 2, kStreamed>(address);
    } else if (size == 4) {
      take<kReals * 4, kStreamed>(address);
    } else if constexpr (kSize == 8) {
      take<kReals * 8, kStreamed>(address);
    }
  }

 private:
  __device__ __forceinline__ uint16_t half_word(int i) const {
    return static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
  }

  template <int kBytes, bool kStreamed>
  __device__ __forceinline__ void take(const void* address) {
    using Word = Vector<kBytes>;
    const auto* source = reinterpret_cast<const Word*>(address);
#pragma unroll
    for (int i = 0; i < kBytes / static_cast<int>(sizeof(Word)); ++i) {
      const Word word = kStreamed ? __ldcg(source + i) : source[i];
      if constexpr (sizeof(Word) < 4) {
        words[0] = word;
      } else {
        memcpy(words + i * sizeof(Word) / 4, &word, sizeof(Word));
      }
    }
  }
};

/// Fetches one number; 0 if the array is absent.
template <class R>
__device__ __forceinline__ Fetched<R, 1> fetch(const ArrayView& view, int64_t index) {
  Fetched<R, 1> fetched;
  if (view.present()) fetched.set(0, element_at(view, index), element_size(view.dtype));
  return fetched;
}
template <class R>
__device__ __forceinline__ R value_of(const Fetched<R, 1>& fetched, const ArrayView& view) {
  return fetched.converted(view.dtype).v[0];
}

/// Fetches states `first` to first + kStates - 1 of those from `index` on; 0 from dstate on.
template <bool kStreamed, class T, int kStates, int kSize = sizeof(real_t<T>), class R = real_t<T>,
          int kReals = kStates * (is_complex_v<T> ? 2 : 1)>
__device__ __forceinline__ Fetched<R, kReals, kSize> fetch_states(const ArrayView& view,
                                                                  bool is_vector, int64_t index,
                                                                  int first, int64_t dstate) {
  constexpr int kParts = kReals / kStates;
  const int size = static_cast<int>(element_size(view.dtype));
  Fetched<R, kReals, kSize> fetched;
  if (is_vector) {
    if (first < dstate) {
      fetched.template set_all<kStreamed>(element_at(view, index + first * kParts), size);
    }
    return fetched;
  }
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    if (first + s >= dstate) break;
    const int64_t at = index + (first + s) * view.state;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      fetched.set(s * kParts + part, element_at(view, at + part), size);
    }
  }
  return fetched;
}
template <class T, int kStates, class R, int kReals, int kSize>
__device__ __forceinline__ Pack<T, kStates> states_of(const Fetched<R, kReals, kSize>& fetched,
                                                      DType dtype) {
  return bit_cast<Pack<T, kStates>>(fetched.converted(dtype));
}

template <class T, int kStates>
__device__ __forceinline__ void put_states(const ArrayView& view, bool is_vector, int64_t index,
                                           int first, int64_t dstate,
                                           const Pack<T, kStates>& states) {
  using R = real_t<T>;
  constexpr int kParts = sizeof(T) / sizeof(R);
  if (is_vector) {
    if (first < dstate) {
      void* address = element_at(view, index + first * kParts);
      store_elements(address, view.dtype, bit_cast<Pack<R, kStates * kParts>>(states));
    }
    return;
  }
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    if (first + s < dstate) store_component(view, index + (first + s) * view.state, states.v[s]);
  }
}

}  // namespace selective_scan::cuda::update
