// Elements of a type that is known at run time: asked for first, converted when all have come.
//
// A conversion behind the choice of the type would wait for each element before the next is asked
// for.
#pragma once

#include "../../core/dtype.h"

namespace selective_scan::cuda::step {

/// The bits of a real element of 2 or 4 bytes.
struct Raw {
  uint32_t bits = 0;
};

__device__ __forceinline__ Raw fetch(const void* data, DType dtype, int64_t index) {
  Raw raw;
  if (dtype == DType::kFloat32) {
    raw.bits = static_cast<const uint32_t*>(data)[index];
  } else {
    raw.bits = static_cast<const uint16_t*>(data)[index];
  }
  return raw;
}
/// 0 where there is no array.
__device__ __forceinline__ Raw fetch_optional(const void* data, DType dtype, int64_t index) {
  return data == nullptr ? Raw{} : fetch(data, dtype, index);
}

__device__ __forceinline__ float real_of(Raw raw, DType dtype) {
  if (dtype == DType::kFloat32) return bit_cast<float>(raw.bits);
  if (dtype == DType::kBFloat16) return bit_cast<float>(raw.bits << 16);
  return to_float(Half{static_cast<uint16_t>(raw.bits)});
}

}  // namespace selective_scan::cuda::step
