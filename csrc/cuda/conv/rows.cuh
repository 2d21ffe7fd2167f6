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

constexpr int kRowThreads = 128;
/// Rounds that a lane has on their way.
constexpr int kRoundsAhead = 2;

/// 16 bytes of steps, or as many as the next vector may want of this one.
template <class Element, int kTaps>
constexpr int kRowVector = kTaps - 1 > 16 / int{sizeof(Element)} ? 8 : 16 / int{sizeof(Element)};

/// The longest rows: steps are counted by 32 bits.
constexpr int64_t kMaxRowSteps = int64_t{1} << 30;

/// How a launch is divided: lanes() lanes have a segment of a row, batch by batch.
struct RowSplit {
  int lane_bits = 0;
  int segments = 0;
  int rounds = 0;  // of a segment, a multiple of kRoundsAhead

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

/// x at kCount steps from `begin` on, continued before the run's first; for vectors with which a
/// run begins, out of line.
template <int kCount>
__device__ __noinline__ Pack<float, kCount> load_window(const ConvParams& params, const Run& run,
                                                        int64_t batch, int64_t channel,
                                                        int64_t begin) {
  Pack<float, kCount> window;
#pragma unroll 1
  for (int i = 0; i < kCount; ++i) {
    const int64_t step = begin + i;
    window.v[i] =
        step < params.seqlen ? continued_x<float>(params, run, batch, channel, step) : 0.0f;
  }
  return window;
}

/// A vector of x and what it sees of the steps before.
template <class Element, int kTaps>
struct RowInputs {
  static constexpr int kSteps = kRowVector<Element, kTaps>;
  static constexpr int kBefore = kTaps <= 2 ? 1 : kTaps == 3 ? 2 : kTaps <= 5 ? 4 : 8;
  Packed<Element, kBefore> before;
  Packed<Element, kSteps> own;

  __device__ void load(const Element* row, int first, int seqlen) {
    before = load_steps<kBefore>(row, first - kBefore, seqlen);
    own = load_steps<kSteps>(row, first, seqlen);
  }

  /// As a step of `run` sees them.
  __device__ void make_window(const ConvParams& params, const Run& run, int64_t batch,
                              int64_t channel, int first,
                              float (&window)[kTaps - 1 + kSteps]) const {
    float earlier[kBefore], later[kSteps];
    before.unpack(earlier);
    own.unpack(later);
#pragma unroll
    for (int i = 0; i < kTaps - 1 + kSteps; ++i) {
      const int at = i - (kTaps - 1);
      window[i] = at < 0 ? earlier[kBefore + at] : later[at];
    }
    // Before the row there are zeros already.
    const int begin = first - (kTaps - 1);
    if (begin < run.begin && (run.begin > 0 || params.initial_states.present())) {
      const auto seen = load_window<kTaps - 1 + kSteps>(params, run, batch, channel, begin);
#pragma unroll
      for (int i = 0; i < kTaps - 1 + kSteps; ++i) window[i] = seen.v[i];
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
__global__ void __launch_bounds__(kRowThreads, kTaps <= 4 ? 6 : 4)
    rows_forward(const __grid_constant__ ConvForwardParams params, RowSplit split) {
  constexpr int kSteps = kRowVector<Element, kTaps>;
  constexpr int kSeen = kTaps - 1 + kSteps;
  const RowPlace<Element, kTaps> place(params, split);
  if (!place.exists) return;
  const RowTaps<float, kTaps> taps(params, place.channel);
  const auto* x = place.template data<const Element>(params.x);
  auto* out = place.template data<Element>(params.out);

  const int seqlen = static_cast<int>(params.seqlen);

  const int round_steps = place.round_steps(split);

  int first = place.first_of_round(split, 0);
  RowInputs<Element, kTaps> ahead[kRoundsAhead];
#pragma unroll
  for (int i = 0; i < kRoundsAhead; ++i) ahead[i].load(x, first + i * round_steps, seqlen);
  for (int round = 0; round < split.rounds && first < seqlen; round += kRoundsAhead) {
#pragma unroll
    for (int i = 0; i < kRoundsAhead; ++i) {
      const RowInputs<Element, kTaps> inputs = ahead[i];
      ahead[i].load(x, first + kRoundsAhead * round_steps, seqlen);
      const auto convolve = [&](const Run& run, int from, int to) {
        float window[kSeen], values[kSteps];
        inputs.make_window(params, run, place.batch, place.channel, first, window);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) values[j] = taps.sum(window, j);
        activate(values, params.silu);
        if (run.is_padding) {
#pragma unroll
          for (int j = 0; j < kSteps; ++j) values[j] = 0;
        }
        store_steps(out, first, from, to, values);
      };
      const int stop = min(first + kSteps, seqlen);
      for_each_run(params, place.batch, max(first, 0), stop, stop, convolve);
      first += round_steps;
    }
  }
}

/// Writes (batch, segment, tap, channel) to `parts`, the bias behind the last tap.
template <class Element, int kTaps>
__global__ void __launch_bounds__(kRowThreads, kTaps <= 4 ? 4 : 2)
    rows_backward(const __grid_constant__ ConvBackwardParams params, RowSplit split, float* parts) {
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

  const int round_steps = place.round_steps(split);
  int first = place.first_of_round(split, split.rounds - 1);
  RowInputs<Element, kTaps> ahead[kRoundsAhead];
  Packed<Element, kSteps> douts_ahead[kRoundsAhead];
#pragma unroll
  for (int i = 0; i < kRoundsAhead; ++i) {
    ahead[i].load(x, first - i * round_steps, seqlen);
    douts_ahead[i] = load_steps<kSteps>(dout, first - i * round_steps, dout_end);
  }
  for (int round = 0; round < split.rounds; round += kRoundsAhead) {
#pragma unroll
    for (int i = 0; i < kRoundsAhead; ++i) {
      const RowInputs<Element, kTaps> inputs = ahead[i];
      const Packed<Element, kSteps> douts = douts_ahead[i];
      const bool has_more = round + i + kRoundsAhead < split.rounds;
      const int next = first - kRoundsAhead * round_steps;
      ahead[i].load(x, next, has_more ? seqlen : 0);
      douts_ahead[i] = load_steps<kSteps>(dout, next, has_more ? dout_end : 0);
      const int begin = max(first, 0);
      const int stop = min(first + kSteps, seqlen);

      float gradients[kSeen] = {};
      const auto add_gradients = [&](const Run& run, int from, int to) {
        if (run.is_padding) return;
        float window[kSeen], values[kSteps], own[kSteps];
        inputs.make_window(params, run, place.batch, place.channel, first, window);
        douts.unpack(own);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) values[j] = taps.sum(window, j);
        differentiate(own, values, params.silu);
        const bool is_whole = from == first && to == first + kSteps;
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          if (!is_whole && (first + j < from || first + j >= to)) continue;
          gradients[j] = own[j];
#pragma unroll
          for (int k = 0; k < kTaps; ++k) sums[k] = fma(own[j], window[j + k], sums[k]);
          sums[kTaps] += own[j];
        }
      };
      for_each_run(params, place.batch, begin, stop, stop, add_gradients);

#pragma unroll
      for (int j = 0; j < kLast; ++j) {
        const float given = place.lane == 0 ? behind[j] : gradients[j];
        behind[j] = gradients[j];
        gradients[kSteps + j] = __shfl_sync(kFullMask, given, place.lane + 1, split.lanes());
      }

      const auto gather = [&](const Run& run, int from, int to) {
        float seen[kSeen], values[kSteps];
#pragma unroll
        for (int j = 0; j < kSeen; ++j) seen[j] = gradients[j];
        const int left = static_cast<int>(run.end) - first;
        if (run.end < seqlen) {
#pragma unroll
          for (int j = 0; j < kSeen; ++j) {
            if (j >= left) seen[j] = 0;
          }
        }
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          values[j] = add_products<kTaps>(
              0.0f, taps.first, [&](int k) { return taps.weight[k]; },
              [&](int k) { return seen[j + kLast - k]; });
        }
        if (run.is_padding) {
#pragma unroll
          for (int j = 0; j < kSteps; ++j) values[j] = 0;
        }
        if (params.dfinal_states.present() && left < kSeen) {
#pragma unroll
          for (int j = 0; j < kSteps; ++j) {
            values[j] += load_state<float>(params.dfinal_states, run.states, place.channel,
                                           first + j < to ? j - left + params.width - 1 : -1);
          }
        }
        if (place.exists) store_steps(dx, first, from, to, values);
      };
      for_each_run(params, place.batch, begin, stop, min(stop + kLast, seqlen), gather);
      first -= round_steps;
    }
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
