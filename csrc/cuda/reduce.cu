// What follows a scan kernel: the summaries of segments are combined, the partial sums of the
// backward pass added up in a fixed order.
#include "batch_sums.cuh"
#include "dependent_launch.cuh"
#include "launch_tools.h"
#include "scan.h"
#include "scan_common.cuh"

namespace selective_scan::cuda {
namespace {

struct ReduceArgs {
  BackwardParams params;
  Geometry geometry;
  int padded_states;
  BackwardWorkspace workspace;
  int64_t projection_items;  // of reduce_projections()'s work
  int slice_states;          // padded, of a slice of them
};

constexpr int kReduceSteps = 32;   // of one block of reduce_projections
constexpr int kReduceStates = 16;  // likewise

/// dB and dC: adds the tiles. A block takes kReduceSteps steps and kReduceStates states of one
/// (batch, group); it reads along states and writes along steps, through shared memory. Bound by
/// memory.
template <class T>
__device__ void reduce_projections(const ReduceArgs& args, int64_t first_item, int64_t stride) {
  __shared__ T sums[2 * kReduceStates][kReduceSteps + 1];
  const BackwardParams& params = args.params;
  const int slice_states = args.slice_states;
  const int64_t tile_stride = params.batch * params.groups * params.seqlen * 2 * slice_states;
  const int64_t step_blocks = ceil_div(params.seqlen, kReduceSteps);
  const int64_t state_blocks = ceil_div(params.dstate, kReduceStates);
  for (int64_t index = first_item; index < args.projection_items; index += stride) {
    const int64_t first_step = index % step_blocks * kReduceSteps;
    const int first_state = static_cast<int>(index / step_blocks % state_blocks) * kReduceStates;
    const int64_t sequence = index / (step_blocks * state_blocks);  // batch · groups + group
    // What a thread adds up, all tiles' values of several sums on their way at a time.
    constexpr int kSums = 2 * kReduceStates * kReduceSteps / kReduceThreads;
    const int n = threadIdx.x % kReduceStates;
    const int kind = threadIdx.x / kReduceStates % 2;
    const int first_t = threadIdx.x / (2 * kReduceStates);
    constexpr int kStride = kReduceThreads / (2 * kReduceStates);
    const T* source =
        static_cast<const T*>(args.workspace.projections) +
        first_state / slice_states * (args.geometry.round_tiles * tile_stride) +
        ((sequence * params.seqlen + first_step + first_t) * 2 + kind) * slice_states +
        first_state % slice_states + n;
    T sum[kSums] = {};
    if (first_state + n < params.dstate) {
#pragma unroll 4
      for (int64_t tile = 0; tile < args.geometry.round_tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          if (first_step + first_t + i * kStride < params.seqlen) {
            sum[i] += source[i * kStride * 2 * slice_states];
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

/// Two sorts of work: see sum_batches(), for the first `batch_blocks` blocks, and
/// reduce_projections().
template <class T>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_kernel(const __grid_constant__ ReduceArgs args, const __grid_constant__ BatchSums sums,
                  unsigned batch_blocks) {
  wait_for_primary();
  if (blockIdx.x >= batch_blocks) {
    reduce_projections<T>(args, blockIdx.x - batch_blocks, gridDim.x - batch_blocks);
    return;
  }
  for (int64_t index = blockIdx.x; index < sums.work_items(); index += batch_blocks) {
    sum_batches<T>(args.params, args.workspace, args.padded_states, sums, index);
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
  ReduceArgs args{params, geometry, padded_states, workspace, 0, padded_states / workspace.slices};
  if (workspace.projections != nullptr) {
    args.projection_items = params.batch * params.groups * ceil_div(params.seqlen, kReduceSteps) *
                            ceil_div(params.dstate, kReduceStates);
  }
  const BatchSums sums(params, workspace, geometry.segments * params.batch);
  constexpr int64_t kMostBlocks = 1 << 30;  // of either sort
  const auto blocks_for = [&](int64_t items) {
    return static_cast<unsigned>(items < kMostBlocks ? items : kMostBlocks);
  };
  const unsigned batch_blocks = blocks_for(sums.work_items());
  const unsigned projection_blocks = blocks_for(args.projection_items);
  // Its launch may overlap the end of the scan; the work begins when that is complete.
  const LaunchShape shape{batch_blocks + projection_blocks, kReduceThreads, 0, true};
  return launch_kernel(reduce_kernel<T>, shape, stream, args, sums, batch_blocks);
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
