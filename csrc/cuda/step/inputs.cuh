// The inputs of a block's own channels in a layer besides the products' weights and states: biases,
// D, the taps of the convolution and the steps that it keeps. Its rows of out_proj have inputs,
// too.
//
// One warp fetches them a layer ahead of the compute threads, converts them to float and stores
// them to one of two buffers in shared memory: [ChannelInput][channel], then [OutputInput][output].
// Compute threads would wait for each load, because they have nothing else to do meanwhile.
#pragma once

#include "../kit/barriers.cuh"
#include "../kit/states.cuh"
#include "matrices.cuh"

namespace selective_scan::cuda::step {

/// An element of an array, or zero if the array is absent.
struct Source {
  const void* data;
  DType dtype;
  int64_t index;

  __device__ __forceinline__ RawElement fetch() const {
    return data == nullptr ? RawElement() : RawElement(data, dtype, index);
  }
};

/// The norm before a layer, or after the last layer.
struct Norm {
  const void* weight;  // null: there is no norm, and the stream is multiplied as it is
  DType dtype;
};
__device__ __forceinline__ Norm norm_of(const StepArgs& args, int layer) {
  const StepParams& params = args.params;
  if (layer == params.layers) return {params.final_norm, params.final_norm_dtype};
  return {args.layers[layer].norm, params.norm_dtype};
}

/// Returns whether this norm exists. All layers are alike, so layer 0 is tested: a constant address
/// takes less time.
__device__ __forceinline__ bool has_norm(const StepArgs& args, int layer) {
  const bool is_last = layer == args.params.layers;
  return (is_last ? args.params.final_norm : args.layers[0].norm) != nullptr;
}

/// Returns the source of the channel's input with this number.
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

class BlockInputs {
 public:
  template <class W>
  __device__ __forceinline__ explicit BlockInputs(const BlockMatrices<W>& matrices)
      : args_(matrices.args), channels_(matrices.channels), outputs_(matrices.outputs) {}

  /// One thread calls this before the block's threads meet.
  __device__ __forceinline__ void initialize() const {
    for (int buffer = 0; buffer < kInputBuffers; ++buffer) {
      full(buffer).initialize();
      empty(buffer).initialize(kComputeThreads);
    }
    SharedBarrier::publish();
  }

  /// Waits for a layer's inputs and returns those of channels. Compute threads call this, and
  /// release the layers in order.
  __device__ __forceinline__ const float* acquire(int layer) const {
    full(layer % kInputBuffers).wait(layer / kInputBuffers % 2);
    return buffer(layer);
  }
  /// Does the same for the inputs of outputs.
  __device__ __forceinline__ const float* acquire_outputs(int layer) const {
    return acquire(layer) + channel_numbers();
  }
  __device__ __forceinline__ void release(int layer) const {
    empty(layer % kInputBuffers).signal();
  }

  /// Fetches a layer's inputs. All lanes of the fetching warp call this.
  __device__ __forceinline__ void fetch(int layer) const {
    constexpr int kBatch = 4;  // loads in flight at a time
    const int lane = threadIdx.x % kWarpSize;
    empty(layer % kInputBuffers).wait(layer / kInputBuffers % 2 ^ 1);
    float* const target = buffer(layer);
    const int count = numbers();
#pragma unroll 1
    for (int first = lane; first < count; first += kBatch * kWarpSize) {
      RawElement raw[kBatch];
      DType dtypes[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = first + i * kWarpSize;
        if (at >= count) break;
        const Source source = source_at(layer, at);
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
  __device__ __forceinline__ int channel_numbers() const {
    return args_.plan.channel_inputs * channels_.count;
  }
  __device__ __forceinline__ int numbers() const {
    return channel_numbers() + kOutputInputs * outputs_.count;
  }
  __device__ __forceinline__ Source source_at(int layer, int at) const {
    const StepParams& params = args_.params;
    const StepLayer& own = args_.layers[layer];
    if (at < channel_numbers()) {
      return source_of(params, own, at / channels_.count, channels_.first + at % channels_.count);
    }
    const int number = (at - channel_numbers()) / outputs_.count;
    const int output = outputs_.first + (at - channel_numbers()) % outputs_.count;
    if (number == kOutBias) return {own.out_bias, params.out_bias_dtype, output};
    const Norm norm = norm_of(args_, layer + 1);
    return {norm.weight, norm.dtype, output};
  }
  __device__ __forceinline__ float* buffer(int layer) const {
    return reinterpret_cast<float*>(shared_memory() + args_.plan.shared.inputs) +
           layer % kInputBuffers * numbers();
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
  Share outputs_;
};

/// Prefetches the data of a layer that compute threads load themselves.
__device__ __forceinline__ void prefetch_states(const StepArgs& args, Share channels, int layer) {
  const StepParams& params = args.params;
  const StepLayer& own = args.layers[layer];
  const auto ask = [](const void* data, DType dtype, int64_t index) {
    const char* const element = static_cast<const char*>(data) + index * element_size(dtype);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(element));
  };
  constexpr int kFewStates = 16;  // elements of one cache line, or nearly
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

/// Runs the warp that fetches inputs.
__device__ __forceinline__ void fetch_inputs(const StepArgs& args, Share channels,
                                             const BlockInputs& inputs) {
#pragma unroll 1
  for (int layer = 0; layer < static_cast<int>(args.params.layers); ++layer) {
    prefetch_states(args, channels, layer);
    inputs.fetch(layer);
  }
}

}  // namespace selective_scan::cuda::step
