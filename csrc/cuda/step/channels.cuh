// A block's work on its own channels between the products: convolution, Δ, states and gate.
#pragma once

#include "../../core/method_table.h"
#include "block.cuh"

namespace selective_scan::cuda::step {

/// Starts copying the block's rows of dt_proj.
template <class W, int kRows>
__device__ __forceinline__ void fetch_dt_proj(const Block<W, kRows>& own, const StepLayer& layer) {
  constexpr int kAccess = 8;
  const int rank = static_cast<int>(own.params.rank);
  const auto* const source = reinterpret_cast<const char*>(static_cast<const W*>(layer.dt_proj) +
                                                           int64_t{own.channels.first} * rank);
  const int bytes = own.channels.count * rank * static_cast<int>(sizeof(W));
#pragma unroll 1
  for (int at = threadIdx.x * kAccess; at < bytes; at += kComputeThreads * kAccess) {
    __pipeline_memcpy_async(own.template shared<char>(own.plan.shared.dt_proj) + at, source + at,
                            kAccess);
  }
  __pipeline_commit();
}

/// Sends a channel's value. A value of two bytes forms a pair with that of the lane kStride away.
/// All lanes call this.
template <int kStride, class W, int kRows>
__device__ __forceinline__ void send_channel(const Block<W, kRows>& own, int64_t offset,
                                             uint32_t epoch, bool is_sender, int local, int row,
                                             float value) {
  constexpr int kWordValues = Block<W, kRows>::kWordValues;
  Word* const word =
      own.words(offset) + (row * own.params.inner + own.channels.first + local) / kWordValues;
  if constexpr (kWordValues == 2) {
    const float other = __shfl_xor_sync(kFullMask, value, kStride);
    const Pack<W, 2> pair{{to_element<W>(value), to_element<W>(other)}};
    if (is_sender && local % 2 == 0) send(word, bit_cast<uint32_t>(pair), epoch);
  } else if (is_sender) {
    send(word, value, epoch);
  }
}

/// Computes x of own channels after the convolution, and sends it. A thread has one channel of one
/// batch entry. The warps that do not multiply do this, while the others begin with z. All compute
/// warps meet first, although these warps alone would suffice: it costs nothing, and racecheck does
/// not follow a barrier of some warps.
template <class W, int kRows>
__device__ __forceinline__ void convolve(const Block<W, kRows>& own, const StepLayer& layer,
                                         int layer_number) {
  meet();
  if (is_multiplier()) return;
  const StepParams& params = own.params;
  const int channels = own.channels.count, items = channels * static_cast<int>(params.batch);
  const int steps = static_cast<int>(params.steps), width = static_cast<int>(params.width);
  const int thread = static_cast<int>(threadIdx.x) - kProductThreads;
  const float* const inputs = own.inputs().acquire(layer_number);
  const int lane = thread % kWarpSize;
#pragma unroll 1
  for (int first = thread - lane; first < items; first += kFinishThreads) {
    const auto [local, entry, exists] =
        own.channel_at(first + lane, static_cast<int>(params.batch));
    const float* const x = own.in() + value_index<kRows>(local, entry * steps);
    const float* const given = inputs + local;
    const float* const taps = given + kFirstTap * channels;
    const float* const kept = taps + (width + entry * (width - 1)) * channels;
    const float bias = given[kConvBias * channels], x_bias = given[kXBias * channels];
    // The input of the convolution: its state, then the steps.
    const auto seen = [&](int at) {
      return at < width - 1 ? kept[at * channels] : x[at - (width - 1)] + x_bias;
    };
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      float sum = bias;
#pragma unroll 4
      for (int k = 0; k < width; ++k) sum = fmaf(taps[k * channels], seen(step + k), sum);
      const float value = device_silu(sum);
      const int row = entry * steps + step;
      if (exists) own.x()[value_index<kRows>(local, row)] = value;
      send_channel<1>(own, own.exchange.x, own.epoch + kX, exists, local, row, value);
    }
    const int64_t slot = params.slot(entry);
    if (!exists || slot == StepParams::kNoSlot) continue;
    const ArrayView& view = params.conv_state;
    const int64_t state = slot * view.batch + (own.channels.first + local) * view.channel;
#pragma unroll 1
    for (int k = 0; k + 1 < width; ++k) {
      store_element(layer.conv_state, view.dtype, state + k * view.step, seen(steps + k));
    }
  }
}

/// A lane's part of a channel at a time: kLaneStates states, kChannelLanes apart, of kEntries batch
/// entries, `stride` apart.
template <int kEntries>
struct LaneStates {
  int local;
  int first;  // the lane's first state
  int entry;
  int stride;
  bool exist[kEntries];
  RawElement A_log[kLaneStates], h[kEntries][kLaneStates];

  __device__ __forceinline__ int number(int i) const { return first + i * kChannelLanes; }
  __device__ __forceinline__ bool any_exist() const { return __any_sync(kFullMask, exist[0]); }
};

/// Calls visit(entry, index of the first state in memory) for the entries that have a slot.
template <int kEntries, class W, int kRows, class Visit>
__device__ __forceinline__ void for_each_slot(const Block<W, kRows>& own,
                                              const LaneStates<kEntries>& states,
                                              const Visit& visit) {
  const ArrayView& view = own.params.state;
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    if (!states.exist[e]) break;
    const int64_t slot = own.params.slot(states.entry + e * states.stride);
    if (slot == StepParams::kNoSlot) continue;
    visit(e, slot * view.batch + (own.channels.first + states.local) * view.channel +
                 states.first * view.state);
  }
}

/// Starts to load A_log and the states.
template <int kEntries, class W, int kRows>
__device__ __forceinline__ void fetch_states(const Block<W, kRows>& own, const StepLayer& layer,
                                             LaneStates<kEntries>& states) {
  const StepParams& params = own.params;
  const bool has_channel = states.local < own.channels.count;
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    states.exist[e] = has_channel && states.entry + e * states.stride < params.batch;
  }
  const int64_t channel = own.channels.first + (has_channel ? states.local : 0);
#pragma unroll
  for (int i = 0; i < kLaneStates; ++i) {
    const int n = states.number(i);
    if (n >= params.dstate) break;
    states.A_log[i] = RawElement(layer.A_log, params.A_dtype, channel * params.dstate + n);
  }
#pragma unroll
  for (auto& of_entry : states.h) {
#pragma unroll
    for (RawElement& h : of_entry) h = {};
  }
  for_each_slot(own, states, [&](int e, int64_t first) {
#pragma unroll
    for (int i = 0; i < kLaneStates; ++i) {
      if (states.number(i) >= params.dstate) break;
      states.h[e][i] = RawElement(layer.state, params.state.dtype,
                                  first + i * kChannelLanes * params.state.state);
    }
  });
}

using StepPole = Pole<float>;
template <int kEntries, class W, int kRows>
__device__ __forceinline__ void find_poles(const Block<W, kRows>& own,
                                           const LaneStates<kEntries>& states,
                                           StepPole (&poles)[kLaneStates]) {
#pragma unroll
  for (int i = 0; i < kLaneStates; ++i) {
    poles[i] = make_pole<DeviceMath>(-DeviceMath::exp(states.A_log[i].value(own.params.A_dtype)),
                                     own.params.method);
  }
}

/// Takes some states through all steps. y of their channel, a sum over states, is sent with the
/// last of them.
template <int kEntries, class W, int kRows>
__device__ __forceinline__ void scan_states(const Block<W, kRows>& own, const StepLayer& layer,
                                            const float* inputs, const LaneStates<kEntries>& states,
                                            const StepPole (&poles)[kLaneStates]) {
  const StepParams& params = own.params;
  const int steps = static_cast<int>(params.steps), rank = static_cast<int>(params.rank);
  const int dstate = static_cast<int>(params.dstate), channels = own.channels.count;
  const int lane = threadIdx.x % kChannelLanes;
  const int local = states.local < channels ? states.local : 0;
  const bool is_first = states.first < kTurnStates;
  const bool is_last = states.first - lane + kTurnStates >= dstate;
  float h[kEntries][kLaneStates];
  int first_rows[kEntries];
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    first_rows[e] = states.exist[e] ? (states.entry + e * states.stride) * steps : 0;
#pragma unroll
    for (int i = 0; i < kLaneStates; ++i) h[e][i] = states.h[e][i].value(params.state.dtype);
  }
  const float* const given = inputs + local;
  const float bias = given[kDtBias * channels], D = given[kD * channels];
  const W* const dt_proj = own.template shared<W>(own.plan.shared.dt_proj) + local * rank;
  float* const sums = own.template shared<float>(own.plan.shared.y);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const auto row_of = [&](int e) { return first_rows[e] + step; };
    const auto projection = [&](int number, int e) {
      return own.projections()[value_index<kRows>(number, row_of(e))];
    };
    float dt[kEntries] = {}, x[kEntries], y[kEntries] = {};
#pragma unroll 4
    for (int r = lane; r < rank; r += kChannelLanes) {
      const float weight = to_real(dt_proj[r]);
#pragma unroll
      for (int e = 0; e < kEntries; ++e) dt[e] = fmaf(weight, projection(r, e), dt[e]);
    }
    sum_lanes<kChannelLanes>(dt);
#pragma unroll
    for (int e = 0; e < kEntries; ++e) x[e] = own.x()[value_index<kRows>(local, row_of(e))];
    visit_kernel_method(params.method, [&]<Method kMethod>() {
#pragma unroll
      for (int e = 0; e < kEntries; ++e) {
        const float delta = step_size(dt[e] + bias, params.delta_softplus);
#pragma unroll
        for (int i = 0; i < kLaneStates; ++i) {
          const int n = states.number(i);
          if (n >= dstate) break;
          const auto value = coefficients<kMethod>(delta, poles[i]);
          const float input = held_input<kMethod>(delta, x[e], value) * projection(rank + n, e);
          h[e][i] = fmaf(value.abar, h[e][i], input);
          y[e] = fmaf(projection(rank + dstate + n, e), h[e][i], y[e]);
        }
      }
    });
    sum_lanes<kChannelLanes>(y);
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      // If lanes take turns at their channel's states, each turn adds its sum.
      const int at = value_index<kRows>(local, row_of(e));
      if (!is_first && states.exist[e]) y[e] += sums[at];
      if (is_last) {
        y[e] = fmaf(D, x[e], y[e]) * own.gates()[at];
        send_channel<kChannelLanes>(own, own.exchange.y, own.epoch + kY,
                                    lane == 0 && states.exist[e], local, row_of(e), y[e]);
      } else {
        __syncwarp();
        if (lane == 0 && states.exist[e]) sums[at] = y[e];
      }
    }
    __syncwarp();
  }
  for_each_slot(own, states, [&](int e, int64_t first) {
#pragma unroll
    for (int i = 0; i < kLaneStates; ++i) {
      if (states.number(i) >= dstate) break;
      store_element(layer.state, params.state.dtype, first + i * kChannelLanes * params.state.state,
                    h[e][i]);
    }
  });
}

/// Divides dt, B and C of every row by their root mean square. A warp takes one of them at a time,
/// and its lanes add the squares.
template <class W, int kRows>
__device__ __forceinline__ void norm_projections(const Block<W, kRows>& own) {
  constexpr int kParts = 3;
  const int rank = static_cast<int>(own.params.rank), dstate = static_cast<int>(own.params.dstate);
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) / kWarpSize; i < kParts * own.rows;
       i += kComputeWarps) {
    const int row = i / kParts, part = i % kParts;
    const int first = part == 0 ? 0 : rank + (part - 1) * dstate;
    const int count = part == 0 ? rank : dstate;
    const auto value_at = [&](int number) -> float& {
      return own.projections()[value_index<kRows>(first + number, row)];
    };
    float squares = 0;
    for (int n = lane; n < count; n += kWarpSize) {
      squares = fmaf(value_at(n), value_at(n), squares);
    }
    const float mean = sum_of_lanes<kWarpSize>(squares) / static_cast<float>(count);
    const float scale = rsqrtf(mean + static_cast<float>(own.params.inner_eps));
    for (int n = lane; n < count; n += kWarpSize) value_at(n) *= scale;
  }
  meet();
}

/// Computes y of own channels, for kEntries batch entries at a time.
template <int kEntries, class W, int kRows>
__device__ __forceinline__ void scan(const Block<W, kRows>& own, const StepLayer& layer,
                                     const float* inputs) {
  const int batch = static_cast<int>(own.params.batch), channels = own.channels.count;
  const int lane = threadIdx.x % kChannelLanes;
  constexpr int kItems = kComputeThreads / kChannelLanes;
  const auto [channel, entry, exists] =
      own.channel_at(static_cast<int>(threadIdx.x) / kChannelLanes, kItems);
  const int local = entry < own.side_by_side ? channel : channels;
  LaneStates<kEntries> next;
  next.local = local;
  next.first = lane;
  next.entry = entry;
  next.stride = own.side_by_side;
  fetch_states(own, layer, next);
  StepPole poles[kLaneStates];
  find_poles(own, next, poles);
  receive_columns<kRows>(own.words(own.exchange.projections),
                         static_cast<int>(own.params.projections()), own.rows,
                         own.epoch + kProjections, [&](int index, Word word) {
                           own.projections()[value_index<kRows>(index / kRows, index % kRows)] =
                               bit_cast<float>(value_of(word));
                         });
  __pipeline_wait_prior(0);
  meet();
  if (own.params.has_inner_norms()) norm_projections(own);
  bool has_next = true;
#pragma unroll 1
  while (has_next) {
    const LaneStates<kEntries> now = next;
    next.entry += kEntries * next.stride;
    if (next.entry - entry >= batch) {
      next.entry = entry;
      next.first += kTurnStates;
    }
    if (next.first - lane >= own.params.dstate) {
      next.first = lane;
      next.local += kItems;
    }
    has_next = next.local - local < channels;
    if (has_next) fetch_states(own, layer, next);
    if (now.any_exist()) scan_states(own, layer, inputs, now, poles);
    if (has_next) find_poles(own, next, poles);
  }
}

}  // namespace selective_scan::cuda::step
