#include "segments.h"

#include <algorithm>

#include "../../core/affine_map.h"

namespace selective_scan::cpu {
namespace {

/// The approximate length of segments that are lanes, if sequences are long enough for several sets
/// of them. A segment's map costs a few steps' worth, and a set is the least that a thread can
/// take.
constexpr int64_t kLaneSteps = 2 * kStateChunk;

/// Segments must fill this many times as many lanes as channels do, since they take more work.
constexpr int64_t kWorthwhileGain = 2;

/// Fewer chains than this may leave threads without work.
constexpr int64_t kFewChains = 16;
/// With few chains, segments have at least this many steps, which hides the fixed costs of each,
/// and number at most this many, enough for the threads of a large machine.
constexpr int64_t kChainSteps = 16 * kStateChunk;
constexpr int64_t kMostSegments = 64;
/// Fewer segments would gain nothing, since the first and the last one wait for each other.
constexpr int64_t kFewestSegments = 4;

/// Contiguous rows of states.
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

/// See join_segments(). Row s of the boundaries is before segment s. Each map's offset lies where
/// its result goes: after the segment if `forward`, else before it.
template <class T>
void join(const ScanParams& params, const Segmentation& segmentation, int64_t batch,
          int64_t channel, int64_t begin, int64_t end, bool forward, const ArrayView& first,
          const ArrayView& last) {
  const int64_t dstate = params.dstate;
  const int64_t count = segmentation.count;
  const int64_t row = batch * params.dim + channel;
  const Rows<T> factors{static_cast<T*>(segmentation.factors) + row * count * dstate, dstate};
  const Rows<T> boundaries{static_cast<T*>(segmentation.boundaries) + row * (count + 1) * dstate,
                           dstate};
  if (begin == 0) load_row(first, batch, channel, dstate, boundaries[forward ? 0 : count]);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t segment = forward ? i : count - 1 - i;
    const T* before = boundaries[forward ? segment : segment + 1];
    T* after = boundaries[forward ? segment + 1 : segment];
    const T* factor = factors[segment];
    for (int64_t n = 0; n < dstate; ++n) after[n] = apply_map(factor[n], after[n], before[n]);
  }
  if (end == count) store_row(last, batch, channel, dstate, boundaries[forward ? count : 0]);
}

void join(const ScanParams& params, const Segmentation& segmentation, int64_t batch,
          int64_t channel, int64_t begin, int64_t end, bool forward, const ArrayView& first,
          const ArrayView& last) {
  const auto join_of_type =
      params.is_complex ? (params.is_double ? &join<Complex<double>> : &join<Complex<float>>)
                        : (params.is_double ? &join<double> : &join<float>);
  join_of_type(params, segmentation, batch, channel, begin, end, forward, first, last);
}

template <class T>
void store_map_factor(const ForwardParams& params, const Segmentation& segmentation, int64_t batch,
                      int64_t channel) {
  const int64_t row = (batch * params.dim + channel) * segmentation.count;
  const Rows<T> factors{static_cast<T*>(segmentation.factors) + row * params.dstate, params.dstate};
  T* product = factors[0];
  for (int64_t segment = 1; segment < segmentation.count; ++segment) {
    const T* factor = factors[segment];
    for (int64_t n = 0; n < params.dstate; ++n) {
      product[n] = apply_map(factor[n], T{}, product[n]);
    }
  }
  store_row(params.map_factor, batch, channel, params.dstate, product);
}

int64_t most_segments(const ScanParams& params) {
  return ceil_div(params.seqlen, kStateChunk);
}

}  // namespace

bool lanes_are_groups(const ScanParams& params, int64_t lanes) {
  const int64_t filled = std::min(params.groups, lanes);
  const int64_t filled_by_segments = std::min(most_segments(params), lanes);
  return filled >= kWorthwhileGain * (params.dim / params.groups) &&
         kWorthwhileGain * filled >= filled_by_segments;
}

Segmentation segmentation_of(const ScanParams& params, const Partition& partition, int64_t lanes,
                             int64_t chain_channels) {
  Segmentation segmentation;
  const int64_t group_channels = partition.group_channels;
  if (std::min(most_segments(params), lanes) >= kWorthwhileGain * group_channels) {
    const int64_t sets = ceil_div(params.seqlen, lanes * kLaneSteps);
    segmentation.lanes = lanes;
    segmentation.steps = round_up(ceil_div(params.seqlen, sets * lanes), kStateChunk);
  } else {
    const int64_t chains =
        params.batch * partition.groups * ceil_div(group_channels, chain_channels);
    const int64_t steps = std::max(kChainSteps, ceil_div(params.seqlen, kMostSegments));
    if (chains >= kFewChains || params.seqlen < kFewestSegments * steps) return segmentation;
    segmentation.steps = round_up(steps, kStateChunk);
  }
  segmentation.count = ceil_div(params.seqlen, segmentation.steps);
  return segmentation;
}

void take_arrays(Segmentation& segmentation, const ScanParams& params, Arena& arena) {
  if (!segmentation.present()) return;
  const int64_t row_bytes = params.batch * params.dim * params.dstate * number_bytes(params);
  segmentation.factors = arena.take<char>(row_bytes * segmentation.count);
  segmentation.boundaries = arena.take<char>(row_bytes * (segmentation.count + 1));
}

void join_segments(const ForwardParams& params, const Segmentation& segmentation, int64_t batch,
                   int64_t channel, int64_t begin, int64_t end) {
  join(params, segmentation, batch, channel, begin, end, true, params.initial_state,
       params.last_state);
}

void store_map_factor(const ForwardParams& params, const Segmentation& segmentation, int64_t batch,
                      int64_t channel) {
  const auto store_of_type =
      params.is_complex ? (params.is_double ? &store_map_factor<Complex<double>>
                                            : &store_map_factor<Complex<float>>)
                        : (params.is_double ? &store_map_factor<double> : &store_map_factor<float>);
  store_of_type(params, segmentation, batch, channel);
}

void join_segments(const BackwardParams& params, const Segmentation& segmentation, int64_t batch,
                   int64_t channel, int64_t begin, int64_t end) {
  join(params, segmentation, batch, channel, begin, end, false, params.dlast_state,
       params.dinitial_state);
}

}  // namespace selective_scan::cpu
