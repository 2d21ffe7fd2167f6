// Some steps of the causal convolution, its state changed in place. A thread has one channel of one
// row, so that nothing that it reads is written by another.

#include "launch.cuh"

namespace selective_scan::cuda {
namespace conv {
namespace {

constexpr int kUpdateThreads = 128;
constexpr int kTaps = static_cast<int>(kMaxConvWidth);

/// The values of one channel in one row of an array, or in one slot.
template <class R>
struct Column {
  const ArrayView& array;
  int64_t offset;

  __device__ Column(const ArrayView& array, int64_t outer, int64_t channel)
      : array(array), offset(outer * array.batch + channel * array.channel) {}

  __device__ R load(int64_t step) const {
    return load_element<R>(array.data, array.dtype, offset + step * array.step);
  }
  __device__ void store(int64_t step, R value) const {
    store_element(array.data, array.dtype, offset + step * array.step, value);
  }
};

/// This finds where the state has x of a step; of a ring the places come round again.
class StateSteps {
 public:
  /// Begins at the first of the call's steps.
  __device__ StateSteps(const ConvUpdateParams& params, int64_t row)
      : length_(params.state_len), is_ring_(params.cache_seqlens.present()) {
    if (!is_ring_ || length_ == 0) return;
    first_ = params.cache_seqlens.at(row) % length_;
    if (first_ < 0) first_ += length_;
  }

  /// Returns the place of one of the at most state_len steps before it.
  __device__ int64_t before(int64_t distance) const {
    const int64_t place = (is_ring_ ? first_ : length_) - distance;
    return place < 0 ? place + length_ : place;
  }
  /// After a call of so many steps; negative where the state has lost it by then.
  __device__ int64_t after(int64_t step, int64_t steps) const {
    return is_ring_ ? (length_ == 0 ? -1 : (first_ + step) % length_) : length_ - steps + step;
  }

 private:
  int64_t length_;
  int64_t first_ = 0;
  bool is_ring_;
};

template <class R>
__global__ void __launch_bounds__(kUpdateThreads)
    update_kernel(const __grid_constant__ ConvUpdateParams params) {
  const int64_t index = int64_t{blockIdx.x} * kUpdateThreads + threadIdx.x;
  const int64_t row = index / params.dim, channel = index - row * params.dim;
  if (row >= params.batch) return;
  const Column<R> x(params.x, row, channel), out(params.out, row, channel);
  const int64_t slot = params.slot_of(row);
  if (slot == ConvUpdateParams::kNoSlot) {
    for (int64_t step = 0; step < params.seqlen; ++step) out.store(step, R(0));
    return;
  }

  const Column<R> state(params.conv_state, slot, channel);
  const StateSteps places(params, row);
  const int first = first_tap<kTaps>(params);
  R weight[kTaps], window[kTaps];
#pragma unroll
  for (int k = 0; k < kTaps; ++k) {
    weight[k] = k >= first ? load_tap<R>(params, channel, k - first) : R(0);
    window[k] = k >= first && k + 1 < kTaps ? state.load(places.before(kTaps - 1 - k)) : R(0);
  }
  const R bias = load_bias<R>(params, channel);
  if (!params.cache_seqlens.present()) {
    for (int64_t i = 0; i + params.seqlen < params.state_len; ++i) {
      state.store(i, state.load(i + params.seqlen));
    }
  }
  for (int64_t step = 0; step < params.seqlen; ++step) {
    window[kTaps - 1] = x.load(step);
    const auto weight_of = [&](int k) { return weight[k]; };
    const auto value_of = [&](int k) { return window[k]; };
    R sum[1] = {add_products<kTaps>(bias, first, weight_of, value_of)};
    activate(sum, params.silu);
    const int64_t place = places.after(step, params.seqlen);
    if (place >= 0) state.store(place, window[kTaps - 1]);
    out.store(step, sum[0]);  // last: it may be x
#pragma unroll
    for (int k = 1; k < kTaps; ++k) window[k - 1] = window[k];
  }
}

}  // namespace
}  // namespace conv

cudaError_t causal_conv1d_update(const ConvUpdateParams& params, cudaStream_t stream) {
  using namespace conv;
  const LaunchShape shape{ceil_div(params.batch * params.dim, int64_t{kUpdateThreads}),
                          kUpdateThreads};
  return with_real(
      params, [&]<class R>(R*) { return launch_kernel(update_kernel<R>, shape, stream, params); });
}

}  // namespace selective_scan::cuda
