// The convolution where neighbouring steps of a row, a (batch, channel), are neighbours in memory.
//
// A lane has a vector of steps, neighbouring lanes have neighbouring vectors, and some lanes of a
// warp, or all, walk a segment of a row together; the vector of the next round is on its way. A row
// begins anywhere in memory: its first vector may begin before it, so that vectors are aligned.
// What a vector sees of the steps before it a lane reads from memory too, where the line is on its
// way for the lane beside it. Backwards dx needs the gradient of the sum at the steps behind, which
// comes from the next lane; rounds go from the last to the first, so that the last lane has it from
// the round before.
//
// Bound by memory: forward 2, backward 3 elements a step and channel.
#pragma once

#include "window.cuh"

namespace selective_scan::cuda::conv {

constexpr int kRowThreads = 256;

/// 16 bytes of steps, or as many as the next vector may want of this one.
template <class Element, int kTaps>
constexpr int kRowVector = kTaps - 1 > 16 / int{sizeof(Element)} ? 8 : 16 / int{sizeof(Element)};

/// The longest rows: steps are counted by 32 bits.
constexpr int64_t kMaxRowSteps = int64_t{1} << 30;

/// How a launch is divided: lanes() lanes have a segment of a row, batch by batch.
struct RowSplit {
  int lane_bits = 0;
  int segments = 0;
  int rounds = 0;  // of a segment

  SELECTIVE_SCAN_HD int lanes() const { return 1 << lane_bits; }
};

/// A lane's part of a row.
template <class Element, int kTaps>
struct RowPlace {
  static constexpr int kSteps = kRowVector<Element, kTaps>;

  int lane;
  bool exists;  // lanes beyond the last row work on it too, and write nothing
  int64_t row;
  int64_t batch;
  int64_t channel;
  int segment;
  int origin;  // of the segment, perhaps before the row

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
  /// The first step of the lane's vector.
  __device__ int first_of_round(const RowSplit& split, int round) const {
    return origin + round * round_steps(split) + lane * kSteps;
  }
  template <class T>
  __device__ T* data(const ArrayView& array) const {
    return static_cast<T*>(array.data) + batch * array.batch + channel * array.channel;
  }
};

/// kCount elements of a row from `first` on; those outside of it are zero.
template <int kCount, class Element>
__device__ __forceinline__ Packed<Element, kCount> load_steps(const Element* row, int first,
                                                              int seqlen) {
  if (first >= 0 && first + kCount <= seqlen) return Packed<Element, kCount>::load(row + first);
  Pack<Element, kCount> pack{};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (first + i >= 0 && first + i < seqlen) pack.v[i] = row[first + i];
  }
  return bit_cast<Packed<Element, kCount>>(pack);
}

/// The steps [from, to) of the vector at `first`.
template <class Element, class R, int kSteps>
__device__ __forceinline__ void store_steps(Element* row, int first, int from, int to,
                                            const R (&values)[kSteps]) {
  Pack<Element, kSteps> pack;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) pack.v[i] = from_real<Element>(values[i]);
  if (from == first && to == first + kSteps) {
    store_pack(row + first, pack);
  } else {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (first + i >= from && first + i < to) row[first + i] = pack.v[i];
    }
  }
}

/// A vector of x and what it sees of the steps before.
template <class Element, int kTaps>
struct RowInputs {
  static constexpr int kSteps = kRowVector<Element, kTaps>;
  static constexpr int kBefore = kTaps <= 2 ? 1 : kTaps == 3 ? 2 : kTaps <= 5 ? 4 : 8;
  Packed<Element, kBefore> before;
  Packed<Element, kSteps> own;

  __device__ RowInputs(const Element* row, int first, int seqlen)
      : before(load_steps<kBefore>(row, first - kBefore, seqlen)),
        own(load_steps<kSteps>(row, first, seqlen)) {}

  /// As a step of `run` sees them.
  __device__ void make_window(const ConvParams& params, const Run& run, int64_t channel, int first,
                              float (&window)[kTaps - 1 + kSteps]) const {
    float earlier[kBefore], later[kSteps];
    before.unpack(earlier);
    own.unpack(later);
#pragma unroll
    for (int i = 0; i < kTaps - 1 + kSteps; ++i) {
      const int at = i - (kTaps - 1);
      window[i] = at < 0 ? earlier[kBefore + at] : later[at];
    }
    const int behind = static_cast<int>(run.begin) - (first - (kTaps - 1));
    if (behind <= 0) return;
#pragma unroll
    for (int i = 0; i < kTaps - 1 + kSteps; ++i) {
      if (i >= behind) continue;
      window[i] = params.initial_states.present()
                      ? load_state<float>(params.initial_states, run.states, channel,
                                          i - behind + params.width - 1)
                      : 0.0f;
    }
  }
};

template <class R, int kTaps>
struct RowTaps {
  R weight[kTaps];
  R bias;
  int first;

  __device__ RowTaps(const ConvParams& params, int64_t channel)
      : bias(load_bias<R>(params, channel)), first(first_tap<kTaps>(params)) {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      weight[k] = k < first ? R(0) : load_tap<R>(params, channel, k - first);
    }
  }

  template <class Window>
  __device__ R sum(const Window& window, int at) const {
    return add_products<kTaps>(
        bias, first, [&](int k) { return weight[k]; }, [&](int k) { return window[at + k]; });
  }
};

template <class Element, int kTaps>
__global__ void __launch_bounds__(kRowThreads)
    rows_forward(const __grid_constant__ ConvForwardParams params, RowSplit split) {
  constexpr int kSteps = kRowVector<Element, kTaps>;
  constexpr int kSeen = kTaps - 1 + kSteps;
  const RowPlace<Element, kTaps> place(params, split);
  if (!place.exists) return;
  const RowTaps<float, kTaps> taps(params, place.channel);
  const auto* x = place.template data<const Element>(params.x);
  auto* out = place.template data<Element>(params.out);

  const int seqlen = static_cast<int>(params.seqlen);

  int first = place.first_of_round(split, 0);
  RowInputs<Element, kTaps> inputs(x, first, seqlen);
  for (int round = 0; round < split.rounds && first < seqlen; ++round) {
    const int next = first + place.round_steps(split);
    const RowInputs<Element, kTaps> next_inputs(x, next, seqlen);
    const auto convolve = [&](const Run& run, int64_t from, int64_t to) {
      float window[kSeen], values[kSteps];
      inputs.make_window(params, run, place.channel, first, window);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) values[i] = run.is_padding ? 0 : taps.sum(window, i);
      activate(values, params.silu);
      store_steps(out, first, static_cast<int>(from), static_cast<int>(to), values);
    };
    const int stop = min(first + kSteps, seqlen);
    for_each_run(params, place.batch, max(first, 0), stop, stop, convolve);
    first = next;
    inputs = next_inputs;
  }
}

/// Writes (batch, segment, tap, channel) to `parts`, the bias behind the last tap.
template <class Element, int kTaps>
__global__ void __launch_bounds__(kRowThreads, kTaps <= 4 ? 2 : 1)
    rows_backward(const __grid_constant__ ConvBackwardParams params, RowSplit split, float* parts) {
  using Inputs = RowInputs<Element, kTaps>;
  constexpr int kSteps = kRowVector<Element, kTaps>;
  constexpr int kLast = kTaps - 1;
  constexpr int kSeen = kLast + kSteps;
  const RowPlace<Element, kTaps> place(params, split);
  const RowTaps<float, kTaps> taps(params, place.channel);
  const auto* x = place.template data<const Element>(params.x);
  const auto* dout = place.template data<const Element>(params.dout);
  auto* dx = place.template data<Element>(params.dx);
  const int seqlen = static_cast<int>(params.seqlen);
  const int dout_end = params.dout.present() ? seqlen : 0;

  float sums[kTaps + 1] = {};
  // The gradients of the sums at the first steps behind the round; its last lane needs them, and
  // the first one has them.
  float behind[kLast];
  const int end = place.first_of_round(split, split.rounds);
#pragma unroll
  for (int j = 0; j < kLast; ++j) {
    const bool is_needed = place.lane == 0 && end + j < seqlen;
    behind[j] = is_needed ? gradient_at<float>(params, place.batch, place.channel, end + j) : 0.0f;
  }

  int first = place.first_of_round(split, split.rounds - 1);
  Inputs inputs(x, first, seqlen);
  auto douts = load_steps<kSteps>(dout, first, dout_end);
  for (int round = split.rounds; round-- > 0;) {
    const int next = first - place.round_steps(split);
    const Inputs next_inputs(x, next, round > 0 ? seqlen : 0);
    const auto next_douts = load_steps<kSteps>(dout, next, round > 0 ? dout_end : 0);
    const int begin = max(first, 0);
    const int stop = min(first + kSteps, seqlen);

    float gradients[kSeen] = {};
    const auto add_gradients = [&](const Run& run, int64_t from, int64_t to) {
      if (run.is_padding) return;
      float window[kSeen], values[kSteps], own[kSteps];
      inputs.make_window(params, run, place.channel, first, window);
      douts.unpack(own);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) values[i] = taps.sum(window, i);
      differentiate(own, values, params.silu);
      const bool is_whole = from == first && to == first + kSteps;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (!is_whole && (first + i < from || first + i >= to)) continue;
        gradients[i] = own[i];
#pragma unroll
        for (int k = 0; k < kTaps; ++k) sums[k] = fma(own[i], window[i + k], sums[k]);
        sums[kTaps] += own[i];
      }
    };
    for_each_run(params, place.batch, begin, stop, stop, add_gradients);

#pragma unroll
    for (int j = 0; j < kLast; ++j) {
      const float given = place.lane == 0 ? behind[j] : gradients[j];
      behind[j] = gradients[j];
      gradients[kSteps + j] = __shfl_sync(kFullMask, given, place.lane + 1, split.lanes());
    }

    const auto gather = [&](const Run& run, int64_t from, int64_t to) {
      float seen[kSeen], values[kSteps];
#pragma unroll
      for (int i = 0; i < kSeen; ++i) seen[i] = gradients[i];
      const int left = static_cast<int>(run.end) - first;
      if (left < kSeen) {
#pragma unroll
        for (int i = 0; i < kSeen; ++i) {
          if (i >= left) seen[i] = 0;
        }
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        values[i] = add_products<kTaps>(
            0.0f, taps.first, [&](int k) { return taps.weight[k]; },
            [&](int k) { return seen[i + kLast - k]; });
        if (run.is_padding) values[i] = 0;
      }
      if (params.dfinal_states.present() && left < kSeen) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          if (first + i < from || first + i >= to) continue;
          values[i] += load_state<float>(params.dfinal_states, run.states, place.channel,
                                         i - left + params.width - 1);
        }
      }
      if (!place.exists) return;
      store_steps(dx, first, static_cast<int>(from), static_cast<int>(to), values);
    };
    for_each_run(params, place.batch, begin, stop, min(stop + kLast, seqlen), gather);
    first = next;
    inputs = next_inputs;
    douts = next_douts;
  }

#pragma unroll
  for (int k = 0; k <= kTaps; ++k) {
    for (int distance = split.lanes() / 2; distance > 0; distance /= 2) {
      sums[k] += __shfl_xor_sync(kFullMask, sums[k], distance);
    }
  }
  if (!place.exists || place.lane > 0) return;
  float* row =
      parts + (place.batch * split.segments + place.segment) * (params.width + 1) * params.dim;
#pragma unroll
  for (int k = 0; k <= kTaps; ++k) {
    if (k >= taps.first) row[(k - taps.first) * params.dim + place.channel] = sums[k];
  }
}

}  // namespace selective_scan::cuda::conv
