// What follows a scan kernel: the summaries of segments are combined, the partial sums of the
// backward pass added up in a fixed order.
#include "scan.h"
#include "scan_common.cuh"

namespace selective_scan::cuda {
namespace {

struct ReduceArgs {
  BackwardParams params;
  Geometry geometry;
  int padded_states;
  BackwardWorkspace workspace;
};

constexpr int kReduceThreads = 256;
constexpr int kReduceSteps = 32;   // of one block of reduce_projections
constexpr int kReduceStates = 16;  // likewise

/// dB and dC: adds the tiles. A block takes kReduceSteps steps and kReduceStates states of one
/// (batch, group); it reads along states and writes along steps, through shared memory. Bound by
/// memory.
template <class T>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_projections(const __grid_constant__ ReduceArgs args, int64_t step_blocks,
                       int64_t state_blocks, int64_t work_items) {
  __shared__ T sums[2 * kReduceStates][kReduceSteps + 1];
  const BackwardParams& params = args.params;
  const int64_t padded = args.padded_states;
  const int64_t tile_stride = params.batch * params.groups * params.seqlen * 2 * padded;
  for (int64_t index = blockIdx.x; index < work_items; index += gridDim.x) {
    const int64_t first_step = index % step_blocks * kReduceSteps;
    const int64_t first_state = index / step_blocks % state_blocks * kReduceStates;
    const int64_t sequence = index / (step_blocks * state_blocks);  // batch · groups + group
    // What a thread adds up, all tiles' values of several sums on their way at a time.
    constexpr int kSums = 2 * kReduceStates * kReduceSteps / kReduceThreads;
    const int n = threadIdx.x % kReduceStates;
    const int kind = threadIdx.x / kReduceStates % 2;
    const int first_t = threadIdx.x / (2 * kReduceStates);
    constexpr int kStride = kReduceThreads / (2 * kReduceStates);
    const T* source = static_cast<const T*>(args.workspace.projections) +
                      ((sequence * params.seqlen + first_step + first_t) * 2 + kind) * padded +
                      first_state + n;
    T sum[kSums] = {};
    if (first_state + n < params.dstate) {
#pragma unroll 4
      for (int64_t tile = 0; tile < args.geometry.tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          if (first_step + first_t + i * kStride < params.seqlen) {
            sum[i] += source[i * kStride * 2 * padded];
          }
        }
        source += tile_stride;
      }
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      sums[kind * kReduceStates + n][first_t + i * kStride] = sum[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * kReduceStates * kReduceSteps; i += kReduceThreads) {
      const int t = i % kReduceSteps;
      const int n = i / kReduceSteps % kReduceStates;
      const int kind = i / (kReduceSteps * kReduceStates);
      const ArrayView& view = kind == 0 ? params.dB : params.dC;
      const bool wanted = kind == 0 ? params.variable_B : params.variable_C;
      if (wanted && first_step + t < params.seqlen && first_state + n < params.dstate) {
        store_component(view,
                        sequence / params.groups * view.batch +
                            sequence % params.groups * view.group + (first_state + n) * view.state +
                            (first_step + t) * view.step,
                        sums[kind * kReduceStates + n][t]);
      }
    }
    __syncthreads();
  }
}

constexpr int kBatchSums = kWarpSize;  // of one block of reduce_batches
constexpr int kRowSlices = kReduceThreads / kBatchSums;

/// Adds `length` consecutive values of each of `rows` rows, the first at `offset`. A warp takes
/// every kRowSlices-th row, and the first warp, whose lanes get the results, adds what the warps
/// have; in fp64, since there may be very many rows. All threads of the block call this together.
template <class T>
__device__ T sum_rows(const void* partial, int64_t rows, int64_t row_stride, int64_t offset,
                      int length, bool exists) {
  using R = real_t<T>;
  __shared__ double2 slices[kRowSlices][kBatchSums];
  const int lane = threadIdx.x % kBatchSums;
  const int slice = threadIdx.x / kBatchSums;
  double2 sum{0, 0};
  const auto add = [&](T value) {
    if constexpr (is_complex_v<T>) {
      sum.x += value.re;
      sum.y += value.im;
    } else {
      sum.x += value;
    }
  };
  if (exists) {
#pragma unroll 4
    for (int64_t row = slice; row < rows; row += kRowSlices) {
      const T* source = static_cast<const T*>(partial) + row * row_stride + offset;
      for (int i = 0; i < length; ++i) add(source[i]);
    }
  }
  slices[slice][lane] = sum;
  __syncthreads();
  if (slice == 0) {
    for (int other = 1; other < kRowSlices; ++other) {
      sum.x += slices[other][lane].x;
      sum.y += slices[other][lane].y;
    }
  }
  __syncthreads();
  if constexpr (is_complex_v<T>) {
    return {static_cast<R>(sum.x), static_cast<R>(sum.y)};
  } else {
    return static_cast<R>(sum.x);
  }
}

/// dA, dD, ddelta_bias and the gradients of constant B and C: adds the segments and batches. The
/// first `state_blocks` work items are kBatchSums (channel, state) pairs each, those behind them
/// as many channels. Bound by latency.
template <class T>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_batches(const __grid_constant__ ReduceArgs args, int64_t state_blocks,
                   int64_t work_items) {
  using R = real_t<T>;
  const BackwardParams& params = args.params;
  const BackwardWorkspace& workspace = args.workspace;
  const int64_t rows = args.geometry.segments * params.batch;
  const int warps = args.geometry.state_warps;
  const bool is_first_warp = threadIdx.x < kBatchSums;
  for (int64_t index = blockIdx.x; index < work_items; index += gridDim.x) {
    const bool of_states = index < state_blocks;
    const int64_t i =
        (of_states ? index : index - state_blocks) * kBatchSums + threadIdx.x % kBatchSums;
    if (of_states) {
      const int64_t channel = i / params.dstate;
      const int64_t state = i % params.dstate;
      const bool exists = channel < params.dim;
      const auto reduce = [&](const void* partial, const ArrayView& view) {
        if (partial == nullptr) return;
        const T sum = sum_rows<T>(partial, rows, params.dim * args.padded_states,
                                  channel * args.padded_states + state, 1, exists);
        if (exists && is_first_warp) {
          store_component(view, channel * view.channel + state * view.state, sum);
        }
      };
      reduce(workspace.dA, params.dA);
      reduce(workspace.dB, params.dB);
      reduce(workspace.dC, params.dC);
    } else {
      const bool exists = i < params.dim;
      const auto reduce = [&](const void* partial, const ArrayView& view) {
        if (partial == nullptr) return;
        const R sum = sum_rows<R>(partial, rows, params.dim * warps, i * warps, warps, exists);
        if (exists && is_first_warp) store_component(view, i * view.channel, sum);
      };
      reduce(workspace.dD, params.dD);
      reduce(workspace.ddelta_bias, params.ddelta_bias);
    }
  }
}

constexpr int kCombined = 16;        // segments that a thread loads at a time
constexpr int kCombineThreads = 64;  // few, for many multiprocessors to take part

/// A thread follows one (batch, channel, state) through the segments.
template <class T>
__global__ void __launch_bounds__(kCombineThreads)
    combine_segments_kernel(ScanParams params, ArrayView initial, int64_t segments, int padded,
                            bool backwards, SegmentStates states) {
  const int64_t count = params.batch * params.dim * padded;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kCombineThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x; i < count;
       i += threads) {
    const int64_t state = i % padded;
    const int64_t row = i / padded;
    T value{};
    if (state < params.dstate) {
      value = load_component<T>(initial, row / params.dim * initial.batch +
                                             row % params.dim * initial.channel +
                                             state * initial.state);
    }
    const T* factors = static_cast<const T*>(states.factors) + i;
    T* offsets = static_cast<T*>(states.offsets) + i;
    const auto at = [&](int64_t s) { return (backwards ? segments - 1 - s : s) * count; };
    for (int64_t first = 0; first < segments; first += kCombined) {
      // The last segment has no summary, and what leaves it nobody needs.
      T factor[kCombined]{};
      T offset[kCombined]{};
#pragma unroll
      for (int k = 0; k < kCombined; ++k) {
        if (first + k >= segments - 1) continue;
        factor[k] = factors[at(first + k)];
        offset[k] = offsets[at(first + k)];
      }
#pragma unroll
      for (int k = 0; k < kCombined; ++k) {
        if (first + k >= segments) continue;
        offsets[at(first + k)] = value;
        value = apply_map(factor[k], offset[k], value);
      }
    }
  }
}

}  // namespace

template <class T>
cudaError_t combine_segments(const ScanParams& params, const ArrayView& initial,
                             const Geometry& geometry, int padded_states, bool backwards,
                             const SegmentStates& segments, cudaStream_t stream) {
  const int64_t count = params.batch * params.dim * padded_states;
  const unsigned blocks = grid_blocks((count + kCombineThreads - 1) / kCombineThreads);
  combine_segments_kernel<T><<<blocks, kCombineThreads, 0, stream>>>(
      params, initial, geometry.segments, padded_states, backwards, segments);
  return cudaGetLastError();
}

template <class T>
cudaError_t reduce_gradients(const BackwardParams& params, const Geometry& geometry,
                             int padded_states, const BackwardWorkspace& workspace,
                             cudaStream_t stream) {
  const ReduceArgs args{params, geometry, padded_states, workspace};
  const auto blocks_of = [](int64_t count, int64_t size) { return (count + size - 1) / size; };
  if (workspace.projections != nullptr) {
    const int64_t step_blocks = blocks_of(params.seqlen, kReduceSteps);
    const int64_t state_blocks = blocks_of(params.dstate, kReduceStates);
    const int64_t work_items = params.batch * params.groups * step_blocks * state_blocks;
    if (work_items > 0) {
      reduce_projections<T><<<grid_blocks(work_items), kReduceThreads, 0, stream>>>(
          args, step_blocks, state_blocks, work_items);
    }
  }
  const int64_t state_blocks = blocks_of(params.dim * params.dstate, kBatchSums);
  const bool has_channel_sums = workspace.dD != nullptr || workspace.ddelta_bias != nullptr;
  const int64_t work_items =
      state_blocks + (has_channel_sums ? blocks_of(params.dim, kBatchSums) : 0);
  reduce_batches<T>
      <<<grid_blocks(work_items), kReduceThreads, 0, stream>>>(args, state_blocks, work_items);
  return cudaGetLastError();
}

template cudaError_t combine_segments<float>(const ScanParams&, const ArrayView&, const Geometry&,
                                             int, bool, const SegmentStates&, cudaStream_t);
template cudaError_t reduce_gradients<float>(const BackwardParams&, const Geometry&, int,
                                             const BackwardWorkspace&, cudaStream_t);
template cudaError_t combine_segments<double>(const ScanParams&, const ArrayView&, const Geometry&,
                                              int, bool, const SegmentStates&, cudaStream_t);
template cudaError_t reduce_gradients<double>(const BackwardParams&, const Geometry&, int,
                                              const BackwardWorkspace&, cudaStream_t);
template cudaError_t combine_segments<Complex<float>>(const ScanParams&, const ArrayView&,
                                                      const Geometry&, int, bool,
                                                      const SegmentStates&, cudaStream_t);
template cudaError_t reduce_gradients<Complex<float>>(const BackwardParams&, const Geometry&, int,
                                                      const BackwardWorkspace&, cudaStream_t);
template cudaError_t combine_segments<Complex<double>>(const ScanParams&, const ArrayView&,
                                                       const Geometry&, int, bool,
                                                       const SegmentStates&, cudaStream_t);
template cudaError_t reduce_gradients<Complex<double>>(const BackwardParams&, const Geometry&, int,
                                                       const BackwardWorkspace&, cudaStream_t);

}  // namespace selective_scan::cuda
