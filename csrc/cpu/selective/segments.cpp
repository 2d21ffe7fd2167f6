#include "segments.h"

#include <algorithm>

#include "../../core/affine_map.h"

namespace selective_scan::cpu {
namespace {

/// A segment is about so long where sequences are long enough for several sets of them. Its map
/// costs a few steps' worth, and a set is the least that a thread can take.
constexpr int64_t kSegmentSteps = 2 * kStateChunk;

/// By how much segments must use the lanes better than channels do, since they take more work.
constexpr int64_t kWorthwhileGain = 2;

/// Rows of states, a whole number apart.
template <class T>
struct Rows {
  T* data;
  int64_t dstate;
  T* operator[](int64_t row) const { return data + row * dstate; }
};

template <class T>
void load_row(const ArrayView& view, int64_t batch, int64_t channel, int64_t dstate, T* row) {
  using R = real_t<T>;
  R* values = reinterpret_cast<R*>(row);
  constexpr int kParts = is_complex_v<T> ? 2 : 1;
  for (int64_t i = 0; i < dstate * kParts; ++i) {
    const int64_t offset = batch * view.batch + channel * view.channel + i / kParts * view.state +
                           i % kParts * view.imag;
    values[i] = view.present() ? load_element<R>(view.data, view.dtype, offset) : R(0);
  }
}

template <class T>
void store_row(const ArrayView& view, int64_t batch, int64_t channel, int64_t dstate,
               const T* row) {
  using R = real_t<T>;
  if (!view.present()) return;
  const R* values = reinterpret_cast<const R*>(row);
  constexpr int kParts = is_complex_v<T> ? 2 : 1;
  for (int64_t i = 0; i < dstate * kParts; ++i) {
    const int64_t offset = batch * view.batch + channel * view.channel + i / kParts * view.state +
                           i % kParts * view.imag;
    store_element<R>(view.data, view.dtype, offset, values[i]);
  }
}

/// Row s of the boundaries is before segment s. The maps' offsets lie where their results will:
/// behind the segment if `forward`, else before it.
template <class T>
void join(const ScanParams& params, const Segmentation& segmentation, int64_t batch,
          int64_t channel, bool forward, const ArrayView& start, const ArrayView& end) {
  const int64_t dstate = params.dstate;
  const int64_t count = segmentation.count;
  const int64_t row = batch * params.dim + channel;
  const Rows<T> factors{static_cast<T*>(segmentation.factors) + row * count * dstate, dstate};
  const Rows<T> boundaries{static_cast<T*>(segmentation.boundaries) + row * (count + 1) * dstate,
                           dstate};
  load_row(start, batch, channel, dstate, boundaries[forward ? 0 : count]);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t segment = forward ? i : count - 1 - i;
    const T* before = boundaries[forward ? segment : segment + 1];
    T* after = boundaries[forward ? segment + 1 : segment];
    const T* factor = factors[segment];
    for (int64_t n = 0; n < dstate; ++n) after[n] = apply_map(factor[n], after[n], before[n]);
  }
  store_row(end, batch, channel, dstate, boundaries[forward ? count : 0]);
}

void join(const ScanParams& params, const Segmentation& segmentation, int64_t batch,
          int64_t channel, bool forward, const ArrayView& start, const ArrayView& end) {
  const auto join_of_type =
      params.is_complex ? (params.is_double ? &join<Complex<double>> : &join<Complex<float>>)
                        : (params.is_double ? &join<double> : &join<float>);
  join_of_type(params, segmentation, batch, channel, forward, start, end);
}

}  // namespace

Segmentation segmentation_of(const ScanParams& params, int64_t lanes) {
  Segmentation segmentation;
  const int64_t group_channels = params.dim / params.groups;
  const int64_t most_segments = ceil_div(params.seqlen, kStateChunk);
  if (std::min(most_segments, lanes) < kWorthwhileGain * group_channels) return segmentation;
  const int64_t sets = ceil_div(params.seqlen, lanes * kSegmentSteps);
  const int64_t steps = ceil_div(params.seqlen, sets * lanes);
  segmentation.steps = round_up(steps, kStateChunk);
  segmentation.count = ceil_div(params.seqlen, segmentation.steps);
  segmentation.lanes = lanes;
  return segmentation;
}

void take_arrays(Segmentation& segmentation, const ScanParams& params, Arena& arena) {
  if (!segmentation.present()) return;
  const int64_t state_bytes =
      params.dstate * (params.is_double ? 8 : 4) * (params.is_complex ? 2 : 1);
  const int64_t row_bytes = params.batch * params.dim * state_bytes;
  segmentation.factors = arena.take<char>(row_bytes * segmentation.count);
  segmentation.boundaries = arena.take<char>(row_bytes * (segmentation.count + 1));
}

void join_segments(const ForwardParams& params, const Segmentation& segmentation, int64_t batch,
                   int64_t channel) {
  join(params, segmentation, batch, channel, true, params.initial_state, params.last_state);
}

void join_segments(const BackwardParams& params, const Segmentation& segmentation, int64_t batch,
                   int64_t channel) {
  join(params, segmentation, batch, channel, false, params.dlast_state, params.dinitial_state);
}

}  // namespace selective_scan::cpu
