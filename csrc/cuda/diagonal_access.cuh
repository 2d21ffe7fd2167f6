// Access of the diagonal scan to its rows: which memory a chain covers, and vectors of its steps.
//
// A row whose dtype and direction are known at compile time is read and written by vectors of up to
// 16 bytes; any other by the same functions behind uniform branches.
#pragma once

#include <cuda_runtime.h>

#include "../core/diagonal_params.h"
#include "../core/element.h"

namespace selective_scan::cuda::diagonal {

/// What is known of the arrays with steps at compile time: that all have elements of this type, and
/// in which direction a row is walked in memory; or nothing.
template <class Element, bool kReversed>
struct Stored {};
struct AnyStorage {};

template <class Storage>
constexpr bool kIsHalf = false;
template <class Element, bool kReversed>
constexpr bool kIsHalf<Stored<Element, kReversed>> = sizeof(Element) == 2;

template <class Element, int n>
struct alignas(sizeof(Element) * n < 16 ? sizeof(Element) * n : 16) Pack {
  Element value[n];
};

/// A chain's part of an array: `data` is the step at position 0 of the row.
struct Cursor {
  char* data;
  DType dtype;
  int64_t step;
  int64_t imag;

  __device__ Cursor(const DiagonalScanParams& params, const RowArray& array, int64_t row)
      : data(static_cast<char*>(array.data) +
             params.row_offset(array, row) * element_size(array.dtype)),
        dtype(array.dtype),
        step(array.step),
        imag(array.imag) {}

  __device__ int components() const { return imag == 0 ? 1 : 2; }

  /// Whether neighbouring steps are neighbours in memory, in whichever direction.
  __device__ bool is_contiguous() const {
    return imag <= 1 && (step == components() || step == -components());
  }

  /// How many positions before the row an aligned vector of `items` steps begins; -1 if steps are
  /// not even aligned to themselves.
  __device__ int misalignment(int items) const {
    const int bytes = static_cast<int>(element_size(dtype)) * components();
    const auto address = reinterpret_cast<uintptr_t>(data);
    if (address % bytes != 0) return -1;
    const int index = static_cast<int>(address / bytes % items);
    return step > 0 ? index : items - 1 - index;
  }

  template <class Element>
  __device__ Element* at(int64_t position) const {
    return reinterpret_cast<Element*>(data) + position * step;
  }
};

/// The steps [position, position + n) of a contiguous, aligned array.
template <class T, int n, class Element, int kComponents>
__device__ void load_vector(const Cursor& cursor, bool backwards, int64_t position, T (&out)[n]) {
  const Element* lowest = cursor.at<const Element>(backwards ? position + n - 1 : position);
  const auto pack = *reinterpret_cast<const Pack<Element, n * kComponents>*>(lowest);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const auto item = [&](int k) {
      using Real = real_t<T>;
      const Element* element = pack.value + k * kComponents;
      if constexpr (!is_complex_v<T>) {
        return from_element<Real>(element[0]);
      } else if constexpr (kComponents == 2) {
        return T{from_element<Real>(element[0]), from_element<Real>(element[1])};
      } else {
        return T{from_element<Real>(element[0]), Real(0)};
      }
    };
    out[i] = backwards ? item(n - 1 - i) : item(i);
  }
}

template <class T, int n, class Element, int kComponents>
__device__ void store_vector(const Cursor& cursor, bool backwards, int64_t position,
                             const T (&values)[n]) {
  Pack<Element, n * kComponents> pack;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const T value = backwards ? values[n - 1 - i] : values[i];
    pack.value[i * kComponents] = to_element<Element>(real(value));
    if constexpr (kComponents == 2) pack.value[i * kComponents + 1] = to_element<Element>(value.im);
  }
  Element* lowest = cursor.at<Element>(backwards ? position + n - 1 : position);
  *reinterpret_cast<Pack<Element, n * kComponents>*>(lowest) = pack;
}

/// The steps of [position, position + n) that are inside [begin, end); `outside` for the others.
template <class T, int n>
__device__ void load_items(const Cursor& cursor, int64_t position, int64_t begin, int64_t end,
                           T outside, T (&out)[n]) {
  using Real = real_t<T>;
  visit_dtype(cursor.dtype, [&]<class Element>(Element*) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      out[i] = outside;
      if (position + i < begin || position + i >= end) continue;
      const Element* element = cursor.at<const Element>(position + i);
      if constexpr (is_complex_v<T>) {
        out[i].re = from_element<Real>(element[0]);
        out[i].im = cursor.imag == 0 ? Real(0) : from_element<Real>(element[cursor.imag]);
      } else {
        out[i] = from_element<Real>(element[0]);
      }
    }
  });
}

template <class T, int n>
__device__ void store_items(const Cursor& cursor, int64_t position, int64_t begin, int64_t end,
                            const T (&values)[n]) {
  visit_dtype(cursor.dtype, [&]<class Element>(Element*) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (position + i < begin || position + i >= end) continue;
      Element* element = cursor.at<Element>(position + i);
      element[0] = to_element<Element>(real(values[i]));
      if constexpr (is_complex_v<T>) {
        if (cursor.imag != 0) element[cursor.imag] = to_element<Element>(values[i].im);
      }
    }
  });
}

/// Vectors of a Storage that is known, or found out by uniform branches.
template <class T, class Storage>
struct VectorAccess;

template <class T, class Element, bool kReversed>
struct VectorAccess<T, Stored<Element, kReversed>> {
  static constexpr int kComponents = is_complex_v<Element> ? 2 : 1;

  template <int n>
  static __device__ void load(const Cursor& cursor, int64_t position, T (&out)[n]) {
    load_vector<T, n, real_t<Element>, kComponents>(cursor, kReversed, position, out);
  }
  template <int n>
  static __device__ void store(const Cursor& cursor, int64_t position, const T (&values)[n]) {
    store_vector<T, n, real_t<Element>, kComponents>(cursor, kReversed, position, values);
  }
};

template <class T>
struct VectorAccess<T, AnyStorage> {
  template <int n>
  static __device__ void load(const Cursor& cursor, int64_t position, T (&out)[n]) {
    visit_dtype(cursor.dtype, [&]<class Element>(Element*) {
      if constexpr (is_complex_v<T>) {
        if (cursor.imag != 0)
          return load_vector<T, n, Element, 2>(cursor, cursor.step < 0, position, out);
      }
      load_vector<T, n, Element, 1>(cursor, cursor.step < 0, position, out);
    });
  }
  template <int n>
  static __device__ void store(const Cursor& cursor, int64_t position, const T (&values)[n]) {
    visit_dtype(cursor.dtype, [&]<class Element>(Element*) {
      if constexpr (is_complex_v<T>) {
        if (cursor.imag != 0)
          return store_vector<T, n, Element, 2>(cursor, cursor.step < 0, position, values);
      }
      store_vector<T, n, Element, 1>(cursor, cursor.step < 0, position, values);
    });
  }
};

}  // namespace selective_scan::cuda::diagonal
