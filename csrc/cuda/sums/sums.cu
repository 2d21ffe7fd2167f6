#include "sums.h"

#include <algorithm>

#include "../kit/dependent_launch.cuh"
#include "../kit/launch_tools.h"
#include "projection_sums.cuh"

namespace selective_scan::cuda {
namespace {

constexpr int kItemSums = kWarpSize;  // per work item of ParameterSums
constexpr int kItemWarps = kSumThreads / kItemSums;
constexpr int kFloatBlocks = 5;  // per multiprocessor if T is float

SELECTIVE_SCAN_HD int64_t work_items(const ParameterSums& sums) {
  return ceil_div(sums.rows * sums.columns, kItemSums);
}

/// Adds the parts of kItemSums sums, one per lane. Each warp adds every kItemWarps-th part, then
/// the first warp adds the warps' results. All threads of the block call this together. Bound by
/// latency.
template <class T>
__device__ void add_parameters(const ParameterSums& sums, int64_t item) {
  using R = real_t<T>;
  __shared__ double2 warp_sums[kItemWarps][kItemSums];
  const int lane = threadIdx.x % kItemSums;
  const int warp = threadIdx.x / kItemSums;
  const int64_t index = item * kItemSums + lane;
  const int64_t row = index / sums.columns;
  const int64_t column = index % sums.columns;
  const bool exists = row < sums.rows;
  double2 sum{0, 0};
  if (exists) {
    const T* const first =
        static_cast<const T*>(sums.parts) + row * sums.row_stride + column * sums.terms;
#pragma unroll 4
    for (int64_t part = warp; part < sums.count; part += kItemWarps) {
      const T* const source = first + part * sums.part_stride;
#pragma unroll 1
      for (int i = 0; i < sums.terms; ++i) {
        if constexpr (is_complex_v<T>) {
          sum.x += source[i].re;
          sum.y += source[i].im;
        } else {
          sum.x += source[i];
        }
      }
    }
  }
  warp_sums[warp][lane] = sum;
  __syncthreads();
  if (exists && warp == 0) {
    for (int other = 1; other < kItemWarps; ++other) {
      sum.x += warp_sums[other][lane].x;
      sum.y += warp_sums[other][lane].y;
    }
    const int64_t at = row * sums.target_row + column * sums.target_column;
    if constexpr (is_complex_v<T>) {
      store_component(sums.target, at, T{static_cast<R>(sum.x), static_cast<R>(sum.y)});
    } else {
      store_component(sums.target, at, static_cast<R>(sum.x));
    }
  }
  __syncthreads();
}

/// The first `projection_blocks` blocks process the projections, the others the parameters.
template <class T, int kVector>
__global__ void __launch_bounds__(kSumThreads,
                                  fitting_blocks(kSumThreads,
                                                 sizeof(T) == sizeof(float) ? kFloatBlocks : 3))
    sums_kernel(const __grid_constant__ ProjectionWork work,
                const __grid_constant__ ParameterList parameters, unsigned projection_blocks,
                int64_t parameter_items) {
  using Item = ProjectionItem<T, kVector>;
  __shared__ typename Item::Results results;
  wait_for_primary();
  if (blockIdx.x < projection_blocks) {
    for (int64_t item = blockIdx.x; item < work.items; item += projection_blocks) {
      Item(work, results, item).add();
    }
    return;
  }
  for (int64_t item = blockIdx.x - projection_blocks; item < parameter_items;
       item += gridDim.x - projection_blocks) {
    const ParameterSums* sums = parameters.sums;
    int64_t own_item = item;
    for (; own_item >= work_items(*sums); ++sums) own_item -= work_items(*sums);
    if (is_complex_v<T> && !sums->is_real) {
      add_parameters<T>(*sums, own_item);
    } else {
      add_parameters<real_t<T>>(*sums, own_item);
    }
  }
}

template <class T, int kVector>
cudaError_t launch(const Sums& sums, cudaStream_t stream) {
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  const ProjectionWork work = ProjectionItem<T, kVector>::divide(sums.projections);
  int64_t parameter_items = 0;
  const ParameterList& parameters = sums.parameters;
  for (int i = 0; i < parameters.count; ++i) parameter_items += work_items(parameters.sums[i]);
  // If there are many items with few tiles each, launching as many blocks would take long.
  const int64_t resident = int64_t{kFloatBlocks} * device.multiprocessors;
  const int64_t projection_blocks = work.items > 4 * resident ? resident : work.items;
  constexpr int64_t kMostBlocks = 1 << 30;
  const int64_t blocks = projection_blocks + std::min(parameter_items, kMostBlocks);
  if (blocks == 0) return cudaSuccess;
  const LaunchShape shape{blocks, kSumThreads, 0, true};
  return launch_kernel(sums_kernel<T, kVector>, shape, stream, work, parameters,
                       static_cast<unsigned>(projection_blocks), parameter_items);
}

}  // namespace

cudaError_t add_up(const Sums& sums, cudaStream_t stream) {
  if (sums.is_complex && sums.is_double) return launch<Complex<double>, 1>(sums, stream);
  if (sums.is_complex) return launch<Complex<float>, 2>(sums, stream);
  if (sums.is_double) return launch<double, 2>(sums, stream);
  // Vectors of two hold B and C of a single state.
  if (sums.projections.slice_states == 1) return launch<float, 2>(sums, stream);
  return launch<float, 4>(sums, stream);
}

}  // namespace selective_scan::cuda
