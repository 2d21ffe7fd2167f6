// What a block's own channels are given in a layer besides weights of products and states: biases,
// D, the taps of the convolution and the steps that it keeps.
//
// One warp fetches them, a layer ahead of those that compute, converts them to float and puts them
// into one of two buffers in shared memory: [number][channel], numbers as ChannelInput tells.
// Threads that compute would wait for each of them, since nothing else is left to do in between.
#pragma once

#include "../kit/barriers.cuh"
#include "../kit/states.cuh"
#include "matrices.cuh"

namespace selective_scan::cuda::step {

/// An element of an array, or zero where there is no array.
struct Source {
  const void* data;
  DType dtype;
  int64_t index;

  __device__ __forceinline__ RawElement fetch() const {
    return data == nullptr ? RawElement() : RawElement(data, dtype, index);
  }
};

/// Where a number of a channel's inputs comes from.
__device__ __forceinline__ Source source_of(const StepParams& params, const StepLayer& layer,
                                            int number, int64_t channel) {
  if (number == kConvBias) return {layer.conv_bias, params.conv_bias_dtype, channel};
  if (number == kXBias) return {layer.in_bias, params.in_bias_dtype, channel};
  if (number == kZBias) return {layer.in_bias, params.in_bias_dtype, params.inner + channel};
  if (number == kDtBias) return {layer.dt_bias, params.dt_bias_dtype, channel};
  if (number == kD) return {layer.D, params.D_dtype, channel};
  const int width = static_cast<int>(params.width), tap = number - kFirstTap;
  if (tap < width) return {layer.conv, params.weight_dtype, channel * width + tap};
  const int kept = tap - width, entry = kept / (width - 1), step = kept % (width - 1);
  const ArrayView& view = params.conv_state;
  const int64_t slot = params.slot(entry);
  return {slot == StepParams::kNoSlot ? nullptr : layer.conv_state, view.dtype,
          slot * view.batch + channel * view.channel + step * view.step};
}

class ChannelInputs {
 public:
  __device__ __forceinline__ ChannelInputs(const StepArgs& args, Share channels)
      : args_(args), channels_(channels) {}

  /// One thread calls this, before the block's threads meet.
  __device__ __forceinline__ void initialize() const {
    for (int buffer = 0; buffer < kInputBuffers; ++buffer) {
      full(buffer).initialize();
      empty(buffer).initialize(kComputeThreads);
    }
    SharedBarrier::publish();
  }

  /// The inputs of a layer, by threads that compute. They are released in the layers' order.
  __device__ __forceinline__ const float* acquire(int layer) const {
    full(layer % kInputBuffers).wait(layer / kInputBuffers % 2);
    return buffer(layer);
  }
  __device__ __forceinline__ void release(int layer) const {
    empty(layer % kInputBuffers).signal();
  }

  /// By all lanes of the warp that fetches.
  __device__ __forceinline__ void fetch(int layer) const {
    constexpr int kBatch = 4;  // loads on their way at a time
    const int lane = threadIdx.x % kWarpSize;
    empty(layer % kInputBuffers).wait(layer / kInputBuffers % 2 ^ 1);
    float* const target = buffer(layer);
    const int count = buffer_size();
#pragma unroll 1
    for (int first = lane; first < count; first += kBatch * kWarpSize) {
      RawElement raw[kBatch];
      DType dtypes[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = first + i * kWarpSize;
        if (at >= count) break;
        const Source source = source_of(args_.params, args_.layers[layer], at / channels_.count,
                                        channels_.first + at % channels_.count);
        raw[i] = source.fetch();
        dtypes[i] = source.dtype;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = first + i * kWarpSize;
        if (at < count) target[at] = raw[i].value(dtypes[i]);
      }
    }
    full(layer % kInputBuffers).signal();
  }

 private:
  __device__ __forceinline__ int buffer_size() const {
    return args_.plan.channel_inputs * channels_.count;
  }
  __device__ __forceinline__ float* buffer(int layer) const {
    return reinterpret_cast<float*>(shared_memory() + args_.plan.shared.inputs) +
           layer % kInputBuffers * buffer_size();
  }
  __device__ __forceinline__ SharedBarrier full(int buffer) const {
    return SharedBarrier(shared_address(shared_memory() + args_.plan.shared.input_barriers) +
                         buffer * static_cast<uint32_t>(sizeof(BarrierState)));
  }
  __device__ __forceinline__ SharedBarrier empty(int buffer) const {
    return full(kInputBuffers + buffer);
  }

  const StepArgs& args_;
  Share channels_;
};

/// Asks for what threads that compute are going to read of a layer by themselves.
__device__ __forceinline__ void prefetch_states(const StepArgs& args, Share channels, int layer) {
  const StepParams& params = args.params;
  const StepLayer& own = args.layers[layer];
  const auto ask = [](const void* data, DType dtype, int64_t index) {
    const char* const element = static_cast<const char*>(data) + index * element_size(dtype);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(element));
  };
  constexpr int kFewStates = 16;  // elements that are one line, or nearly
  for (int i = threadIdx.x % kWarpSize; i < channels.count * params.batch; i += kWarpSize) {
    const int64_t entry = i / channels.count, channel = channels.first + i % channels.count;
    const int64_t slot = params.slot(entry);
    const ArrayView& state = params.state;
    for (int64_t n = 0; n < params.dstate; n += kFewStates) {
      if (entry == 0) ask(own.A_log, params.A_dtype, channel * params.dstate + n);
      if (slot == StepParams::kNoSlot) continue;
      ask(own.state, state.dtype, slot * state.batch + channel * state.channel + n * state.state);
    }
  }
}

/// What the warp that fetches inputs does.
__device__ __forceinline__ void fetch_inputs(const StepArgs& args, Share channels,
                                             const ChannelInputs& inputs) {
#pragma unroll 1
  for (int layer = 0; layer < static_cast<int>(args.params.layers); ++layer) {
    prefetch_states(args, channels, layer);
    inputs.fetch(layer);
  }
}

}  // namespace selective_scan::cuda::step
