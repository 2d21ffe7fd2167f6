// What a block does with its own channels between the products: convolution, Δ, states, gate.
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

/// Sends a channel's value, which in `stride` lanes' distance is a pair with another one's; all
/// lanes call.
template <int kStride, class W, int kRows>
__device__ __forceinline__ void send_channel(const Block<W, kRows>& own, int64_t offset,
                                             uint32_t epoch, bool is_sender, int local, int row,
                                             float value) {
  constexpr int kWordValues = Block<W, kRows>::kWordValues;
  Word* const word =
      own.words(offset) + (row * own.params.inner + own.channels.first + local) / kWordValues;
  if constexpr (kWordValues == 2) {
    const float other = __shfl_xor_sync(kFullMask, value, kStride);
    const Pack<W, 2> pair{{from_real<W>(value), from_real<W>(other)}};
    if (is_sender && local % 2 == 0) send(word, bit_cast<uint32_t>(pair), epoch);
  } else if (is_sender) {
    send(word, value, epoch);
  }
}

/// A channel of a batch entry.
struct Item {
  bool exists;
  bool has_state;
  int local;
  int entry;
  int64_t channel;
  int64_t slot;
};
template <class W, int kRows>
__device__ __forceinline__ Item item_at(const Block<W, kRows>& own, int index) {
  Item item;
  item.exists = index < own.channels.count * static_cast<int>(own.params.batch);
  item.entry = item.exists ? static_cast<int>(__umulhi(index, own.inverse_channels)) : 0;
  item.local = item.exists ? index - item.entry * own.channels.count : 0;
  item.channel = own.channels.first + item.local;
  item.slot = own.params.slot(item.entry);
  item.has_state = item.exists && item.slot != StepParams::kNoSlot;
  return item;
}

/// x of own channels behind the convolution, which is sent: a thread has a channel of an entry.
/// Those that do not multiply do this, while the others begin with z. All meet before, although
/// these alone would do: it costs nothing, and racecheck does not follow a barrier of some warps.
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
    const Item item = item_at(own, first + lane);
    const float* const x = own.in() + item.local * kRows + item.entry * steps;
    const float* const given = inputs + item.local;
    const float* const taps = given + kFirstTap * channels;
    const float* const kept = taps + (width + item.entry * (width - 1)) * channels;
    const float bias = given[kConvBias * channels], x_bias = given[kXBias * channels];
    // What the convolution sees: its state, then the steps.
    const auto seen = [&](int at) {
      return at < width - 1 ? kept[at * channels] : x[at - (width - 1)] + x_bias;
    };
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      float sum = bias;
#pragma unroll 4
      for (int k = 0; k < width; ++k) sum = fmaf(taps[k * channels], seen(step + k), sum);
      const float value = device_silu(sum);
      const int row = item.entry * steps + step;
      if (item.exists) own.x()[item.local * kRows + row] = value;
      send_channel<1>(own, own.exchange.x, own.epoch + kX, item.exists, item.local, row, value);
    }
    if (!item.has_state) continue;
    const ArrayView& view = params.conv_state;
    const int64_t state = item.slot * view.batch + item.channel * view.channel;
#pragma unroll 1
    for (int k = 0; k + 1 < width; ++k) {
      store_element(layer.conv_state, view.dtype, state + k * view.step, seen(steps + k));
    }
  }
}

// So many lanes share a channel, and each has so many of its states at a time.
constexpr int kChannelLanes = 8;
constexpr int kLaneStates = 2;
constexpr int kTurnStates = kChannelLanes * kLaneStates;
constexpr int kItems = kComputeThreads / kChannelLanes;  // at a time

/// What a lane has of a channel: states `first` and those kChannelLanes behind one another.
struct ItemStates {
  Item item;
  int first;
  RawElement A_log[kLaneStates], h[kLaneStates];

  __device__ __forceinline__ int number(int i) const { return first + i * kChannelLanes; }
  __device__ __forceinline__ int64_t offset(const ArrayView& view, int i) const {
    return item.slot * view.batch + item.channel * view.channel + number(i) * view.state;
  }
};
template <class W, int kRows>
__device__ __forceinline__ ItemStates fetch_states(const Block<W, kRows>& own,
                                                   const StepLayer& layer, int first_item,
                                                   int first_state) {
  const StepParams& params = own.params;
  ItemStates states;
  const Item item = item_at(own, first_item + static_cast<int>(threadIdx.x) / kChannelLanes);
  states.item = item;
  states.first = first_state + static_cast<int>(threadIdx.x) % kChannelLanes;
#pragma unroll
  for (int i = 0; i < kLaneStates; ++i) {
    const int n = states.number(i);
    if (n >= params.dstate) break;
    states.A_log[i] = RawElement(layer.A_log, params.A_dtype, item.channel * params.dstate + n);
    if (!item.has_state) continue;
    states.h[i] = RawElement(layer.state, params.state.dtype, states.offset(params.state, i));
  }
  return states;
}

using StepPole = Pole<float>;
template <class W, int kRows>
__device__ __forceinline__ void find_poles(const Block<W, kRows>& own, const ItemStates& states,
                                           StepPole (&poles)[kLaneStates]) {
#pragma unroll
  for (int i = 0; i < kLaneStates; ++i) {
    poles[i] = make_pole<DeviceMath>(-DeviceMath::exp(states.A_log[i].value(own.params.A_dtype)),
                                     own.params.method);
  }
}

/// All steps of some states. y of their channel, a sum over states, is sent behind the last of
/// them.
template <class W, int kRows>
__device__ __forceinline__ void scan_states(const Block<W, kRows>& own, const StepLayer& layer,
                                            const float* inputs, const ItemStates& states,
                                            const StepPole (&poles)[kLaneStates], bool is_last) {
  const Item& item = states.item;
  const StepParams& params = own.params;
  const int steps = static_cast<int>(params.steps), rank = static_cast<int>(params.rank);
  const int dstate = static_cast<int>(params.dstate);
  const int lane = threadIdx.x % kChannelLanes;
  float h[kLaneStates];
#pragma unroll
  for (int i = 0; i < kLaneStates; ++i) h[i] = states.h[i].value(params.state.dtype);
  const int channels = own.channels.count;
  const float* const given = inputs + item.local;
  const float bias = given[kDtBias * channels];
  const W* const dt_proj = own.template shared<W>(own.plan.shared.dt_proj) + item.local * rank;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int row = item.entry * steps + step;
    float dt = 0;
#pragma unroll 4
    for (int r = lane; r < rank; r += kChannelLanes) {
      dt = fmaf(to_real(dt_proj[r]), own.projections()[r * kRows + row], dt);
    }
    const float delta = step_size(sum_of_lanes<kChannelLanes>(dt) + bias, params.delta_softplus);
    const float x = own.x()[item.local * kRows + row];
    float y = 0;
    const float* const B = own.projections() + (rank + states.first) * kRows + row;
    visit_kernel_method(params.method, [&]<Method kMethod>() {
#pragma unroll
      for (int i = 0; i < kLaneStates; ++i) {
        if (states.number(i) >= dstate) break;
        const auto value = coefficients<kMethod>(delta, poles[i]);
        const float own_B = B[i * kChannelLanes * kRows];
        h[i] = value.abar * h[i] + held_input<kMethod>(delta, x, value) * own_B;
        y = fmaf(B[(dstate + i * kChannelLanes) * kRows], h[i], y);
      }
    });
    y = sum_of_lanes<kChannelLanes>(y);
    // There are several sums where lanes take turns at their channel's states.
    float& sum = own.template shared<float>(own.plan.shared.y)[item.local * kRows + row];
    if (states.first >= kTurnStates && item.exists) y += sum;
    if (!is_last) {
      __syncwarp();
      if (lane == 0 && item.exists) sum = y;
      __syncwarp();
      continue;
    }
    y = fmaf(given[kD * channels], x, y) * own.gates()[item.local * kRows + row];
    send_channel<kChannelLanes>(own, own.exchange.y, own.epoch + kY, lane == 0 && item.exists,
                                item.local, row, y);
  }
  if (!item.has_state) return;
#pragma unroll
  for (int i = 0; i < kLaneStates; ++i) {
    if (states.number(i) >= dstate) break;
    store_element(layer.state, params.state.dtype, states.offset(params.state, i), h[i]);
  }
}

/// y of own channels.
template <class W, int kRows>
__device__ __forceinline__ void scan(const Block<W, kRows>& own, const StepLayer& layer,
                                     const float* inputs) {
  ItemStates next = fetch_states(own, layer, 0, 0);
  StepPole poles[kLaneStates];
  find_poles(own, next, poles);
  receive_columns<kRows>(
      own.words(own.exchange.projections), static_cast<int>(own.params.projections()), own.rows,
      own.epoch + kProjections,
      [&](int index, Word word) { own.projections()[index] = bit_cast<float>(value_of(word)); });
  __pipeline_wait_prior(0);
  meet();
  const int items = own.channels.count * static_cast<int>(own.params.batch);
  constexpr int kWarpItems = kWarpSize / kChannelLanes;
  const int warp_item = static_cast<int>(threadIdx.x) / kWarpSize * kWarpItems;
  int item = 0, n = 0;
#pragma unroll 1
  while (item + warp_item < items) {
    const ItemStates now = next;
    n += kTurnStates;
    const bool is_last = n >= static_cast<int>(own.params.dstate);
    if (is_last) {
      n = 0;
      item += kItems;
    }
    const bool has_next = item + warp_item < items;
    if (has_next) next = fetch_states(own, layer, item, n);
    scan_states(own, layer, inputs, now, poles, is_last);
    if (has_next) find_poles(own, next, poles);
  }
}

}  // namespace selective_scan::cuda::step
