// The diagonal scan's access to its arrays: the memory of a chain, and vectors of its steps.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "../../core/diagonal_params.h"
#include "../../core/element.h"
#include "../kit/elements.cuh"

namespace selective_scan::cuda::diagonal {

/// The compile-time properties of the arrays with steps: for Stored, the element type that all
/// have, the direction in which a row is walked in memory and, for vectors, that its steps are
/// contiguous; for AnyStorage none.
template <class Element, bool kReversed>
struct Stored {};
struct AnyStorage {};

/// A chain's part of an array: `data` is the step at position 0 of the row.
struct Cursor {
  char* data;
  DType dtype;
  int64_t step;
  int64_t imag;

  /// Points at the first row.
  __device__ explicit Cursor(const DiagonalArray& array)
      : data(static_cast<char*>(array.data)),
        dtype(array.dtype),
        step(array.step),
        imag(array.imag) {}

  __device__ int components() const { return imag == 0 ? 1 : 2; }

  /// Returns whether neighboring steps are contiguous in memory, in either direction.
  __device__ bool is_contiguous() const {
    return imag <= 1 && (step == components() || step == -components());
  }

  /// Returns how many positions before the row an aligned vector of `items` steps of `bytes` each
  /// begins, or -1 if not even single steps are aligned. Both arguments are powers of two.
  __device__ int misalignment(unsigned items, unsigned bytes) const {
    const auto address = static_cast<unsigned>(reinterpret_cast<uintptr_t>(data));
    if (address % bytes != 0) return -1;
    const int index = static_cast<int>((address / bytes) & (items - 1));
    return step > 0 ? index : static_cast<int>(items) - 1 - index;
  }

  template <class Element>
  __device__ Element* at(int64_t position) const {
    return reinterpret_cast<Element*>(data) + position * step;
  }
};

/// Loads one step, real or complex, whose components have the type Real.
template <class T, class Real>
__device__ T load_step(const Real* element, int64_t imag) {
  using R = real_t<T>;
  if constexpr (is_complex_v<T>) {
    return {from_element<R>(element[0]), imag == 0 ? R(0) : from_element<R>(element[imag])};
  } else {
    return from_element<R>(element[0]);
  }
}

template <class T, class Real>
__device__ void store_step(Real* element, int64_t imag, T value) {
  element[0] = to_element<Real>(real(value));
  if constexpr (is_complex_v<T>) {
    if (imag != 0) element[imag] = to_element<Real>(value.im);
  }
}

/// Access to arrays whose Storage is known, or else found by uniform branches.
template <class T, class Storage>
struct Access;

template <class T, class Element, bool kReversed>
struct Access<T, Stored<Element, kReversed>> {
  using Real = real_t<Element>;
  static constexpr int kComponents = is_complex_v<Element> ? 2 : 1;
  static constexpr int64_t kImag = kComponents - 1;
  static constexpr int64_t kStep = kReversed ? -kComponents : kComponents;

  /// A step as it lies in memory, if that is one word: then nothing waits for it before value().
  using Raw = std::conditional_t<is_complex_v<Element>, T, Real>;

  /// Returns the bytes of a component.
  static __device__ unsigned bytes(const Cursor&) { return sizeof(Real); }

  /// Loads the steps [position, position + n) of a contiguous, aligned array.
  template <int n>
  static __device__ void load_vector(const Cursor& cursor, int64_t position, T (&out)[n]) {
    const Real* lowest = reinterpret_cast<const Real*>(cursor.data) +
                         (kReversed ? position + n - 1 : position) * kStep;
    const auto pack = *reinterpret_cast<const Pack<Real, n * kComponents>*>(lowest);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      out[kReversed ? n - 1 - i : i] = load_step<T>(pack.v + i * kComponents, kImag);
    }
  }
  template <int n>
  static __device__ void store_vector(const Cursor& cursor, int64_t position,
                                      const T (&values)[n]) {
    Pack<Real, n * kComponents> pack;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      store_step(pack.v + i * kComponents, kImag, values[kReversed ? n - 1 - i : i]);
    }
    Real* lowest =
        reinterpret_cast<Real*>(cursor.data) + (kReversed ? position + n - 1 : position) * kStep;
    *reinterpret_cast<Pack<Real, n * kComponents>*>(lowest) = pack;
  }
  static __device__ T load(const Cursor& cursor, int64_t position) {
    return load_step<T>(cursor.at<const Real>(position), kImag);
  }
  static __device__ Raw load_raw(const Cursor& cursor, int64_t position) {
    if constexpr (is_complex_v<Element>) {
      return load(cursor, position);
    } else {
      return *cursor.at<const Real>(position);
    }
  }
  static __device__ T value(const Raw& raw) {
    if constexpr (is_complex_v<Element>) {
      return raw;
    } else {
      return load_step<T>(&raw, 0);
    }
  }
  static __device__ void store(const Cursor& cursor, int64_t position, T value) {
    store_step(cursor.at<Real>(position), kImag, value);
  }
};

template <class T>
struct Access<T, AnyStorage> {
  using Raw = T;

  static __device__ unsigned bytes(const Cursor& cursor) {
    return static_cast<unsigned>(element_size(cursor.dtype));
  }

  /// Calls visit with a null pointer of the element type of `cursor`.
  template <class Visit>
  static __device__ void with_storage(const Cursor& cursor, const Visit& visit) {
    visit_dtype(cursor.dtype, [&]<class Real>(Real*) {
      if constexpr (is_complex_v<T>) {
        if (cursor.imag != 0) return visit(static_cast<Complex<Real>*>(nullptr));
      }
      visit(static_cast<Real*>(nullptr));
    });
  }

  template <int n>
  static __device__ void load_vector(const Cursor& cursor, int64_t position, T (&out)[n]) {
    with_storage(cursor, [&]<class Element>(Element*) {
      if (cursor.step > 0) {
        Access<T, Stored<Element, false>>::load_vector(cursor, position, out);
      } else {
        Access<T, Stored<Element, true>>::load_vector(cursor, position, out);
      }
    });
  }
  template <int n>
  static __device__ void store_vector(const Cursor& cursor, int64_t position,
                                      const T (&values)[n]) {
    with_storage(cursor, [&]<class Element>(Element*) {
      if (cursor.step > 0) {
        Access<T, Stored<Element, false>>::store_vector(cursor, position, values);
      } else {
        Access<T, Stored<Element, true>>::store_vector(cursor, position, values);
      }
    });
  }
  static __device__ T load(const Cursor& cursor, int64_t position) {
    T value{};
    visit_dtype(cursor.dtype, [&]<class Real>(Real*) {
      value = load_step<T>(cursor.at<const Real>(position), cursor.imag);
    });
    return value;
  }
  static __device__ Raw load_raw(const Cursor& cursor, int64_t position) {
    return load(cursor, position);
  }
  static __device__ T value(const Raw& raw) { return raw; }
  static __device__ void store(const Cursor& cursor, int64_t position, T value) {
    visit_dtype(cursor.dtype, [&]<class Real>(Real*) {
      store_step(cursor.at<Real>(position), cursor.imag, value);
    });
  }
};

}  // namespace selective_scan::cuda::diagonal
