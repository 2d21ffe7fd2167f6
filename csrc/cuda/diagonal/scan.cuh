// The general diagonal scan on the GPU. It moves three values for every multiply-add (five in the
// backward pass), so it is bound by memory, and the design keeps loads wide and in flight.
//
// A chain is a row, or one segment of time of a row if rows are few. Chains of rows that are
// contiguous in time have a warp each (rows.cuh), the others a lane in each warp of a block
// (columns.cuh).
//
// Segmented rows take three kernels: the map of every segment, the state with which every segment
// begins (one warp per row), and the scan itself. Nothing depends on the order in which blocks run.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "../kit/launch_tools.h"
#include "../launch.h"
#include "columns.cuh"
#include "rows.cuh"

namespace selective_scan::cuda::diagonal {

constexpr int kRowThreads = 128;
constexpr int kColumnThreads = kColumnWarps * kWarpSize;
/// A segment's steps are a multiple of this number.
constexpr int64_t kSegmentUnit = 1024;
/// Rows are split until every multiprocessor has this many warps.
constexpr int64_t kWantedWarps = 16;

/// The kernels of one kind of chain: rows or columns.
template <class Step, class Params, class Storage, bool kIsColumns>
struct Chains {
  static constexpr int kThreads = kIsColumns ? kColumnThreads : kRowThreads;
  /// Blocks per multiprocessor. Most calls are bound by the number of loads in flight; if values
  /// take one register each, this number of blocks can hold theirs without spilling.
  static constexpr int kMinBlocks = sizeof(typename Step::Value) > 4 || !kIsKnown<Storage> ? 1
                                    : kIsColumns                                           ? 3
                                                                                           : 5;

  /// Calls visit(chain, index of (row, segment), is_leader) for a thread that works on a chain. The
  /// leader writes the results that belong to the chain as a whole.
  template <class Visit>
  static __device__ void visit(const Params& params, const Segmentation& split,
                               const Visit& visit) {
    if constexpr (kIsColumns) {
      using Chain = ColumnChain<Step, Params, Storage>;
      __shared__ typename Chain::MapExchange::Storage maps;
      const int64_t rows = quotient(blockIdx.x, split.segments);
      const int64_t segment = blockIdx.x - rows * split.segments;
      const int64_t row = rows * kWarpSize + threadIdx.x % kWarpSize;
      const bool active = row < params.rows;
      const int64_t read_row = active ? row : params.rows - 1;
      visit(Chain(params, split, read_row, segment, active, maps),
            read_row * split.segments + segment, active && threadIdx.x < kWarpSize);
    } else {
      const int64_t thread = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
      const int64_t index = thread / kWarpSize;
      if (index >= params.rows * split.segments) return;
      const int64_t row = quotient(index, split.segments);
      const int64_t segment = index - row * split.segments;
      const int lane = static_cast<int>(thread % kWarpSize);
      visit(RowChain<Step, Params, Storage>(params, split, row, segment, lane), index, lane == 0);
    }
  }
};

template <class Step, class Params, class Storage, bool kIsColumns>
__global__ void __launch_bounds__(Chains<Step, Params, Storage, kIsColumns>::kThreads)
    map_kernel(const __grid_constant__ Params params, Segmentation split,
               AffineMap<typename Step::Value>* maps) {
  Chains<Step, Params, Storage, kIsColumns>::visit(params, split,
                                                   [&](auto chain, int64_t index, bool is_leader) {
                                                     const auto map = chain.map();
                                                     if (is_leader) maps[index] = map;
                                                   });
}

template <class Step, class Params, class Storage, bool kIsColumns>
__global__ void __launch_bounds__(Chains<Step, Params, Storage, kIsColumns>::kThreads,
                                  Chains<Step, Params, Storage, kIsColumns>::kMinBlocks)
    scan_kernel(const __grid_constant__ Params params, Segmentation split,
                const AffineMap<typename Step::Value>* maps) {
  Chains<Step, Params, Storage, kIsColumns>::visit(
      params, split, [&](auto chain, int64_t index, bool) {
        chain.scan(maps == nullptr ? chain.start() : maps[index].offset);
      });
}

/// Replaces each map's offset by the state with which its segment begins. A warp has one row.
template <class Step, class Params>
__global__ void __launch_bounds__(kRowThreads)
    start_kernel(const __grid_constant__ Params params, Segmentation split,
                 AffineMap<typename Step::Value>* maps) {
  using T = typename Step::Value;
  const int64_t row = (int64_t{blockIdx.x} * kRowThreads + threadIdx.x) / kWarpSize;
  if (row >= params.rows) return;
  const int lane = threadIdx.x % kWarpSize;
  T state = Chain<Step, Params, AnyStorage>(params, row, 0).start();
  AffineMap<T>* row_maps = maps + row * split.segments;
  for (int64_t first = 0; first < split.segments; first += kWarpSize) {
    const int64_t segment = first + lane;
    const AffineMap<T> own =
        segment < split.segments ? row_maps[segment] : AffineMap<T>::identity();
    const T after = scan_lanes(lane, own)(state);
    const T before = shuffle_up(after, 1);
    if (segment < split.segments) row_maps[segment].offset = lane == 0 ? state : before;
    state = shuffle(after, kWarpSize - 1);
  }
}

template <class Step, class Storage, bool kIsColumns, class Params>
cudaError_t launch_chains(const Params& params, const Segmentation& split, void* workspace,
                          cudaStream_t stream) {
  constexpr int kThreads = Chains<Step, Params, Storage, kIsColumns>::kThreads;
  const int64_t blocks = kIsColumns ? ceil_div(params.rows, kWarpSize) * split.segments
                                    : ceil_div(params.rows * split.segments * kWarpSize, kThreads);
  const LaunchShape shape{blocks, kThreads};
  if (shape.blocks == 0) return cudaSuccess;  // there are no sequences
  auto* maps = static_cast<AffineMap<typename Step::Value>*>(workspace);
  if (maps != nullptr) {
    cudaError_t error = launch_kernel(&map_kernel<Step, Params, Storage, kIsColumns>, shape, stream,
                                      params, split, maps);
    if (error != cudaSuccess) return error;
    const LaunchShape start_shape{ceil_div(params.rows * kWarpSize, kRowThreads), kRowThreads};
    error = launch_kernel(&start_kernel<Step, Params>, start_shape, stream, params, split, maps);
    if (error != cudaSuccess) return error;
  }
  return launch_kernel(&scan_kernel<Step, Params, Storage, kIsColumns>, shape, stream, params,
                       split, maps);
}

/// Divides a call, depending on the sizes, the layout of `x` (b or dh) and the device.
inline Segmentation make_segmentation(const DiagonalScanParams& params, const DiagonalArray& x) {
  Device device;
  current_device(device);  // the launch reports errors

  Segmentation split;
  const int64_t components = x.imag == 0 ? 1 : 2;
  split.is_columns = params.seqlen > 1 && std::abs(x.step) != components;
  if (params.packed.present()) {
    split.segments = params.packed.count;
    return split;
  }
  const int64_t warps =
      split.is_columns ? ceil_div(params.rows, kWarpSize) * kColumnWarps : params.rows;
  const int64_t wanted = device.multiprocessors * kWantedWarps / warps;
  // A row's first tile may begin before the row.
  const int64_t positions = params.seqlen + kMaxItems;
  const int64_t segments =
      std::clamp<int64_t>(params.seqlen / kSegmentUnit, 1, std::max<int64_t>(wanted, 1));
  const int64_t steps = ceil_div(positions, segments);
  split.steps = round_up(steps, kSegmentUnit);
  split.segments = ceil_div(positions, split.steps);
  return split;
}

/// The arrays with steps.
inline std::array<const DiagonalArray*, 3> arrays_of(const DiagonalForwardParams& params) {
  return {&params.a, &params.b, &params.h};
}
inline std::array<const DiagonalArray*, 5> arrays_of(const DiagonalBackwardParams& params) {
  return {&params.a, &params.dh, &params.h_previous, &params.db, &params.da};
}

/// Enqueues a pass; `x` as for make_segmentation().
template <template <class> class Step, class Params>
cudaError_t run(const Params& params, const DiagonalArray& x, const ScratchMemory& memory,
                cudaStream_t stream) {
  const Segmentation split = make_segmentation(params, x);
  const bool has_maps = !params.packed.present() && split.segments > 1;
  const int64_t value = (params.is_double ? 8 : 4) * (params.is_complex ? 2 : 1);
  void* const maps = has_maps ? memory(params.rows * split.segments * 2 * value) : nullptr;

  const auto launch = [&]<class T, class Storage>(T*, Storage*) {
    return split.is_columns ? launch_chains<Step<T>, Storage, true>(params, split, maps, stream)
                            : launch_chains<Step<T>, Storage, false>(params, split, maps, stream);
  };
  const auto launch_stored = [&]<class T, class Element>(T* type, Element*) {
    // The kernels of columns follow strides in either direction.
    if (x.step < 0 && !split.is_columns) {
      return launch_chains<Step<T>, Stored<Element, true>, false>(params, split, maps, stream);
    }
    return launch(type, static_cast<Stored<Element, false>*>(nullptr));
  };
  const auto all_stored_as = [&](DType dtype, int64_t imag) {
    const auto arrays = arrays_of(params);
    return std::all_of(arrays.begin(), arrays.end(), [&](const DiagonalArray* array) {
      return array->dtype == dtype && array->imag == imag;
    });
  };
  return with_state_type(params, [&]<class T>(T* type) {
    if constexpr (std::is_same_v<real_t<T>, float>) {
      if (all_stored_as(DType::kFloat32, is_complex_v<T>)) return launch_stored(type, type);
    }
    if constexpr (std::is_same_v<T, float>) {
      if (all_stored_as(DType::kBFloat16, 0)) {
        return launch_stored(type, static_cast<BFloat16*>(nullptr));
      }
      if (all_stored_as(DType::kFloat16, 0)) {
        return launch_stored(type, static_cast<Half*>(nullptr));
      }
    }
    return launch(type, static_cast<AnyStorage*>(nullptr));
  });
}

}  // namespace selective_scan::cuda::diagonal
