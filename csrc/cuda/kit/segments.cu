#include "segments.h"

#include "launch_tools.h"
#include "states.cuh"

namespace selective_scan::cuda {

namespace {

/// Segments that a thread loads at a time.
template <class T>
constexpr int kCombined = sizeof(T) == 4 ? 32 : 16;
constexpr int kCombineThreads = 64;  // few, for many multiprocessors to take part

/// A factor that is none stands for a segment that leaves its offset, whatever enters it.
template <class R>
__device__ bool is_number(R value) {
  return value == value;
}
template <class R>
__device__ bool is_number(Complex<R> value) {
  return value.re == value.re;
}

/// A thread follows one (batch, channel, state) through the segments.
template <class T>
__global__ void __launch_bounds__(kCombineThreads)
    combine_segments_kernel(ScanParams params, ArrayView initial, int64_t segments, int padded,
                            bool backwards, SegmentStates states) {
  const int64_t count = params.batch * params.dim * padded;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kCombineThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x; i < count;
       i += threads) {
    const int64_t state = i % padded;
    const int64_t row = i / padded;
    T value{};
    if (state < params.dstate) {
      value = load_component<T>(initial, row / params.dim * initial.batch +
                                             row % params.dim * initial.channel +
                                             state * initial.state);
    }
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
        if (exists(k)) offsets[k * stride] = value;
        const T mapped = apply_map(factor[k], offset[k], value);
        value = exists(k) ? is_number(factor[k]) ? mapped : offset[k] : value;
      }
    };
    // The last segment has no summary, and what leaves it nobody needs.
    int64_t left = segments - 1;
    for (; left >= kCombined<T>; left -= kCombined<T>) {
      combine([](int) { return true; });
      factors += kCombined<T> * stride;
      offsets += kCombined<T> * stride;
    }
    if (left > 0) combine([&](int k) { return k < left; });
    offsets[left * stride] = value;
  }
}

/// A thread has one (batch, channel, state).
template <class T>
__global__ void __launch_bounds__(kCombineThreads)
    store_map_kernel(ForwardParams params, int64_t segments, int padded, SegmentStates states) {
  const int64_t count = params.batch * params.dim * padded;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kCombineThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x; i < count;
       i += threads) {
    const int64_t state = i % padded;
    const int64_t row = i / padded;
    if (state >= params.dstate) continue;
    const auto store = [&](const ArrayView& view, T value) {
      const int64_t batch = row / params.dim, channel = row % params.dim;
      store_component(view, batch * view.batch + channel * view.channel + state * view.state,
                      value);
    };
    const T* factors = static_cast<const T*>(states.factors) + i;
    T product = one<T>();
    for (int64_t s = 0; s < segments - 1; ++s) {
      product = apply_map(factors[s * count], T{}, product);
    }
    store(params.map_factor, product);
    store(params.last_state, static_cast<const T*>(states.offsets)[(segments - 1) * count + i]);
  }
}

}  // namespace

template <class T>
cudaError_t store_map(const ForwardParams& params, int64_t segments, int padded_states,
                      const SegmentStates& states, cudaStream_t stream) {
  const int64_t count = params.batch * params.dim * padded_states;
  const unsigned blocks = grid_blocks(ceil_div(count, kCombineThreads));
  store_map_kernel<T>
      <<<blocks, kCombineThreads, 0, stream>>>(params, segments, padded_states, states);
  return cudaGetLastError();
}

template cudaError_t store_map<float>(const ForwardParams&, int64_t, int, const SegmentStates&,
                                      cudaStream_t);
template cudaError_t store_map<double>(const ForwardParams&, int64_t, int, const SegmentStates&,
                                       cudaStream_t);
template cudaError_t store_map<Complex<float>>(const ForwardParams&, int64_t, int,
                                               const SegmentStates&, cudaStream_t);
template cudaError_t store_map<Complex<double>>(const ForwardParams&, int64_t, int,
                                                const SegmentStates&, cudaStream_t);

template <class T>
cudaError_t combine_segments(const ScanParams& params, const ArrayView& initial,
                             const Geometry& geometry, int padded_states, bool backwards,
                             const SegmentStates& segments, cudaStream_t stream) {
  const int64_t count = params.batch * params.dim * padded_states;
  const unsigned blocks = grid_blocks(ceil_div(count, kCombineThreads));
  combine_segments_kernel<T><<<blocks, kCombineThreads, 0, stream>>>(
      params, params.packed.present() ? ArrayView() : initial, geometry.segments, padded_states,
      backwards, segments);
  return cudaGetLastError();
}

template cudaError_t combine_segments<float>(const ScanParams&, const ArrayView&, const Geometry&,
                                             int, bool, const SegmentStates&, cudaStream_t);
template cudaError_t combine_segments<double>(const ScanParams&, const ArrayView&, const Geometry&,
                                              int, bool, const SegmentStates&, cudaStream_t);
template cudaError_t combine_segments<Complex<float>>(const ScanParams&, const ArrayView&,
                                                      const Geometry&, int, bool,
                                                      const SegmentStates&, cudaStream_t);
template cudaError_t combine_segments<Complex<double>>(const ScanParams&, const ArrayView&,
                                                       const Geometry&, int, bool,
                                                       const SegmentStates&, cudaStream_t);

}  // namespace selective_scan::cuda
