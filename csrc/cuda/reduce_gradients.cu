// The last step of the backward pass: adds the scan's partial sums in a fixed order.
#include "scan_common.cuh"
#include "scan.h"

namespace selective_scan::cuda {
namespace {

struct ReduceArgs {
  BackwardParams params;
  int64_t tiles;
  int padded_states;
  BackwardWorkspace workspace;
};

constexpr int kReduceThreads = 256;
constexpr int kReduceSteps = 32;   // of one block of reduce_projections
constexpr int kReduceStates = 16;  // likewise

/// dB and dC: adds the tiles. A block takes kReduceSteps steps and kReduceStates states of one
/// (batch, group); it reads along states and writes along steps, through shared memory.
/// Bound by memory.
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
    for (int i = threadIdx.x; i < 2 * kReduceStates * kReduceSteps; i += kReduceThreads) {
      const int n = i % kReduceStates;
      const int kind = i / kReduceStates % 2;
      const int t = i / (2 * kReduceStates);
      T sum{};
      if (first_step + t < params.seqlen && first_state + n < params.dstate) {
        const T* source = static_cast<const T*>(args.workspace.projections) +
                          ((sequence * params.seqlen + first_step + t) * 2 + kind) * padded +
                          first_state + n;
#pragma unroll 4
        for (int64_t tile = 0; tile < args.tiles; ++tile) sum += source[tile * tile_stride];
      }
      sums[kind * kReduceStates + n][t] = sum;
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
                            sequence % params.groups * view.group +
                            (first_state + n) * view.state + (first_step + t) * view.step,
                        sums[kind * kReduceStates + n][t]);
      }
    }
    __syncthreads();
  }
}

template <class T>
__device__ T sum_over_batch(const void* partial, const BackwardParams& params, int64_t row_length,
                            int64_t offset) {
  const T* source = static_cast<const T*>(partial) + offset;
  T sum{};
#pragma unroll 4
  for (int64_t b = 0; b < params.batch; ++b) sum += source[b * params.dim * row_length];
  return sum;
}

/// dA, dD, ddelta_bias and the gradients of constant B and C: adds the batches. A thread takes one
/// (channel, state).
template <class T>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_batches(const __grid_constant__ ReduceArgs args) {
  using R = real_t<T>;
  const BackwardParams& params = args.params;
  const BackwardWorkspace& workspace = args.workspace;
  const int64_t count = params.dim * params.dstate;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kReduceThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kReduceThreads + threadIdx.x; i < count;
       i += threads) {
    const int64_t channel = i / params.dstate;
    const int64_t state = i % params.dstate;
    const int64_t offset = channel * args.padded_states + state;
    const auto reduce = [&](const void* partial, const ArrayView& view) {
      if (partial == nullptr) return;
      store_component(view, channel * view.channel + state * view.state,
                      sum_over_batch<T>(partial, params, args.padded_states, offset));
    };
    reduce(workspace.dA, params.dA);
    reduce(workspace.dB, params.dB);
    reduce(workspace.dC, params.dC);
    const auto reduce_channel = [&](const void* partial, const ArrayView& view) {
      if (partial == nullptr) return;
      store_component(view, channel * view.channel, sum_over_batch<R>(partial, params, 1, channel));
    };
    if (state == 0) {
      reduce_channel(workspace.dD, params.dD);
      reduce_channel(workspace.ddelta_bias, params.ddelta_bias);
    }
  }
}

}  // namespace

template <class T>
cudaError_t reduce_gradients(const BackwardParams& params, const Geometry& geometry,
                             int padded_states, const BackwardWorkspace& workspace,
                             cudaStream_t stream) {
  const ReduceArgs args{params, geometry.tiles, padded_states, workspace};
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
  const int64_t blocks = blocks_of(params.dim * params.dstate, kReduceThreads);
  reduce_batches<T><<<grid_blocks(blocks), kReduceThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template cudaError_t reduce_gradients<float>(const BackwardParams&, const Geometry&, int,
                                             const BackwardWorkspace&, cudaStream_t);
template cudaError_t reduce_gradients<double>(const BackwardParams&, const Geometry&, int,
                                              const BackwardWorkspace&, cudaStream_t);
template cudaError_t reduce_gradients<Complex<float>>(const BackwardParams&, const Geometry&, int,
                                                      const BackwardWorkspace&, cudaStream_t);
template cudaError_t reduce_gradients<Complex<double>>(const BackwardParams&, const Geometry&, int,
                                                       const BackwardWorkspace&, cudaStream_t);

}  // namespace selective_scan::cuda
