// Array elements whose type is known only at run time.
#pragma once

#include <type_traits>

#include "config.h"
#include "dtype.h"

namespace selective_scan {

/// Returns the address of element `offset` of an array, or of a section of one.
template <class Array>
SELECTIVE_SCAN_HD void* element_at(const Array& array, int64_t offset) {
  return static_cast<char*>(array.data) + offset * element_size(array.dtype);
}

/// Calls `visit` with a null pointer to the element type of `dtype`.
template <class Visit>
SELECTIVE_SCAN_HD auto visit_dtype(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kFloat64:
      return visit(static_cast<double*>(nullptr));
    case DType::kFloat16:
      return visit(static_cast<Half*>(nullptr));
    case DType::kBFloat16:
      return visit(static_cast<BFloat16*>(nullptr));
    default:
      return visit(static_cast<float*>(nullptr));
  }
}

template <class Real, class Element>
SELECTIVE_SCAN_HD Real from_element(Element element) {
  if constexpr (sizeof(Element) == 2) {
    return static_cast<Real>(to_float(element));
  } else {
    return static_cast<Real>(element);
  }
}

template <class Element, class Real>
SELECTIVE_SCAN_HD Element to_element(Real value) {
  if constexpr (std::is_same_v<Element, Half>) {
    return to_half(static_cast<float>(value));
  } else if constexpr (std::is_same_v<Element, BFloat16>) {
    return to_bfloat16(static_cast<float>(value));
  } else {
    return static_cast<Element>(value);
  }
}

}  // namespace selective_scan
