// The convolution for tensors in which neighboring channels are contiguous, as in a (batch, seqlen,
// dim) layout, and, one channel at a time, for tensors of any strides and types.
//
// A thread has a vector of channels and walks through some steps; neighboring lanes have
// neighboring vectors, and the block's other threads have the steps that follow. The earlier steps
// that a step depends on stay in registers. Steps are read in batches, one batch ahead. Inner
// batches, which neither begin nor end a thread's steps, contain no bounds checks: they are nearly
// all batches, and the first limit that memory meets is instruction issue. The steps before a
// thread's first one are read again, from L2. In the backward pass a thread goes width - 1 steps
// past its own, because dx needs the gradients of the sums there.
//
// Shared memory: the block's taps; in the backward pass also each thread's sums for dweight and
// dbias, which the block adds in a fixed order and stores to the workspace as one row of partial
// sums.
//
// Bound by memory: forward 2, backward 3 elements per step and channel, plus (width - 1) / steps
// times as many from L2. With elements of 2 bytes, the special-function unit (two instructions per
// element) and instruction issue (13 forward, 32 backward) take up to half of memory's time forward
// and three quarters backward.
#pragma once

#include "../kit/dependent_launch.cuh"
#include "../plan/conv.h"
#include "window.cuh"

namespace selective_scan::cuda::conv {

/// A vector of neighboring channels.
template <class Element, int kCount>
struct Vectors {
  static constexpr int kChannels = kCount;
  static constexpr int kWords = kCount;
  using Raw = Packed<Element, kCount>;

  static __device__ Raw load(const ArrayView&, const char* address) {
    return Raw::load(reinterpret_cast<const Element*>(address));
  }
  static __device__ void unpack(const Raw& raw, float (&values)[kCount]) { raw.unpack(values); }
  template <class R>
  static __device__ void store(const ArrayView&, char* address, const R (&values)[kCount]) {
    Pack<Element, kCount> pack;
#pragma unroll
    for (int c = 0; c < kCount; ++c) pack.v[c] = to_element<Element>(values[c]);
    store_pack(reinterpret_cast<Element*>(address), pack);
  }
};

/// A single channel, of any type.
template <class R>
struct Scalars {
  static constexpr int kChannels = 1;
  static constexpr int kWords = sizeof(R) / 4;
  using Raw = Pack<R, 1>;

  static __device__ Raw load(const ArrayView& array, const char* address) {
    return {load_element<R>(address, array.dtype, 0)};
  }
  static __device__ void unpack(const Raw& raw, R (&values)[1]) { values[0] = raw.v[0]; }
  static __device__ void store(const ArrayView& array, char* address, const R (&values)[1]) {
    store_element(address, array.dtype, 0, values[0]);
  }
};

/// The position of a thread.
template <class Storage>
struct ColumnPlace {
  static constexpr int kChannels = Storage::kChannels;
  int64_t batch;
  int64_t tile;
  int64_t block_channel;  // the block's first
  int64_t channel;        // the thread's first
  int64_t begin;          // the thread's steps; none if it has nothing to do
  int64_t end;
  int in_block;  // the thread's first channel, relative to the block's

  __device__ ColumnPlace(const ConvParams& params, const ColumnSplit& split) {
    const unsigned row = blockIdx.x / split.channel_blocks;
    batch = row / split.tiles;
    tile = row % split.tiles;
    block_channel = int64_t{blockIdx.x % split.channel_blocks} * (kChannels << split.lane_bits);
    in_block = (threadIdx.x & (split.lanes() - 1)) * kChannels;
    channel = block_channel + in_block;
    begin = tile * split.tile_steps() + int64_t{threadIdx.x >> split.lane_bits} * split.steps;
    end = begin + split.steps;
    if (end > params.seqlen) end = params.seqlen;
    if (channel >= params.dim) end = begin;
  }

  __device__ char* at(const ArrayView& array, int64_t step) const {
    const int64_t index = batch * array.batch + channel * array.channel + step * array.step;
    return static_cast<char*>(element_at(array, index));
  }
};

/// The taps of a block's channels, followed by the bias.
template <class R, int kTaps, int kChannels>
struct SharedTaps {
  __align__(16) R values[kTaps + 1][kWarpSize * kChannels];

  /// A barrier must follow.
  __device__ void load(const ConvParams& params, const ColumnSplit& split, int64_t first_channel) {
    const int count = kChannels << split.lane_bits;
    const int first = first_tap<kTaps>(params);
    for (int c = threadIdx.x; c < count; c += kColumnThreads) {
      if (first_channel + c >= params.dim) break;
      values[kTaps][c] = load_bias<R>(params, first_channel + c);
      R taps[kTaps];
      load_taps(params, first_channel + c, first, taps);
#pragma unroll
      for (int k = 0; k < kTaps; ++k) values[k][c] = taps[k];
    }
  }
};

/// The taps and biases of a thread's channels.
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

  /// Returns the sum before the activation, at the last of the kTaps steps from window[at] on.
  template <class Window>
  __device__ R sum(const Window& window, int at, int c) const {
    return add_products<kTaps>(
        bias[c], first, [&](int k) { return weight[k][c]; },
        [&](int k) { return window[at + k][c]; });
  }
  /// Returns dx of the first of the kTaps steps from window[at] on, which holds gradients of sums.
  template <class Window>
  __device__ R gradient(const Window& window, int at, int c) const {
    return add_products<kTaps>(
        R(0), first, [&](int k) { return weight[k][c]; },
        [&](int k) { return window[at + kTaps - 1 - k][c]; });
  }
};

/// Several steps of an array that are being loaded.
template <class Storage, int kSteps>
struct StepBatch {
  typename Storage::Raw raw[kSteps];

  /// Loads the next kSteps steps. The first `left` exist, the others become zeros.
  __device__ void load(const ArrayView& array, const char*& address, const int64_t& stride,
                       int left = kSteps) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      raw[i] = i < left ? Storage::load(array, address) : typename Storage::Raw{};
      address += stride;
    }
  }
  template <class R>
  __device__ void unpack(R (*rows)[Storage::kChannels]) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) Storage::unpack(raw[i], rows[i]);
  }
};

/// Loads the kTaps - 1 steps before `first`, from x or from the initial states.
template <class Storage, int kTaps, class R, int kRows, class Place>
__device__ __forceinline__ void load_history(const ConvParams& params, const Run& run,
                                             const Place& place, int64_t first, int64_t x_stride,
                                             R (&window)[kRows][Storage::kChannels]) {
  const int64_t begin = first - (kTaps - 1);
  if (begin >= run.begin) {
    const char* x = place.at(params.x, begin);
    StepBatch<Storage, kTaps - 1> before;
    before.load(params.x, x, x_stride);
    return before.unpack(window);
  }
#pragma unroll
  for (int i = 0; i + 1 < kTaps; ++i) {
    const int64_t step = begin + i;
    if (step >= run.begin) {
      Storage::unpack(Storage::load(params.x, place.at(params.x, step)), window[i]);
    } else {
#pragma unroll
      for (int c = 0; c < Storage::kChannels; ++c) {
        window[i][c] = R(0);
        if (!params.initial_states.present()) continue;
        window[i][c] = load_state<R>(params.initial_states, run.states, place.channel + c,
                                     step - run.begin + params.width - 1);
      }
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

/// Does what for_each_run() does, or with kIsWhole visits the one run of a batch entry directly.
template <bool kIsWhole, class Visit>
__device__ __forceinline__ void visit_runs(const ConvParams& params, int64_t batch, int64_t first,
                                           int64_t stop, int64_t limit, const Visit& visit) {
  if constexpr (kIsWhole) {
    if (first < stop) visit(Run{0, params.seqlen, batch, false}, first, stop);
  } else {
    for_each_run(params, batch, first, stop, limit, visit);
  }
}

/// kIsWhole: every batch entry is one run.
template <class R, class Storage, int kTaps, bool kIsWhole>
__global__ void __launch_bounds__(kColumnThreads,
                                  column_blocks(Storage::kWords, kTaps, false, kIsWhole))
    columns_forward(const __grid_constant__ ConvForwardParams params, ColumnSplit split) {
  constexpr int kChannels = Storage::kChannels;
  constexpr int kLast = kTaps - 1;
  __shared__ SharedTaps<R, kTaps, kChannels> shared;
  const ColumnPlace<Storage> place(params, split);
  StepBatch<Storage, kBatchSteps> xs;
  const char* x;
  const auto begin = [&](int64_t first, int64_t stop) {
    x = place.at(params.x, first);
    xs.load(params.x, x, split.x_stride, static_cast<int>(stop - first));
  };
  if (kIsWhole) begin(place.begin, place.end);  // in flight together with the taps
  shared.load(params, split, place.block_channel);
  __syncthreads();
  if (place.begin >= place.end) return;
  const ColumnTaps<R, Storage, kTaps> taps(shared, params, place.in_block);

  const auto walk = [&](const Run& run, int64_t first, int64_t stop) {
    if (run.is_padding) return store_zeros<R, Storage>(params.out, place, first, stop);
    if (!kIsWhole) begin(first, stop);
    R window[kLast + kBatchSteps][kChannels];
    load_history<Storage, kTaps>(params, run, place, first, split.x_stride, window);
    char* out = place.at(params.out, first);
    // is_inner: neither this batch nor the next is cut short.
    const auto do_batch = [&](int left, auto is_inner) {
      xs.unpack(window + kLast);
      xs.load(params.x, x, split.x_stride, is_inner ? kBatchSteps : left - kBatchSteps);
      R values[kBatchSteps][kChannels];
#pragma unroll
      for (int i = 0; i < kBatchSteps; ++i) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) values[i][c] = taps.sum(window, i, c);
      }
      activate(values, params.silu);
#pragma unroll
      for (int i = 0; i < kBatchSteps; ++i) {
        if (is_inner || i < left) Storage::store(params.out, out, values[i]);
        out += split.result_stride;
      }
      move_to_front<kTaps>(window);
    };
    int left = static_cast<int>(stop - first);
#pragma unroll 1
    for (; left >= 2 * kBatchSteps; left -= kBatchSteps) do_batch(left, std::true_type{});
#pragma unroll 1
    for (; left > 0; left -= kBatchSteps) do_batch(left, std::false_type{});
  };
  visit_runs<kIsWhole>(params, place.batch, place.begin, place.end, place.end, walk);
}

/// kIsWhole: every batch entry is one run, and final states have no gradient. Writes partial sums,
/// (batch, tile, tap, channel) with the bias after the last tap, to `parts`.
template <class R, class Storage, int kTaps, bool kIsWhole>
__global__ void __launch_bounds__(kColumnThreads,
                                  column_blocks(Storage::kWords, kTaps, true, kIsWhole))
    columns_backward(const __grid_constant__ ConvBackwardParams params, ColumnSplit split,
                     R* parts) {
  constexpr int kChannels = Storage::kChannels;
  constexpr int kLast = kTaps - 1;
  __shared__ SharedTaps<R, kTaps, kChannels> shared;
  __shared__ __align__(16) R sums[kTaps + 1][kColumnThreads * kChannels];
  const ColumnPlace<Storage> place(params, split);
  start_dependents();
  StepBatch<Storage, kBatchSteps> xs, douts;
  const char *x, *dout;
  const auto begin = [&](int64_t first, int all) {
    x = place.at(params.x, first);
    dout = place.at(params.dout, first);
    xs.load(params.x, x, split.x_stride, all);
    douts.load(params.dout, dout, split.dout_stride, params.dout.present() ? all : 0);
  };
  // Counts the thread's own steps from `first` on and the later steps of the run that it needs.
  const auto count_all = [](int64_t run_end, int64_t first, int64_t stop) {
    return static_cast<int>((run_end - stop < kLast ? run_end : stop + kLast) - first);
  };
  if (kIsWhole && place.begin < place.end) {  // in flight together with the taps
    begin(place.begin, count_all(params.seqlen, place.begin, place.end));
  }
  shared.load(params, split, place.block_channel);
  __syncthreads();
  const ColumnTaps<R, Storage, kTaps> taps(shared, params, place.in_block);
  Pack<R, kChannels> dtaps[kTaps + 1] = {};

  const auto walk = [&](const Run& run, int64_t first, int64_t stop) {
    if (run.is_padding) return store_zeros<R, Storage>(params.dx, place, first, stop);
    const int steps = static_cast<int>(stop - first);
    const int all = count_all(run.end, first, stop);
    if (!kIsWhole) begin(first, all);
    R window[kLast + kBatchSteps][kChannels], gradients[kLast + kBatchSteps][kChannels] = {};
    load_history<Storage, kTaps>(params, run, place, first, split.x_stride, window);
    char* dx = place.at(params.dx, first - kLast);

    // is_inner: this batch's steps, those whose dx it completes, and the next batch's are all the
    // thread's own.
    const auto do_batch = [&](int step, auto is_inner) {
      xs.unpack(window + kLast);
      douts.unpack(gradients + kLast);
      const int left = is_inner ? kBatchSteps : all - step - kBatchSteps;
      xs.load(params.x, x, split.x_stride, left);
      douts.load(params.dout, dout, split.dout_stride,
                 is_inner || params.dout.present() ? left : 0);
      R pre[kBatchSteps][kChannels];
#pragma unroll
      for (int i = 0; i < kBatchSteps; ++i) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) pre[i][c] = taps.sum(window, i, c);
      }
      differentiate(gradients + kLast, pre, params.silu);
#pragma unroll
      for (int i = 0; i < kBatchSteps; ++i) {
        const int now = step + i;
        R(&gradient)[kChannels] = gradients[kLast + i];
        if (!is_inner && now >= all) {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) gradient[c] = 0;
        }
        if (is_inner || now < steps) {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) {
#pragma unroll
            for (int k = 0; k < kTaps; ++k) {
              dtaps[k].v[c] = fma(gradient[c], window[i + k][c], dtaps[k].v[c]);
            }
            dtaps[kTaps].v[c] += gradient[c];
          }
        }
        if (is_inner || (now >= kLast && now < steps + kLast)) {
          R values[kChannels];
#pragma unroll
          for (int c = 0; c < kChannels; ++c) values[c] = taps.gradient(gradients, i, c);
          if (!kIsWhole && !is_inner && now >= all && params.dfinal_states.present()) {
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
    };
    const int last_inner = params.dout.present() ? steps - 2 * kBatchSteps : -1;
    int step = 0;
#pragma unroll 1
    while (step < steps + kLast) {
      do_batch(step, std::false_type{});
      step += kBatchSteps;
#pragma unroll 1
      for (; step >= kLast && step <= last_inner; step += kBatchSteps)
        do_batch(step, std::true_type{});
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
