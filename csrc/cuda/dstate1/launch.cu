// Launches of the dstate 1 kernels, and the sums that follow the backward kernel.
#include <cstdlib>

#include "../../core/method_table.h"
#include "../kit/dependent_launch.cuh"
#include "../kit/elements.cuh"
#include "../kit/launch_tools.h"
#include "kernels.h"

namespace selective_scan::cuda::dstate1 {
namespace {

Sequence make_sequence(const ArrayView& view) {
  if (!view.present()) return {};
  return {static_cast<char*>(view.data), view.batch * element_size(view.dtype)};
}

SequenceStrides make_strides(const ArrayView& view) {
  const int64_t size = element_size(view.dtype);
  return {view.dtype, view.channel * size, static_cast<int>(view.step * size),
          std::abs(view.channel) < std::abs(view.step)};
}

constexpr int kFinishThreads = 256;

/// dB and dC of one (batch, group, step): adds the tiles.
__device__ void finish_step(const BackwardArgs& args, int64_t index) {
  const BackwardParams& params = args.params;
  const int64_t steps = params.batch * params.groups * params.seqlen;
  float dB = 0.0f, dC = 0.0f;
#pragma unroll 4
  for (int64_t tile = 0; tile < args.tiles; ++tile) {
    const auto part = load_pack<float, 2>(args.workspace.dBC_partials + 2 * (tile * steps + index));
    dB += part.v[0];
    dC += part.v[1];
  }
  const int64_t sequence = index / params.seqlen;
  const auto store = [&](const ArrayView& view, float value) {
    store_component(view,
                    sequence / params.groups * view.batch + sequence % params.groups * view.group +
                        index % params.seqlen * view.step,
                    value);
  };
  if (params.variable_B) store(params.dB, dB);
  if (params.variable_C) store(params.dC, dC);
}

/// The sum of some numbers: of every lane's share, in fp64, since there may be very many.
__device__ float sum_of(const float* numbers, int64_t count) {
  double sum = 0;
  for (int64_t i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) sum += numbers[i];
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kFullMask, sum, distance);
  }
  return static_cast<float>(sum);
}

/// Gradients of one channel's parameters: a warp adds the batches.
__device__ void finish_channel(const BackwardArgs& args, int64_t channel) {
  const BackwardParams& params = args.params;
  const auto finish = [&](const float* sums, const ArrayView& view) {
    if (sums == nullptr) return;
    const float sum = sum_of(sums + channel * params.batch, params.batch);
    if (threadIdx.x % kWarpSize == 0) store_component(view, channel * view.channel, sum);
  };
  finish(args.workspace.dA, params.dA);
  finish(args.workspace.dD, params.dD);
  finish(args.workspace.ddelta_bias, params.ddelta_bias);
  finish(args.workspace.dB, params.dB);
  finish(args.workspace.dC, params.dC);
}

/// What follows the backward kernel: the first blocks take channels, a warp each; the others take
/// steps, a thread each.
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ BackwardArgs args, int64_t channel_blocks,
                  int64_t blocks) {
  constexpr int kWarps = kFinishThreads / kWarpSize;
  wait_for_primary();
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    if (block < channel_blocks) {
      const int64_t channel = block * kWarps + threadIdx.x / kWarpSize;
      if (channel < args.params.dim) finish_channel(args, channel);
    } else {
      const int64_t index = (block - channel_blocks) * kFinishThreads + threadIdx.x;
      const int64_t steps = args.params.batch * args.params.groups * args.params.seqlen;
      if (index < steps) finish_step(args, index);
    }
  }
}

cudaError_t finish(const BackwardArgs& args, cudaStream_t stream) {
  const BackwardParams& params = args.params;
  const int64_t channel_blocks = ceil_div(params.dim, kFinishThreads / kWarpSize);
  const int64_t steps =
      args.workspace.dBC_partials == nullptr ? 0 : params.batch * params.groups * params.seqlen;
  const int64_t blocks = channel_blocks + ceil_div(steps, kFinishThreads);
  constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();
  const LaunchShape shape{std::min(blocks, kMaxBlocks), kFinishThreads, 0, true};
  return launch_kernel(finish_kernel, shape, stream, args, channel_blocks, blocks);
}

struct Launches {
  cudaError_t (*forward)(const ForwardArgs&, const LaunchShape&, cudaStream_t);
  cudaError_t (*backward)(const BackwardArgs&, const LaunchShape&, cudaStream_t);
};

template <class Storage>
const Launches& launches_of(Method method) {
  static constexpr auto kTable = make_kernel_table<Launches>([&]<Method kMethod>() {
    using Instance = Kernels<kMethod, Storage>;
    return Launches{&Instance::forward, &Instance::backward};
  });
  return kTable[method];
}

/// See instantiations.py.
const Launches& launches_for(const ScanParams& params, bool has_vectors) {
  const DType dtype = params.u.dtype;
  if (!has_vectors) {
    return dtype == DType::kFloat32 ? launches_of<Scattered<4>>(params.method)
                                    : launches_of<Scattered<2>>(params.method);
  }
  return dtype == DType::kFloat32    ? launches_of<Vectors<float>>(params.method)
         : dtype == DType::kBFloat16 ? launches_of<Vectors<BFloat16>>(params.method)
                                     : launches_of<Vectors<Half>>(params.method);
}

/// What both passes are given.
template <class Args, class Params>
Args make_args(const Params& params) {
  Args args{};
  args.params = params;
  args.strides = make_strides(params.u);
  args.u = make_sequence(params.u);
  args.delta = make_sequence(params.delta);
  args.z = make_sequence(params.z);
  return args;
}

}  // namespace

cudaError_t run(const ForwardParams& params, const Dstate1ForwardPlan& plan, void*,
                cudaStream_t stream) {
  auto args = make_args<ForwardArgs>(params);
  args.out = make_sequence(params.out);
  args.windows = plan.windows;
  args.work_items = plan.work_items;
  return launches_for(params, plan.has_vectors).forward(args, plan.shape, stream);
}

cudaError_t run(const BackwardParams& params, const Dstate1BackwardPlan& plan, void* memory,
                cudaStream_t stream) {
  auto args = make_args<BackwardArgs>(params);
  args.dout = make_sequence(params.dout);
  args.du = make_sequence(params.du);
  args.ddelta = make_sequence(params.ddelta);
  args.dz = make_sequence(params.dz);
  args.warps = plan.warps;
  args.slots = plan.slots;
  args.tiles = plan.tiles;
  args.work_items = plan.work_items;
  const BackwardScratch& scratch = plan.scratch;
  args.workspace = {scratch.dBC_partials.in<float>(memory), scratch.dA.in<float>(memory),
                    scratch.dB.in<float>(memory),           scratch.dC.in<float>(memory),
                    scratch.dD.in<float>(memory),           scratch.ddelta_bias.in<float>(memory)};
  const cudaError_t error =
      launches_for(params, plan.has_vectors).backward(args, plan.shape, stream);
  return error != cudaSuccess ? error : finish(args, stream);
}

}  // namespace selective_scan::cuda::dstate1
