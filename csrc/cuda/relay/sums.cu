// What follows the relay's backward kernel: the sums of the tiles' dB and dC and of the batches.
#include "../kit/batch_sums.cuh"
#include "../kit/dependent_launch.cuh"
#include "place.cuh"

namespace selective_scan::cuda::relay {
namespace {

constexpr int kReduceWarps = 8;
constexpr int kReduceSteps = 4;

/// The last blocks sum over batches. Each of the others adds kReduceSteps steps of one (batch,
/// group); a lane has one state of dB or dC, a warp every kReduceWarps-th tile, and what the warps
/// have is added in their order. Many short sums, so that the few steps of a short sequence keep
/// the device busy. Bound by latency.
__global__ void __launch_bounds__(kReduceWarps* kWarpSize)
    relay_reduce_kernel(const __grid_constant__ RelayBackwardArgs args, int64_t step_blocks,
                        const __grid_constant__ BatchSums batch_sums) {
  static_assert(kReduceWarps * kWarpSize == kReduceThreads);
  wait_for_primary();
  const BackwardParams& params = args.params;
  const int64_t first_of_batches = step_blocks * params.batch * params.groups;
  if (blockIdx.x >= first_of_batches) {
    sum_batches<float>(params, args.workspace, kPaddedStates, batch_sums,
                       blockIdx.x - first_of_batches);
    return;
  }
  __shared__ float sums[kReduceWarps][kReduceSteps][kWarpSize];
  static_assert(kWarpSize == 2 * kPaddedStates);
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int64_t first_step = blockIdx.x % step_blocks * kReduceSteps;
  const int64_t sequence = blockIdx.x / step_blocks;  // batch · groups + group
  const int64_t left = params.seqlen - first_step;
  const int steps = static_cast<int>(left < kReduceSteps ? left : kReduceSteps);
  const int64_t tile_stride = params.batch * params.groups * params.seqlen * kWarpSize;
  const float* const source = static_cast<const float*>(args.workspace.dBC_partials) +
                              (sequence * params.seqlen + first_step) * kWarpSize + lane;
  float sum[kReduceSteps] = {};
#pragma unroll 4
  for (int64_t tile = warp; tile < args.geometry.tiles; tile += kReduceWarps) {
#pragma unroll
    for (int t = 0; t < kReduceSteps; ++t) {
      if (t < steps) sum[t] += source[tile * tile_stride + t * kWarpSize];
    }
  }
#pragma unroll
  for (int t = 0; t < kReduceSteps; ++t) sums[warp][t][lane] = sum[t];
  __syncthreads();
  const int step = warp;
  const bool is_C = lane >= kPaddedStates;
  const int state = lane % kPaddedStates;
  if (step >= steps || state >= params.dstate) return;
  float total = 0;
#pragma unroll
  for (int w = 0; w < kReduceWarps; ++w) total += sums[w][step][lane];
  const ArrayView& view = is_C ? params.dC : params.dB;
  store_component(view,
                  sequence / params.groups * view.batch + sequence % params.groups * view.group +
                      state * view.state + (first_step + step) * view.step,
                  total);
}

}  // namespace

cudaError_t relay_reduce(const RelayBackwardArgs& args, cudaStream_t stream) {
  const BackwardParams& params = args.params;
  const int64_t step_blocks = ceil_div(params.seqlen, kReduceSteps);
  const BatchSums batch_sums(params, args.workspace, params.batch);
  const int64_t blocks = step_blocks * params.batch * params.groups + batch_sums.work_items();
  const LaunchShape shape{blocks, kReduceThreads, 0, true};
  return launch_kernel(relay_reduce_kernel, shape, stream, args, step_blocks, batch_sums);
}

}  // namespace selective_scan::cuda::relay
