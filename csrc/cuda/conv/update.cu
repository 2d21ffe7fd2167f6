// A few steps of the causal convolution, with the state updated in place. A thread has one channel
// of one row, so that no other thread writes what it reads, and it issues all loads before it waits
// for any. Bound by latency, from the launch to the last store. Therefore it is launched before the
// preceding kernel has ended.

#include <algorithm>

#include "launch.cuh"

namespace selective_scan::cuda {
namespace conv {
namespace {

constexpr int kUpdateThreads = 128;
constexpr int kUpdateBlocks = 6;  // per multiprocessor, at least

/// One channel in one row of an array, or in one slot.
template <class R>
struct Column {
  const ArrayView& array;
  int64_t offset;

  __device__ Column(const ArrayView& array, int64_t outer, int64_t channel)
      : array(array), offset(outer * array.batch + channel * array.channel) {}

  __device__ RawOf<R> fetch(int64_t step, bool exists) const {
    return RawOf<R>(array, offset + step * array.step, exists);
  }
  __device__ R load(int64_t step) const { return fetch(step, true).value(array.dtype); }
  __device__ void store(int64_t step, R value) const {
    store_element(array.data, array.dtype, offset + step * array.step, value);
  }
};

/// Finds the place of a step's x in the state, which may be a ring buffer.
class StateSteps {
 public:
  /// Starts at the first of the call's steps.
  __device__ StateSteps(const ConvUpdateParams& params, int64_t row)
      : length_(params.state_len), is_ring_(params.cache_seqlens.present()) {
    if (!is_ring_ || length_ == 0) return;
    first_ = params.cache_seqlens.at(row) % length_;
    if (first_ < 0) first_ += length_;
  }

  /// Returns the place of the step that is `distance` before the first one, at most state_len.
  __device__ int64_t before(int64_t distance) const {
    const int64_t place = (is_ring_ ? first_ : length_) - distance;
    return place < 0 ? place + length_ : place;
  }
  /// Returns the place of a step after a call of `steps` steps; negative if the state has lost it
  /// by then.
  __device__ int64_t after(int64_t step, int64_t steps) const {
    return is_ring_ ? (length_ == 0 ? -1 : (first_ + step) % length_) : length_ - steps + step;
  }

 private:
  int64_t length_;
  int64_t first_ = 0;
  bool is_ring_;
};

template <class R, int kTaps>
__device__ __forceinline__ void update_channel(const ConvUpdateParams& params, int64_t row,
                                               int64_t channel) {
  const Column<R> x(params.x, row, channel), out(params.out, row, channel);
  const int64_t slot = params.slot_of(row);
  if (slot == ConvUpdateParams::kNoSlot) {
    for (int64_t step = 0; step < params.seqlen; ++step) out.store(step, R(0));
    return;
  }

  const Column<R> state(params.conv_state, slot, channel), taps(params.weight, 0, channel);
  const StateSteps places(params, row);
  const int first = first_tap<kTaps>(params);
  RawOf<R> raw_weight[kTaps], raw_window[kTaps];
#pragma unroll
  for (int k = 0; k < kTaps; ++k) {
    const int distance = kTaps - 1 - k;
    const bool is_before = distance > 0 && distance <= params.state_len;
    raw_weight[k] = taps.fetch(k - first, k >= first);
    raw_window[k] = state.fetch(is_before ? places.before(distance) : 0, is_before);
  }
  const RawOf<R> raw_bias(params.bias, channel * params.bias.channel, true);
  RawOf<R> raw_x = x.fetch(0, params.seqlen > 0);
  R weight[kTaps], window[kTaps];
#pragma unroll
  for (int k = 0; k < kTaps; ++k) {
    weight[k] = raw_weight[k].value(params.weight.dtype);
    window[k] = raw_window[k].value(params.conv_state.dtype);
  }
  const R bias = raw_bias.value(params.bias.dtype);

  // The window holds all of a short state. The steps of a ring stay where they are.
  const bool is_ring = params.cache_seqlens.present();
  const bool is_short = !is_ring && params.state_len < kTaps;
  if (!is_ring && !is_short) {
    for (int64_t i = 0; i + params.seqlen < params.state_len; ++i) {
      state.store(i, state.load(i + params.seqlen));
    }
  }
  for (int64_t step = 0; step < params.seqlen; ++step) {
    window[kTaps - 1] = raw_x.value(params.x.dtype);
    raw_x = x.fetch(step + 1, step + 1 < params.seqlen);
    const auto weight_of = [&](int k) { return weight[k]; };
    const auto value_of = [&](int k) { return window[k]; };
    R sum[1] = {add_products<kTaps>(bias, first, weight_of, value_of)};
    activate(sum, params.silu);
    const int64_t place = places.after(step, params.seqlen);
    if (!is_short && place >= 0) state.store(place, window[kTaps - 1]);
    out.store(step, sum[0]);  // after the load of x, because out may be x
#pragma unroll
    for (int k = 1; k < kTaps; ++k) window[k - 1] = window[k];
  }
  if (!is_short) return;
#pragma unroll
  for (int distance = 1; distance < kTaps; ++distance) {
    if (distance <= params.state_len) {
      state.store(params.state_len - distance, window[kTaps - 1 - distance]);
    }
  }
}

template <class R, int kTaps>
__global__ void __launch_bounds__(kUpdateThreads, fitting_blocks(kUpdateThreads, kUpdateBlocks))
    update_kernel(const __grid_constant__ ConvUpdateParams params) {
  wait_for_primary();
  const int64_t channel = int64_t{blockIdx.x} * kUpdateThreads + threadIdx.x;
  if (channel >= params.dim) return;
  for (int64_t row = blockIdx.y; row < params.batch; row += gridDim.y) {
    update_channel<R, kTaps>(params, row, channel);
  }
}

}  // namespace
}  // namespace conv

cudaError_t launch(const ConvUpdateParams& params, const ScratchMemory&, cudaStream_t stream) {
  using namespace conv;
  LaunchShape shape{ceil_div(params.dim, int64_t{kUpdateThreads}), kUpdateThreads};
  shape.rows = std::min(params.batch, kMaxRows);
  shape.is_dependent = true;
  const bool is_common = params.width == kCommonWidth && params.state_len < kCommonWidth;
  return with_real(params, [&]<class R>(R*) {
    constexpr int kMostTaps = static_cast<int>(kMaxConvWidth);
    return is_common ? launch_kernel(update_kernel<R, kCommonWidth>, shape, stream, params)
                     : launch_kernel(update_kernel<R, kMostTaps>, shape, stream, params);
  });
}

}  // namespace selective_scan::cuda
