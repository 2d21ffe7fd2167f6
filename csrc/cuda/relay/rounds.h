// What rounds.cuh takes, from what a scan takes.
#pragma once

#include <cstdlib>
#include <limits>

#include "place.cuh"

namespace selective_scan::cuda::relay {

/// False where distances within an array do not fit 32 bits, or arrays lie in different directions.
inline bool make_rounds_args(const ForwardParams& params, RoundsForwardArgs& args) {
  using S = Shape<1, kChunk>;
  const int64_t size = element_size(params.u.dtype);
  const bool is_reversed = params.u.step < 0;
  bool fits = true;
  const auto narrow = [&](int64_t value) {
    fits &= std::abs(value) <= std::numeric_limits<int>::max();
    return static_cast<int>(value);
  };
  const int64_t steps = params.seqlen + 2 * kMaxRelayWarps * kChunk;  // with a round to spare
  const auto span = [](int64_t count, int64_t stride) { return (count - 1) * std::abs(stride); };
  const auto rows = [&](const ArrayView& view) {
    RoundsForwardArgs::Rows rows{};
    if (!view.present()) return rows;
    fits &= (view.step < 0) == is_reversed;
    narrow((span(params.batch, view.batch) + span(params.dim, view.channel) + steps) * size);
    rows.data = static_cast<char*>(view.data) - (is_reversed ? (S::kItems - 1) * size : 0);
    rows.batch = narrow(view.batch * size);
    rows.channel = narrow(view.channel * size);
    return rows;
  };
  const auto projection = [&](const ArrayView& view) {
    RoundsForwardArgs::Projection rows{};
    fits &= (view.step < 0) == is_reversed;
    narrow((span(params.batch, view.batch) + span(params.groups, view.group) +
            span(kPaddedStates, view.state) + steps) *
           size);
    rows.data = static_cast<const char*>(view.data) - (is_reversed ? (kChunk - 1) * size : 0);
    rows.batch = narrow(view.batch * size);
    rows.group = narrow(view.group * size);
    rows.state = narrow(view.state * size);
    return rows;
  };
  const auto once = [&](const ArrayView& view) {
    narrow(span(params.batch, view.batch) + span(params.dim, view.channel) +
           span(kPaddedStates, view.state));
    return RoundsForwardArgs::Once{view.data, view.dtype, narrow(view.batch), narrow(view.channel),
                                   narrow(view.state)};
  };
  args.u = rows(params.u);
  args.delta = rows(params.delta);
  args.z = rows(params.z);
  args.out = rows(params.out);
  if (!params.out.present()) args.z = {};
  args.B = projection(params.B);
  args.C = projection(params.C);
  args.dstate = static_cast<int>(params.dstate);
  args.seqlen = narrow(params.seqlen);
  args.dim = narrow(params.dim);
  args.group_channels = static_cast<int>(params.dim / params.groups);
  args.is_reversed = is_reversed;
  args.delta_softplus = params.delta_softplus;
  args.A = once(params.A);
  args.D = once(params.D);
  args.delta_bias = once(params.delta_bias);
  args.initial_state = once(params.initial_state);
  args.last_state = once(params.last_state);
  args.states = static_cast<float*>(params.states);
  args.groups = narrow(params.groups);
  args.batches = narrow(params.batch);
  return fits;
}

}  // namespace selective_scan::cuda::relay
