// What a block does with its own channels between the products: convolution, Δ, states, gate.
#pragma once

#include "../../core/method_table.h"
#include "block.cuh"

namespace selective_scan::cuda::step {

/// Calls f.operator()<kMethod>() for a method that is known at run time.
template <class F>
__device__ __forceinline__ void with_method(Method method, const F& f) {
  const auto call = [&]<int kIndex>() {
    constexpr auto kMethod = static_cast<Method>(kIndex);
    if constexpr (is_built(kMethod)) {
      if (method == kMethod) f.template operator()<kMethod>();
    }
  };
  [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
    (call.template operator()<kIndices>(), ...);
  }(std::make_integer_sequence<int, kNumMethods>());
}

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
  item.entry = item.exists ? index / own.channels.count : 0;
  item.local = item.exists ? index - item.entry * own.channels.count : 0;
  item.channel = own.channels.first + item.local;
  item.slot = own.params.slot(item.entry);
  item.has_state = item.exists && item.slot != StepParams::kNoSlot;
  return item;
}

/// x of own channels behind the convolution, which is sent: a thread has a channel of an entry.
template <class W, int kRows>
__device__ __forceinline__ void convolve(const Block<W, kRows>& own, const StepLayer& layer) {
  meet();
  const StepParams& params = own.params;
  const int items = own.channels.count * static_cast<int>(params.batch);
  const int steps = static_cast<int>(params.steps), width = static_cast<int>(params.width);
  const ArrayView& view = params.conv_state;
#pragma unroll 1
  for (int first = 0; first < items; first += kComputeThreads) {
    const Item item = item_at(own, first + static_cast<int>(threadIdx.x));
    const W* const weights = static_cast<const W*>(layer.conv) + item.channel * width;
    const int64_t state = item.slot * view.batch + item.channel * view.channel;
    const float bias = fetch_optional(layer.conv_bias, params.conv_bias_dtype, item.channel)
                           .value(params.conv_bias_dtype);
    const float in_bias = fetch_optional(layer.in_bias, params.in_bias_dtype, item.channel)
                              .value(params.in_bias_dtype);
    const float* const x = own.xz() + item.local * kRows + item.entry * steps;
    // What the convolution sees: its state, then the steps.
    const auto seen = [&](int at) {
      if (at >= width - 1) return x[at - (width - 1)] + in_bias;
      if (!item.has_state) return 0.0f;
      return RawElement(layer.conv_state, view.dtype, state + at * view.step).value(view.dtype);
    };
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      float sum = bias;
#pragma unroll 4
      for (int k = 0; k < width; ++k) sum = fmaf(to_real(weights[k]), seen(step + k), sum);
      const float value = sum * device_sigmoid(sum);
      const int row = item.entry * steps + step;
      if (item.exists) own.x()[item.local * kRows + row] = value;
      send_channel<1>(own, own.exchange.x, own.epoch + kX, item.exists, item.local, row, value);
    }
    if (!item.has_state) continue;
#pragma unroll 1
    for (int k = 0; k + 1 < width; ++k) {
      store_element(layer.conv_state, view.dtype, state + k * view.step, seen(steps + k));
    }
  }
}

// So many lanes share a channel's states, one by one.
constexpr int kChannelLanes = 16;
constexpr int kItems = kComputeThreads / kChannelLanes;  // at a time

/// What a lane has of a channel: its state number n.
struct ItemState {
  Item item;
  int n;
  bool exists;
  int64_t offset;  // of h
  RawElement A_log, h, bias, D;
};
template <class W, int kRows>
__device__ __forceinline__ ItemState fetch_state(const Block<W, kRows>& own, const StepLayer& layer,
                                                 int first_item, int first_state) {
  const StepParams& params = own.params;
  ItemState state;
  Item& item = state.item;
  item = item_at(own, first_item + static_cast<int>(threadIdx.x) / kChannelLanes);
  state.n = first_state + static_cast<int>(threadIdx.x) % kChannelLanes;
  state.exists = state.n < params.dstate;
  state.offset = item.slot * params.state.batch + item.channel * params.state.channel +
                 state.n * params.state.state;
  if (state.exists) {
    state.A_log = RawElement(layer.A_log, params.A_dtype, item.channel * params.dstate + state.n);
    if (item.has_state) state.h = RawElement(layer.state, params.state.dtype, state.offset);
  }
  state.bias = fetch_optional(layer.dt_bias, params.dt_bias_dtype, item.channel);
  state.D = RawElement(layer.D, params.D_dtype, item.channel);
  return state;
}

/// All steps of a state. y of its channel, a sum over states, is sent behind the last of these.
template <class W, int kRows>
__device__ __forceinline__ void scan_state(const Block<W, kRows>& own, const StepLayer& layer,
                                           const ItemState& state, bool is_last) {
  const Item& item = state.item;
  const StepParams& params = own.params;
  const int steps = static_cast<int>(params.steps), rank = static_cast<int>(params.rank);
  const int dstate = static_cast<int>(params.dstate);
  const int lane = threadIdx.x % kChannelLanes;
  const auto pole =
      make_pole<DeviceMath>(-DeviceMath::exp(state.A_log.value(params.A_dtype)), params.method);
  float h = state.h.value(params.state.dtype);
  const float bias = state.bias.value(params.dt_bias_dtype);
  const float D = state.D.value(params.D_dtype);
  const float z_bias =
      fetch_optional(layer.in_bias, params.in_bias_dtype, params.inner + item.channel)
          .value(params.in_bias_dtype);
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
    if (state.exists) {
      const float* const B = own.projections() + (rank + state.n) * kRows + row;
      with_method(params.method, [&]<Method kMethod>() {
        const auto value = coefficients<kMethod>(delta, pole);
        h = value.abar * h + held_input<kMethod>(delta, x, value) * B[0];
      });
      y = B[dstate * kRows] * h;
    }
    y = sum_of_lanes<kChannelLanes>(y);
    // There are several sums where there are more states than lanes.
    float& sum = own.template shared<float>(own.plan.shared.y)[item.local * kRows + row];
    if (state.n >= kChannelLanes && item.exists) y += sum;
    if (!is_last) {
      __syncwarp();
      if (lane == 0 && item.exists) sum = y;
      __syncwarp();
      continue;
    }
    const float z = own.xz()[(own.channels.count + item.local) * kRows + row] + z_bias;
    y = fmaf(D, x, y) * (z * device_sigmoid(z));
    send_channel<kChannelLanes>(own, own.exchange.y, own.epoch + kY, lane == 0 && item.exists,
                                item.local, row, y);
  }
  if (state.exists && item.has_state) {
    store_element(layer.state, params.state.dtype, state.offset, h);
  }
}

/// y of own channels.
template <class W, int kRows>
__device__ __forceinline__ void scan(const Block<W, kRows>& own, const StepLayer& layer) {
  ItemState next = fetch_state(own, layer, 0, 0);
  receive<kRows>(own.words(own.exchange.projections), static_cast<int>(own.params.projections()),
                 own.rows, own.epoch + kProjections, [&](int index, uint32_t value) {
                   own.projections()[index] = bit_cast<float>(value);
                 });
  __pipeline_wait_prior(0);
  meet();
  const int items = own.channels.count * static_cast<int>(own.params.batch);
  int item = 0, n = 0;
#pragma unroll 1
  while (item < items) {
    const ItemState now = next;
    n += kChannelLanes;
    const bool is_last = n >= static_cast<int>(own.params.dstate);
    if (is_last) {
      n = 0;
      item += kItems;
    }
    if (item < items) next = fetch_state(own, layer, item, n);
    scan_state(own, layer, now, is_last);
  }
}

}  // namespace selective_scan::cuda::step
