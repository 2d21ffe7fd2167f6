#include "segments.h"

#include <algorithm>

#include "launch_tools.h"
#include "states.cuh"

namespace selective_scan::cuda {

namespace {

/// The segments that a thread loads at a time.
template <class T>
constexpr int kCombined = sizeof(T) == 4 ? 32 : 16;
constexpr int kCombineThreads = 64;  // few, so that many multiprocessors take part

/// Returns false for the NaN factor of a segment that leaves its offset, whatever enters it.
template <class R>
__device__ bool is_number(R value) {
  return value == value;
}
template <class R>
__device__ bool is_number(Complex<R> value) {
  return value.re == value.re;
}

/// A thread follows one (batch, channel, state) through the segments. It replaces each segment's
/// offset by the state that enters the segment; with kIsMap it instead composes the segments' maps
/// and stores the result.
template <class T, bool kIsMap>
__global__ void __launch_bounds__(kCombineThreads)
    combine_segments_kernel(ScanParams params, ArrayView initial, ArrayView map_factor,
                            ArrayView map_offset, int64_t segments, int padded, bool backwards,
                            SegmentStates states) {
  const int64_t count = params.batch * params.dim * padded;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kCombineThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x; i < count;
       i += threads) {
    const int64_t state = i % padded;
    const int64_t row = i / padded;
    const auto index_in = [&](const ArrayView& view) {
      return row / params.dim * view.batch + row % params.dim * view.channel + state * view.state;
    };
    T value{};
    T product = one<T>();
    if (!kIsMap && state < params.dstate) value = load_component<T>(initial, index_in(initial));
    const int64_t stride = backwards ? -count : count;
    const int64_t entry = (backwards ? (segments - 1) * count : 0) + i;
    const T* factors = static_cast<const T*>(states.factors) + entry;
    T* offsets = static_cast<T*>(states.offsets) + entry;
    const auto combine = [&](const auto& exists) {
      T factor[kCombined<T>];
      T offset[kCombined<T>];
#pragma unroll
      for (int k = 0; k < kCombined<T>; ++k) {
        const int64_t at = exists(k) ? k * stride : 0;
        factor[k] = factors[at];
        offset[k] = offsets[at];
      }
#pragma unroll
      for (int k = 0; k < kCombined<T>; ++k) {
        if (!kIsMap && exists(k)) offsets[k * stride] = value;
        const T mapped = apply_map(factor[k], offset[k], value);
        value = exists(k) ? is_number(factor[k]) ? mapped : offset[k] : value;
        if (kIsMap && exists(k)) product = apply_map(factor[k], T{}, product);
      }
    };
    // The last segment has no summary, unless the map of all steps is wanted.
    int64_t left = segments - (kIsMap ? 0 : 1);
    for (; left >= kCombined<T>; left -= kCombined<T>) {
      combine([](int) { return true; });
      factors += kCombined<T> * stride;
      offsets += kCombined<T> * stride;
    }
    if (left > 0) combine([&](int k) { return k < left; });
    if constexpr (!kIsMap) {
      offsets[left * stride] = value;
    } else if (state < params.dstate) {
      if (map_factor.present()) store_component(map_factor, index_in(map_factor), product);
      store_component(map_offset, index_in(map_offset), value);
    }
  }
}

template <bool kIsMap>
cudaError_t launch(const Summaries& of, const ArrayView& initial, const ArrayView& factor,
                   const ArrayView& offset, cudaStream_t stream) {
  const int64_t count = of.params.batch * of.params.dim * of.padded_states;
  const LaunchShape shape{std::min(ceil_div(count, kCombineThreads), kMaxBlocks), kCombineThreads};
  return with_state_type(of.params, [&]<class T>(T*) {
    return launch_kernel(combine_segments_kernel<T, kIsMap>, shape, stream, of.params, initial,
                         factor, offset, of.segments, of.padded_states, of.backwards, of.states);
  });
}

}  // namespace

cudaError_t Summaries::combine(const ArrayView& initial, cudaStream_t stream) const {
  return launch<false>(*this, params.packed.present() ? ArrayView() : initial, {}, {}, stream);
}

cudaError_t Summaries::store_map(const ArrayView& factor, const ArrayView& offset,
                                 cudaStream_t stream) const {
  return launch<true>(*this, {}, factor, offset, stream);
}

}  // namespace selective_scan::cuda
