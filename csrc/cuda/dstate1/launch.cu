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
  return {view.channel * size, static_cast<int>(view.step * size),
          std::abs(view.channel) < std::abs(view.step)};
}

constexpr int kFinishThreads = 256;

/// dB and dC of one (batch, group, step): adds the tiles.
__device__ void finish_step(const BackwardArgs& args, int64_t index) {
  const BackwardParams& params = args.params;
  const int64_t sequences = params.batch * params.groups;
  const auto* source = reinterpret_cast<const float2*>(args.workspace.dBC_partials) + index;
  float2 sum{0.0f, 0.0f};
#pragma unroll 4
  for (int64_t tile = 0; tile < args.tiles; ++tile) {
    const float2 part = source[tile * sequences * params.seqlen];
    sum.x += part.x;
    sum.y += part.y;
  }
  const int64_t sequence = index / params.seqlen;
  const auto store = [&](const ArrayView& view, float value) {
    store_component(view,
                    sequence / params.groups * view.batch + sequence % params.groups * view.group +
                        index % params.seqlen * view.step,
                    value);
  };
  if (params.variable_B) store(params.dB, sum.x);
  if (params.variable_C) store(params.dC, sum.y);
}

/// Gradients of one channel's parameters: a warp adds the batches, in fp64, since there may be very
/// many.
__device__ void finish_channel(const BackwardArgs& args, int64_t channel) {
  const BackwardParams& params = args.params;
  const int lane = threadIdx.x % kWarpSize;
  const auto finish = [&](const float* sums, const ArrayView& view) {
    if (sums == nullptr) return;
    double sum = 0;
    for (int64_t batch = lane; batch < params.batch; batch += kWarpSize) {
      sum += sums[channel * params.batch + batch];
    }
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kFullMask, sum, distance);
    }
    if (lane == 0) store_component(view, channel * view.channel, static_cast<float>(sum));
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

const Launches& launches_for(const ScanParams& params, bool has_vectors) {
  const auto of_element = [&]<class Element>() -> const Launches& {
    return has_vectors ? launches_of<Vectors<Element>>(params.method)
                       : launches_of<Scattered<Element>>(params.method);
  };
  switch (params.u.dtype) {
    case DType::kBFloat16:
      return of_element.template operator()<BFloat16>();
    case DType::kFloat16:
      return of_element.template operator()<Half>();
    default:
      return of_element.template operator()<float>();
  }
}

}  // namespace

cudaError_t run(const ForwardParams& params, const Dstate1ForwardPlan& plan, void*,
                cudaStream_t stream) {
  ForwardArgs args{};
  args.params = params;
  args.strides = make_strides(params.u);
  args.u = make_sequence(params.u);
  args.delta = make_sequence(params.delta);
  args.z = make_sequence(params.z);
  args.out = make_sequence(params.out);
  args.windows = plan.windows;
  args.work_items = plan.work_items;
  return launches_for(params, plan.has_vectors).forward(args, plan.shape, stream);
}

cudaError_t run(const BackwardParams& params, const Dstate1BackwardPlan& plan, void* memory,
                cudaStream_t stream) {
  BackwardArgs args{};
  args.params = params;
  args.strides = make_strides(params.u);
  args.u = make_sequence(params.u);
  args.delta = make_sequence(params.delta);
  args.z = make_sequence(params.z);
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
                    scratch.dD.in<float>(memory),           scratch.ddelta_bias.in<float>(memory),
                    scratch.dB.in<float>(memory),           scratch.dC.in<float>(memory)};
  const cudaError_t error =
      launches_for(params, plan.has_vectors).backward(args, plan.shape, stream);
  return error != cudaSuccess ? error : finish(args, stream);
}

}  // namespace selective_scan::cuda::dstate1
