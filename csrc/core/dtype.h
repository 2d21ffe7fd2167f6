// Element types of the arrays, and conversion of single elements to and from the compute type.
#pragma once

#include <cstdint>
#include <cstring>

#include "config.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace selective_scan {

/// The type of a real element, or of one component of a complex element.
enum class DType : int8_t { kFloat32, kFloat64, kFloat16, kBFloat16 };

SELECTIVE_SCAN_HD constexpr int64_t element_size(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

/// IEEE binary16 and bfloat16 as stored in memory, without arithmetic.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class To, class From>
SELECTIVE_SCAN_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of one size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

SELECTIVE_SCAN_HD float to_float(BFloat16 value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

/// Rounds to nearest, ties to even; NaN stays NaN.
SELECTIVE_SCAN_HD BFloat16 to_bfloat16(float value) {
#if defined(__CUDA_ARCH__)
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
#else
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}

SELECTIVE_SCAN_HD float to_float(Half value) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(value.bits));
#else
  // The exponent and mantissa are shifted into place, and the exponent is rebiased for float. This
  // gives subnormal numbers a leading 1 at 2^-15: they are 2·x − 2^-14, which is less than x for
  // them alone. No intermediate float is subnormal, since cpu/ sets the processor to flush
  // subnormals.
  const uint32_t magnitude = (value.bits & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const float x = bit_cast<float>(magnitude + 0x38000000u);
  const float subnormal = 2.0f * x - 0x1p-14f;
  const uint32_t number = bit_cast<uint32_t>(subnormal < x ? subnormal : x);
  const bool is_special = magnitude >= 0x0f800000u;  // inf or NaN
  return bit_cast<float>((is_special ? magnitude | 0x7f800000u : number) | sign);
#endif
}

/// Rounds to nearest, ties to even; overflows to infinity; NaN stays NaN.
SELECTIVE_SCAN_HD Half to_half(float value) {
#if defined(__CUDA_ARCH__)
  return {__half_as_ushort(__float2half_rn(value))};
#else
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x47800000u) {  // at least 2^16
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: the addition rounds at 2^-24
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return {static_cast<uint16_t>(half | sign)};
#endif
}

/// Returns element `index` of an array of `dtype` as Real (float or double).
template <class Real>
SELECTIVE_SCAN_HD Real load_element(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<Real>(static_cast<const float*>(data)[index]);
    case DType::kFloat64:
      return static_cast<Real>(static_cast<const double*>(data)[index]);
    case DType::kFloat16:
      return static_cast<Real>(to_float(static_cast<const Half*>(data)[index]));
    case DType::kBFloat16:
      return static_cast<Real>(to_float(static_cast<const BFloat16*>(data)[index]));
  }
  return Real(0);
}

template <class Real>
SELECTIVE_SCAN_HD void store_element(void* data, DType dtype, int64_t index, Real value) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      break;
    case DType::kFloat64:
      static_cast<double*>(data)[index] = static_cast<double>(value);
      break;
    case DType::kFloat16:
      static_cast<Half*>(data)[index] = to_half(static_cast<float>(value));
      break;
    case DType::kBFloat16:
      static_cast<BFloat16*>(data)[index] = to_bfloat16(static_cast<float>(value));
      break;
  }
}

}  // namespace selective_scan
