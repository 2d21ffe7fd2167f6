// Converts arrays to other types, all in one launch.
//
// Mapping. A block owns kTile consecutive elements of one array, and a thread every kThreads-th
// vector of kVector of them. If array and result are not aligned to vectors, or the tile is the
// array's last, a thread owns every kThreads-th element.
//
// Bound by: memory, or the launch.

#include <type_traits>

#include "../../core/conversion.h"
#include "../../core/element.h"
#include "../launch.h"
#include "elements.cuh"
#include "launch_tools.h"

namespace selective_scan::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;
constexpr int kVectors = 2;  // per thread
constexpr int kTile = kThreads * kVector * kVectors;

template <class Real>
__device__ __forceinline__ Real mapped(Conversion::Map map, Real value) {
  return map == Conversion::Map::kNegativeExp ? -exp(value) : value;
}

template <class Real>
__device__ __forceinline__ void convert_vector(const Conversion& item, int64_t first) {
  Real values[kVector];
  visit_dtype(item.from, [&](auto* type) {
    using Element = std::remove_pointer_t<decltype(type)>;
    const auto pack = load_pack<Element, kVector>(static_cast<const Element*>(item.source) + first);
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = mapped(item.map, from_element<Real>(pack.v[i]));
  });
  visit_dtype(item.to, [&](auto* type) {
    using Element = std::remove_pointer_t<decltype(type)>;
    Pack<Element, kVector> pack;
    if (item.addend != nullptr) {
      pack = load_pack<Element, kVector>(static_cast<const Element*>(item.addend) + first);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] += from_element<Real>(pack.v[i]);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) pack.v[i] = to_element<Element>(values[i]);
    store_pack(static_cast<Element*>(item.target) + first, pack);
  });
}

template <class Real>
__device__ __forceinline__ void convert_tile(const Conversion& item, int64_t begin) {
  const auto is_aligned = [](const void* array) {
    return reinterpret_cast<uintptr_t>(array) % 16 == 0;
  };
  const bool has_vectors =
      is_aligned(item.source) && is_aligned(item.addend) && is_aligned(item.target);
  const int thread = static_cast<int>(threadIdx.x);
  if (has_vectors && begin + kTile <= item.count) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      convert_vector<Real>(item, begin + (i * kThreads + thread) * kVector);
    }
    return;
  }
  const int64_t end = min(begin + kTile, item.count);
  for (int64_t at = begin + thread; at < end; at += kThreads) {
    Real value = mapped(item.map, load_element<Real>(item.source, item.from, at));
    if (item.addend != nullptr) value += load_element<Real>(item.addend, item.to, at);
    store_element(item.target, item.to, at, value);
  }
}

__host__ __device__ int64_t tiles_of(const Conversion& item) {
  return ceil_div(item.count, kTile);
}

__global__ void __launch_bounds__(kThreads)
    convert_kernel(const __grid_constant__ Conversions conversions) {
  int64_t tile = blockIdx.x;
  int index = 0;
  while (tile >= tiles_of(conversions.items[index])) {
    tile -= tiles_of(conversions.items[index]);
    ++index;
  }
  const Conversion& item = conversions.items[index];
  if (item.from == DType::kFloat64 || item.to == DType::kFloat64) {
    convert_tile<double>(item, tile * kTile);
  } else {
    convert_tile<float>(item, tile * kTile);
  }
}

}  // namespace

cudaError_t convert(const Conversions& conversions, cudaStream_t stream) {
  int64_t tiles = 0;
  for (int i = 0; i < conversions.count; ++i) tiles += tiles_of(conversions.items[i]);
  if (tiles == 0) return cudaSuccess;
  return launch_kernel(convert_kernel, LaunchShape{tiles, kThreads}, stream, conversions);
}

}  // namespace selective_scan::cuda
