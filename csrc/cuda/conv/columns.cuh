// The convolution where neighbouring channels are neighbours in memory, as in a (batch, seqlen,
// dim) layout, and of tensors of any strides and types, a channel at a time.
//
// A thread has a vector of channels and walks some steps; neighbouring lanes have neighbouring
// vectors, and the block's other threads the steps behind. What a step sees of those before it
// stays in registers. Steps are read in batches, and other warps compute while one waits for its
// batch: so vectors are short, and registers few. The steps before a thread's first are read again,
// from L2; backwards a thread goes width - 1 steps further than its own, since dx needs the
// gradient of the sum there.
//
// Shared memory: the block's taps; backwards also each thread's sums for dweight and dbias, which
// the block adds in a fixed order and leaves in the workspace as one row of partial sums.
//
// Bound by memory: forward 2, backward 3 elements a step and channel, beside (width - 1) / steps of
// that from L2. With elements of 2 bytes the special-function unit, two instructions an element,
// and the issue of instructions, 13 and 25, take about half as long as memory each.
#pragma once

#include "../plan/conv.h"
#include "window.cuh"

namespace selective_scan::cuda::conv {

/// Vectors of neighbouring channels.
template <class Element, int kCount>
struct Vectors {
  static constexpr int kChannels = kCount;
  static constexpr int kWords = kCount;
  static constexpr int kBytes = sizeof(Element);
  using Raw = Packed<Element, kCount>;

  static __device__ Raw load(const ArrayView&, const char* address) {
    return Raw::load(reinterpret_cast<const Element*>(address));
  }
  static __device__ void unpack(const Raw& raw, float (&values)[kCount]) { raw.unpack(values); }
  template <class R>
  static __device__ void store(const ArrayView&, char* address, const R (&values)[kCount]) {
    Pack<Element, kCount> pack;
#pragma unroll
    for (int c = 0; c < kCount; ++c) pack.v[c] = from_real<Element>(values[c]);
    store_pack(reinterpret_cast<Element*>(address), pack);
  }
};

/// One channel, of any type.
template <class R>
struct Scalars {
  static constexpr int kChannels = 1;
  static constexpr int kWords = sizeof(R) / 4;
  static constexpr int kBytes = sizeof(R);
  using Raw = Pack<R, 1>;

  static __device__ Raw load(const ArrayView& array, const char* address) {
    return {load_element<R>(address, array.dtype, 0)};
  }
  static __device__ void unpack(const Raw& raw, R (&values)[1]) { values[0] = raw.v[0]; }
  static __device__ void store(const ArrayView& array, char* address, const R (&values)[1]) {
    store_element(address, array.dtype, 0, values[0]);
  }
};

/// Where a thread stands.
template <class Storage>
struct ColumnPlace {
  static constexpr int kChannels = Storage::kChannels;
  int64_t batch;
  int64_t tile;
  int64_t block_channel;  // the block's first
  int64_t channel;        // the thread's first
  int64_t begin;          // steps; none where the thread has nothing to do
  int64_t end;
  int in_block;  // the thread's first channel, from the block's

  __device__ ColumnPlace(const ConvParams& params, const ColumnSplit& split) {
    const int64_t row = blockIdx.x / split.channel_blocks;
    batch = row / split.tiles;
    tile = row - batch * split.tiles;
    block_channel = (blockIdx.x - row * split.channel_blocks) * (kChannels << split.lane_bits);
    in_block = (threadIdx.x & (split.lanes() - 1)) * kChannels;
    channel = block_channel + in_block;
    begin = tile * split.tile_steps() + int64_t{threadIdx.x >> split.lane_bits} * split.steps;
    end = begin + split.steps;
    if (end > params.seqlen) end = params.seqlen;
    if (channel >= params.dim) end = begin;
  }

  __device__ char* at(const ArrayView& array, int64_t step) const {
    const int64_t index = batch * array.batch + channel * array.channel + step * array.step;
    return static_cast<char*>(array.data) + index * element_size(array.dtype);
  }
};

/// The taps of a block's channels, and behind them the bias.
template <class R, int kTaps, int kChannels>
struct SharedTaps {
  __align__(16) R values[kTaps + 1][kWarpSize * kChannels];

  /// To be followed by a barrier.
  __device__ void load(const ConvParams& params, const ColumnSplit& split, int64_t first_channel) {
    const int count = (kTaps + 1) * (kChannels << split.lane_bits);
    const int first = first_tap<kTaps>(params);
    for (int i = threadIdx.x; i < count; i += kColumnThreads) {
      const int c = i / (kTaps + 1);
      const int k = i % (kTaps + 1);
      const int64_t channel = first_channel + c;
      R value = 0;
      if (channel < params.dim) {
        if (k == kTaps) value = load_bias<R>(params, channel);
        if (k >= first && k < kTaps) value = load_tap<R>(params, channel, k - first);
      }
      values[k][c] = value;
    }
  }
};

/// What a thread knows of its channels.
template <class R, class Storage, int kTaps>
struct ColumnTaps {
  static constexpr int kChannels = Storage::kChannels;
  R weight[kTaps][kChannels];
  R bias[kChannels];
  int first;

  __device__ ColumnTaps(const SharedTaps<R, kTaps, kChannels>& shared, const ConvParams& params,
                        int in_block)
      : first(first_tap<kTaps>(params)) {
#pragma unroll
    for (int k = 0; k <= kTaps; ++k) {
      const auto pack = load_pack<R, kChannels>(&shared.values[k][in_block]);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) (k < kTaps ? weight[k][c] : bias[c]) = pack.v[c];
    }
  }

  /// Before the activation, of the step at the end of the kTaps that begin at `window`.
  template <class Window>
  __device__ R sum(const Window& window, int at, int c) const {
    return add_products<kTaps>(
        bias[c], first, [&](int k) { return weight[k][c]; },
        [&](int k) { return window[at + k][c]; });
  }
  /// dx of the step with which the kTaps that begin at `window` begin.
  template <class Window>
  __device__ R gradient(const Window& window, int at, int c) const {
    return add_products<kTaps>(
        R(0), first, [&](int k) { return weight[k][c]; },
        [&](int k) { return window[at + kTaps - 1 - k][c]; });
  }
};

/// x at the kTaps - 1 steps before `first`.
template <class Storage, int kTaps, class R, int kRows, class Place>
__device__ __forceinline__ void load_history(const ConvParams& params, const Run& run,
                                             const Place& place, int64_t first,
                                             R (&window)[kRows][Storage::kChannels]) {
#pragma unroll
  for (int i = 0; i + 1 < kTaps; ++i) {
    const int64_t step = first - (kTaps - 1) + i;
    if (step >= run.begin) {
      Storage::unpack(Storage::load(params.x, place.at(params.x, step)), window[i]);
    } else if (params.initial_states.present()) {
#pragma unroll
      for (int c = 0; c < Storage::kChannels; ++c) {
        window[i][c] = load_state<R>(params.initial_states, run.states, place.channel + c,
                                     step - run.begin + params.width - 1);
      }
    } else {
#pragma unroll
      for (int c = 0; c < Storage::kChannels; ++c) window[i][c] = R(0);
    }
  }
}

/// Moves the last kTaps - 1 rows to the front.
template <int kTaps, class R, int kRows, int kChannels>
__device__ __forceinline__ void move_to_front(R (&window)[kRows][kChannels]) {
#pragma unroll
  for (int i = 0; i + 1 < kTaps; ++i) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) window[i][c] = window[kRows - (kTaps - 1) + i][c];
  }
}

template <class R, class Storage, class Place>
__device__ void store_zeros(const ArrayView& array, const Place& place, int64_t first,
                            int64_t stop) {
  const R zeros[Storage::kChannels] = {};
#pragma unroll 1
  for (int64_t step = first; step < stop; ++step) {
    Storage::store(array, place.at(array, step), zeros);
  }
}

/// The next steps of an array, of which `left` are there; zeros behind them.
template <class Storage, int kSteps>
struct StepBatch {
  typename Storage::Raw raw[kSteps];

  __device__ void load(const ArrayView& array, const char*& address, const int64_t& stride,
                       int left) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      raw[i] = i < left ? Storage::load(array, address) : typename Storage::Raw{};
      address += stride;
    }
  }
};

/// As for_each_run(), or, of a kernel for batch entries that are a run each, that one.
template <bool kIsWhole, class Visit>
__device__ __forceinline__ void visit_runs(const ConvParams& params, int64_t batch, int64_t first,
                                           int64_t stop, int64_t limit, const Visit& visit) {
  if constexpr (kIsWhole) {
    if (first < stop) visit(Run{0, params.seqlen, batch, false}, first, stop);
  } else {
    for_each_run(params, batch, first, stop, limit, visit);
  }
}

/// kIsWhole: every batch entry is a run.
template <class R, class Storage, int kTaps, bool kIsWhole>
__global__ void __launch_bounds__(kColumnThreads,
                                  column_blocks(Storage::kWords, kTaps, false, kIsWhole))
    columns_forward(const __grid_constant__ ConvForwardParams params, ColumnSplit split) {
  constexpr int kChannels = Storage::kChannels;
  constexpr int kBatch = batch_steps(Storage::kBytes, false);
  __shared__ SharedTaps<R, kTaps, kChannels> shared;
  const ColumnPlace<Storage> place(params, split);
  shared.load(params, split, place.block_channel);
  __syncthreads();
  if (place.begin >= place.end) return;
  const ColumnTaps<R, Storage, kTaps> taps(shared, params, place.in_block);

  const auto walk = [&](const Run& run, int64_t first, int64_t stop) {
    if (run.is_padding) return store_zeros<R, Storage>(params.out, place, first, stop);
    R window[kTaps - 1 + kBatch][kChannels];
    load_history<Storage, kTaps>(params, run, place, first, window);
    const int steps = static_cast<int>(stop - first);
    const char* x = place.at(params.x, first);
    char* out = place.at(params.out, first);
#pragma unroll 1
    for (int step = 0; step < steps; step += kBatch) {
      StepBatch<Storage, kBatch> xs;
      xs.load(params.x, x, split.x_stride, steps - step);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        R values[kChannels];
        Storage::unpack(xs.raw[i], window[kTaps - 1 + i]);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) values[c] = taps.sum(window, i, c);
        activate(values, params.silu);
        if (step + i < steps) Storage::store(params.out, out, values);
        out += split.result_stride;
      }
      move_to_front<kTaps>(window);
    }
  };
  visit_runs<kIsWhole>(params, place.batch, place.begin, place.end, place.end, walk);
}

/// kIsWhole: every batch entry is a run, and final states have no gradient.
/// Writes (batch, tile, tap, channel) to `parts`, the bias behind the last tap.
template <class R, class Storage, int kTaps, bool kIsWhole>
__global__ void __launch_bounds__(kColumnThreads,
                                  column_blocks(Storage::kWords, kTaps, true, kIsWhole))
    columns_backward(const __grid_constant__ ConvBackwardParams params, ColumnSplit split,
                     R* parts) {
  constexpr int kChannels = Storage::kChannels;
  constexpr int kBatch = batch_steps(Storage::kBytes, true);
  constexpr int kLast = kTaps - 1;
  __shared__ SharedTaps<R, kTaps, kChannels> shared;
  __shared__ __align__(16) R sums[kTaps + 1][kColumnThreads * kChannels];
  const ColumnPlace<Storage> place(params, split);
  shared.load(params, split, place.block_channel);
  __syncthreads();
  const ColumnTaps<R, Storage, kTaps> taps(shared, params, place.in_block);
  Pack<R, kChannels> dtaps[kTaps + 1] = {};

  const auto walk = [&](const Run& run, int64_t first, int64_t stop) {
    if (run.is_padding) return store_zeros<R, Storage>(params.dx, place, first, stop);
    R window[kLast + kBatch][kChannels], gradients[kLast + kBatch][kChannels] = {};
    load_history<Storage, kTaps>(params, run, place, first, window);
    // The thread's own steps, and those before the run's end that it needs.
    const int steps = static_cast<int>(stop - first);
    const int all = run.end - stop < kLast ? static_cast<int>(run.end - first) : steps + kLast;
    const int all_douts = params.dout.present() ? all : 0;
    const char* x = place.at(params.x, first);
    const char* dout = place.at(params.dout, first);
    char* dx = place.at(params.dx, first - kLast);
#pragma unroll 1
    for (int step = 0; step < steps + kLast; step += kBatch) {
      StepBatch<Storage, kBatch> xs, douts;
      xs.load(params.x, x, split.x_stride, all - step);
      douts.load(params.dout, dout, split.dout_stride, all_douts - step);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int now = step + i;
        R values[kChannels];
        R(&gradient)[kChannels] = gradients[kLast + i];
        Storage::unpack(xs.raw[i], window[kLast + i]);
        Storage::unpack(douts.raw[i], gradient);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) values[c] = taps.sum(window, i, c);
        differentiate(gradient, values, params.silu);
        if (now >= all) {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) gradient[c] = 0;
        }
        if (now < steps) {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) {
#pragma unroll
            for (int k = 0; k < kTaps; ++k) {
              dtaps[k].v[c] = fma(gradient[c], window[i + k][c], dtaps[k].v[c]);
            }
            dtaps[kTaps].v[c] += gradient[c];
          }
        }
        if (now >= kLast && now < steps + kLast) {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) values[c] = taps.gradient(gradients, i, c);
          if (!kIsWhole && now >= all && params.dfinal_states.present()) {
#pragma unroll
            for (int c = 0; c < kChannels; ++c) {
              values[c] +=
                  final_gradient_at<R>(params, place.batch, place.channel + c, first + now - kLast);
            }
          }
          Storage::store(params.dx, dx, values);
        }
        dx += split.result_stride;
      }
      move_to_front<kTaps>(window);
      move_to_front<kTaps>(gradients);
    }
  };
  const int64_t seen = place.end + kLast;
  visit_runs<kIsWhole>(params, place.batch, place.begin, place.end,
                       seen < params.seqlen ? seen : params.seqlen, walk);

#pragma unroll
  for (int k = 0; k <= kTaps; ++k) store_pack(&sums[k][threadIdx.x * kChannels], dtaps[k]);
  __syncthreads();
  const int channels = kChannels << split.lane_bits;
  const int first = first_tap<kTaps>(params);
  R* row = parts + (place.batch * split.tiles + place.tile) * (params.width + 1) * params.dim;
  for (int i = threadIdx.x; i < (kTaps + 1 - first) * channels; i += kColumnThreads) {
    const int k = i / channels;
    const int c = i % channels;
    if (place.block_channel + c >= params.dim) continue;
    R sum = 0;
    for (int other = c; other < kColumnThreads * kChannels; other += channels) {
      sum += sums[first + k][other];
    }
    row[k * params.dim + place.block_channel + c] = sum;
  }
}

}  // namespace selective_scan::cuda::conv
