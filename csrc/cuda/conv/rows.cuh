// The convolution for rows, one per (batch, channel), in which neighboring steps are contiguous.
//
// A lane has a vector of steps, neighboring lanes have neighboring vectors, and some or all lanes
// of a warp walk through a segment of a row together, with loads one or two rounds ahead. A row may
// begin anywhere in memory: its first vector may begin before it, so that all vectors are aligned.
// A lane reads the steps before its vector from memory too; the neighboring lane loads the same
// line anyway. In the backward pass dx needs the gradients of the sums at later steps, which come
// from the next lane. Rounds go from the last to the first, so that the last lane has them from the
// previous round. The lanes' sums for dweight and dbias are added by shuffles and stored to the
// workspace as one row of partial sums per segment.
//
// No shared memory. Bound by memory: forward 2, backward 3 elements per step and channel. Calls
// with states or several runs decide more in every vector, so they have a separate loop.
#pragma once

#include "../kit/dependent_launch.cuh"
#include "../plan/conv.h"
#include "window.cuh"

namespace selective_scan::cuda::conv {

template <class Element, int kTaps>
constexpr int kRowVector = row_vector(kTaps, sizeof(Element));

/// A lane's part of a row.
template <class Element, int kTaps>
struct RowPlace {
  static constexpr int kSteps = kRowVector<Element, kTaps>;

  int lane;
  bool exists;  // if not, the lane repeats the last segment and writes nothing
  int64_t row;
  int64_t batch;
  int64_t channel;
  int segment;
  int origin;  // the segment's first step, aligned: it may lie before the row

  __device__ RowPlace(const ConvParams& params, const RowSplit& split) {
    const int64_t thread = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
    lane = static_cast<int>(thread) & (split.lanes() - 1);
    int64_t index = thread >> split.lane_bits;
    const int64_t count = params.batch * params.dim * split.segments;
    exists = index < count;
    if (!exists) index = count - 1;
    row = index / split.segments;
    segment = static_cast<int>(index - row * split.segments);
    batch = row / params.dim;
    channel = row - batch * params.dim;
    const auto address =
        reinterpret_cast<uintptr_t>(data<const Element>(params.x)) / sizeof(Element);
    origin = segment * split.rounds * round_steps(split) - static_cast<int>(address % kSteps);
  }

  static __device__ int round_steps(const RowSplit& split) { return kSteps << split.lane_bits; }
  /// Returns the first step of the lane's vector.
  __device__ int first_of_round(const RowSplit& split, int round) const {
    return origin + round * round_steps(split) + lane * kSteps;
  }
  /// The vector at `first` holds the steps [from_of(first), to_of(first)) of the row.
  static __device__ int from_of(int first) { return max(first, 0); }
  static __device__ int to_of(const ConvParams& params, int first) {
    return min(first + kSteps, static_cast<int>(params.seqlen));
  }
  template <class T>
  __device__ T* data(const ArrayView& array) const {
    return static_cast<T*>(array.data) + batch * array.batch + channel * array.channel;
  }
};

/// Loads kCount elements of a row from `first` on. Elements outside the row become zero.
template <int kCount, class Element>
__device__ __forceinline__ Packed<Element, kCount> load_steps(const Element* row, int first,
                                                              int seqlen) {
  if (first >= 0 && first + kCount <= seqlen) return Packed<Element, kCount>::load(row + first);
  Pack<Element, kCount> pack{};
  if (first > -kCount && first < seqlen) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (first + i >= 0 && first + i < seqlen) pack.v[i] = row[first + i];
    }
  }
  return bit_cast<Packed<Element, kCount>>(pack);
}

/// Stores the steps [from, to) of the vector at `first`.
template <class Element, int kSteps>
__device__ __forceinline__ void store_steps(Element* row, int first, int from, int to,
                                            const float (&values)[kSteps]) {
  Pack<Element, kSteps> pack;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) pack.v[i] = to_element<Element>(values[i]);
  if (from == first && to == first + kSteps) {
    store_pack(row + first, pack);
  } else {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (first + i >= from && first + i < to) row[first + i] = pack.v[i];
    }
  }
}

/// A vector of x and the steps before it that it depends on.
template <class Element, int kTaps>
struct RowInputs {
  static constexpr int kSteps = kRowVector<Element, kTaps>;
  static constexpr int kBefore = kTaps == kCommonWidth ? 4 : 8;
  Packed<Element, kBefore> before;
  Packed<Element, kSteps> own;

  __device__ void load(const Element* row, int first, int seqlen) {
    before = load_steps<kBefore>(row, first - kBefore, seqlen);
    own = load_steps<kSteps>(row, first, seqlen);
  }

  __device__ void unpack(float (&window)[kTaps - 1 + kSteps]) const {
    float earlier[kBefore], later[kSteps];
    before.unpack(earlier);
    own.unpack(later);
#pragma unroll
    for (int i = 0; i < kTaps - 1 + kSteps; ++i) {
      const int at = i - (kTaps - 1);
      window[i] = at < 0 ? earlier[kBefore + at] : later[at];
    }
  }
};

/// Gathers the x that the steps of `run` in the vector at `first` depend on, initial states
/// included.
template <class Element, int kTaps, int kSeen>
__device__ __forceinline__ void make_window(const ConvParams& params, const Run& run, int64_t batch,
                                            int64_t channel, int first,
                                            const RowInputs<Element, kTaps>& inputs,
                                            float (&window)[kSeen]) {
  inputs.unpack(window);
  const int begin = first - (kTaps - 1);
#pragma unroll
  for (int i = 0; i < kSeen; ++i) {
    if (begin + i >= run.begin) continue;
    window[i] = load_state<float>(params.initial_states, run.states, channel,
                                  begin + i - run.begin + params.width - 1);
  }
}

template <int kTaps>
struct RowTaps {
  float weight[kTaps];
  float bias;
  int first;

  __device__ RowTaps(const ConvParams& params, int64_t channel)
      : bias(load_bias<float>(params, channel)), first(first_tap<kTaps>(params)) {
    load_taps(params, channel, first, weight);
  }

  /// Computes the sums before the activation.
  template <int kSteps, int kSeen>
  __device__ void convolve(const float (&window)[kSeen], float (&sums)[kSteps]) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      sums[i] = add_products<kTaps>(
          bias, first, [&](int k) { return weight[k]; }, [&](int k) { return window[i + k]; });
    }
  }
  /// Computes dx from the gradients of the sums at these steps and at the kTaps - 1 after them.
  template <int kSteps, int kSeen>
  __device__ void gather(const float (&gradients)[kSeen], float (&dx)[kSteps]) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      dx[i] = add_products<kTaps>(
          0.0f, first, [&](int k) { return weight[k]; },
          [&](int k) { return gradients[i + kTaps - 1 - k]; });
    }
  }
};

/// Convolves a vector whose steps may depend on states or belong to several runs.
template <class Element, int kTaps, class Place>
__device__ __forceinline__ void convolve_runs(const ConvForwardParams& params, const Place& place,
                                              const RowTaps<kTaps>& taps,
                                              const RowInputs<Element, kTaps>& inputs, int first,
                                              Element* out) {
  constexpr int kSteps = Place::kSteps;
  constexpr int kSeen = kTaps - 1 + kSteps;
  const auto convolve = [&](const Run& run, int from, int to) {
    float window[kSeen], values[kSteps] = {};
    if (!run.is_padding) {
      make_window(params, run, place.batch, place.channel, first, inputs, window);
      taps.convolve(window, values);
      activate(values, params.silu);
    }
    store_steps(out, first, from, to, values);
  };
  const int to = Place::to_of(params, first);
  for_each_run(params, place.batch, Place::from_of(first), to, to, convolve);
}

/// Returns whether every step depends on x alone, with zeros before the row.
__device__ __forceinline__ bool is_plain(const ConvForwardParams& params) {
  return !params.seq_idx.present() && !params.cu_seqlens.present() &&
         !params.initial_states.present();
}
__device__ __forceinline__ bool is_plain(const ConvBackwardParams& params) {
  return !params.seq_idx.present() && !params.cu_seqlens.present() &&
         !params.initial_states.present() && !params.dfinal_states.present();
}

template <class Element, int kTaps>
__global__ void __launch_bounds__(kRowThreads, row_blocks(kTaps, false))
    rows_forward(const __grid_constant__ ConvForwardParams params, RowSplit split) {
  using Place = RowPlace<Element, kTaps>;
  constexpr int kSteps = Place::kSteps;
  constexpr int kSeen = kTaps - 1 + kSteps;
  constexpr int kAhead = tuning(false).rounds_ahead;
  const Place place(params, split);
  if (!place.exists) return;
  const auto* x = place.template data<const Element>(params.x);
  auto* out = place.template data<Element>(params.out);
  const int seqlen = static_cast<int>(params.seqlen);
  const int round_steps = place.round_steps(split);
  const int segment_end = place.origin + split.rounds * round_steps;
  const int end = min(segment_end, seqlen);

  int first = place.first_of_round(split, 0);
  RowInputs<Element, kTaps> ahead[kAhead];
  if (is_plain(params)) {  // in flight together with the taps
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i].load(x, first + i * round_steps, end);
  }
  const RowTaps<kTaps> taps(params, place.channel);
  if (!is_plain(params)) {
    for (int round = 0; round < split.rounds && first < seqlen; ++round) {
      RowInputs<Element, kTaps> inputs;
      inputs.load(x, first, seqlen);
      convolve_runs(params, place, taps, inputs, first, out);
      first += round_steps;
    }
    return;
  }
#pragma unroll 1
  while (first < end) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      float window[kSeen], values[kSteps];
      ahead[i].unpack(window);
      ahead[i].load(x, first + kAhead * round_steps, end);
      taps.convolve(window, values);
      activate(values, params.silu);
      store_steps(out, first, Place::from_of(first), Place::to_of(params, first), values);
      first += round_steps;
    }
  }
}

/// The results of a vector: the gradients of its steps' sums, and its terms of dweight and dbias.
template <int kTaps, int kSteps>
struct RowGradients {
  float gradients[kSteps] = {};
  float taps[kTaps] = {};
  float bias = 0;

  template <int kSeen>
  __device__ void add(int i, float gradient, const float (&window)[kSeen]) {
    gradients[i] = gradient;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) taps[k] = fma(gradient, window[i + k], taps[k]);
    bias += gradient;
  }
};

/// Differentiates a vector, visiting the runs as convolve_runs() does.
template <class Element, int kTaps, int kSteps, class Place>
__device__ __forceinline__ void differentiate_runs(const ConvBackwardParams& params,
                                                   const Place& place, const RowTaps<kTaps>& taps,
                                                   const RowInputs<Element, kTaps>& inputs,
                                                   const Packed<Element, kSteps>& douts, int first,
                                                   RowGradients<kTaps, kSteps>& result) {
  constexpr int kSeen = kTaps - 1 + kSteps;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) result.gradients[i] = 0;
  const auto add = [&](const Run& run, int from, int to) {
    if (run.is_padding) return;
    float window[kSeen], sums[kSteps], gradients[kSteps];
    make_window(params, run, place.batch, place.channel, first, inputs, window);
    douts.unpack(gradients);
    taps.convolve(window, sums);
    differentiate(gradients, sums, params.silu);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (first + i >= from && first + i < to) result.add(i, gradients[i], window);
    }
  };
  const int to = Place::to_of(params, first);
  for_each_run(params, place.batch, Place::from_of(first), to, to, add);
}

/// Computes dx of a vector in which runs may end, or to which final states contribute.
template <int kTaps, int kSeen, class Element, class Place>
__device__ __forceinline__ void gather_runs(const ConvBackwardParams& params, const Place& place,
                                            const RowTaps<kTaps>& taps,
                                            const float (&gradients)[kSeen], int first,
                                            Element* dx) {
  constexpr int kSteps = Place::kSteps;
  const auto gather = [&](const Run& run, int from, int to) {
    float seen[kSeen], values[kSteps] = {};
    const int left = static_cast<int>(run.end) - first;
    if (!run.is_padding) {
#pragma unroll
      for (int i = 0; i < kSeen; ++i) seen[i] = i < left ? gradients[i] : 0.0f;
      taps.gather(seen, values);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (i < left - (kTaps - 1) || first + i >= to) continue;
        values[i] += load_state<float>(params.dfinal_states, run.states, place.channel,
                                       i - left + params.width - 1);
      }
    }
    store_steps(dx, first, from, to, values);
  };
  const int64_t limit = first + kSeen < params.seqlen ? first + kSeen : params.seqlen;
  for_each_run(params, place.batch, Place::from_of(first), Place::to_of(params, first), limit,
               gather);
}

/// Returns what gradient_at() returns, for a call that is_plain() and a step that at least kTaps -
/// 1 steps of its row precede.
template <int kTaps, class Element>
__device__ __forceinline__ float gradient_in_row(const ConvBackwardParams& params,
                                                 const RowTaps<kTaps>& taps, const Element* x,
                                                 const Element* dout, int step) {
  float window[kTaps], sum[1], gradient[1] = {};
  if (!params.dout.present()) return gradient[0];
  gradient[0] = to_real(dout[step]);
#pragma unroll
  for (int k = 0; k < kTaps; ++k) window[k] = to_real(x[step - (kTaps - 1) + k]);
  taps.convolve(window, sum);
  differentiate(gradient, sum, params.silu);
  return gradient[0];
}

/// Writes partial sums, (batch, segment, tap, channel) with the bias after the last tap, to
/// `parts`.
template <class Element, int kTaps>
__global__ void __launch_bounds__(kRowThreads, row_blocks(kTaps, true))
    rows_backward(const __grid_constant__ ConvBackwardParams params, RowSplit split, float* parts) {
  using Place = RowPlace<Element, kTaps>;
  constexpr int kSteps = Place::kSteps;
  constexpr int kLast = kTaps - 1;
  constexpr int kSeen = kLast + kSteps;
  constexpr int kAhead = tuning(true).rounds_ahead;
  start_dependents();
  const Place place(params, split);
  const auto* x = place.template data<const Element>(params.x);
  const auto* dout = place.template data<const Element>(params.dout);
  auto* dx = place.template data<Element>(params.dx);
  const int seqlen = static_cast<int>(params.seqlen);
  const int dout_end = params.dout.present() ? seqlen : 0;
  const int round_steps = place.round_steps(split);
  int first = place.first_of_round(split, split.rounds - 1);

  RowInputs<Element, kTaps> ahead[kAhead];
  Packed<Element, kSteps> douts_ahead[kAhead];
  if (is_plain(params)) {  // in flight together with the taps
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      ahead[i].load(x, first - i * round_steps, seqlen);
      douts_ahead[i] = load_steps<kSteps>(dout, first - i * round_steps, dout_end);
    }
  }
  const RowTaps<kTaps> taps(params, place.channel);
  RowGradients<kTaps, kSteps> own;
  // The gradients of the sums at the first steps after the round. The round's last lane needs them;
  // the first lane of the round before, which has later steps, has computed them. Those after the
  // segment are computed by one lane each: a row of several segments has all lanes of the warp.
  float behind[kLast], found = 0.0f;
  const int step = place.origin + split.rounds * round_steps + place.lane;
  if (place.lane < kLast && step < seqlen) {
    found = is_plain(params) ? gradient_in_row<kTaps>(params, taps, x, dout, step)
                             : gradient_at<float>(params, place.batch, place.channel, step);
  }
#pragma unroll
  for (int j = 0; j < kLast; ++j) {
    behind[j] = __shfl_sync(kFullMask, found, j, split.lanes());
  }

  // Gives a lane the gradients of its own steps and, from the next lane, of the steps after them.
  const auto share = [&](float (&seen)[kSeen]) {
#pragma unroll
    for (int j = 0; j < kSteps; ++j) seen[j] = own.gradients[j];
#pragma unroll
    for (int j = 0; j < kLast; ++j) {
      const float given = place.lane == 0 ? behind[j] : own.gradients[j];
      behind[j] = own.gradients[j];
      seen[kSteps + j] = __shfl_sync(kFullMask, given, place.lane + 1, split.lanes());
    }
  };

  if (is_plain(params)) {
#pragma unroll 1
    for (int round = 0; round < split.rounds; round += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        // Outside the row dout is zero, and so are the gradients.
        float window[kSeen], values[kSteps], gradients[kSteps], seen[kSeen];
        ahead[i].unpack(window);
        douts_ahead[i].unpack(gradients);
        const bool has_more = round + i + kAhead < split.rounds;
        const int next = first - kAhead * round_steps;
        ahead[i].load(x, next, has_more ? seqlen : 0);
        douts_ahead[i] = load_steps<kSteps>(dout, next, has_more ? dout_end : 0);
        taps.convolve(window, values);
        differentiate(gradients, values, params.silu);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) own.add(j, gradients[j], window);
        share(seen);
        taps.gather(seen, values);
        if (place.exists) {
          store_steps(dx, first, Place::from_of(first), Place::to_of(params, first), values);
        }
        first -= round_steps;
      }
    }
  } else {
#pragma unroll 1
    for (int round = 0; round < split.rounds; ++round) {
      RowInputs<Element, kTaps> inputs;
      inputs.load(x, first, seqlen);
      const auto douts = load_steps<kSteps>(dout, first, dout_end);
      differentiate_runs(params, place, taps, inputs, douts, first, own);
      float seen[kSeen];
      share(seen);
      if (place.exists) gather_runs(params, place, taps, seen, first, dx);
      first -= round_steps;
    }
  }

  const auto add_over_lanes = [&](float& sum, int distance) {
    sum += __shfl_xor_sync(kFullMask, sum, distance);
  };
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    if (distance >= split.lanes()) continue;
#pragma unroll
    for (float& sum : own.taps) add_over_lanes(sum, distance);
    add_over_lanes(own.bias, distance);
  }
  const bool writes = place.exists && place.lane == 0;
  float* row =
      parts + (place.batch * split.segments + place.segment) * (params.width + 1) * params.dim;
#pragma unroll
  for (int k = 0; k <= kTaps; ++k) {
    const float sum = k < kTaps ? own.taps[k] : own.bias;
    if (writes && k >= taps.first) row[(k - taps.first) * params.dim + place.channel] = sum;
  }
}

}  // namespace selective_scan::cuda::conv
