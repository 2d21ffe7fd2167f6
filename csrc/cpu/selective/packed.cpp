#include "packed.h"

#include <initializer_list>
#include <type_traits>

#include "../../core/element.h"
#include "../work.h"

namespace selective_scan::cpu {
namespace {

/// Moves a view by `index` strides. A constant B or C has a step stride of 0.
void advance(ArrayView& view, int64_t index, int64_t stride) {
  if (!view.present()) return;
  view.data = element_at(view, index * stride);
}

/// Returns `params` for `steps` steps from `begin` on.
template <class Params>
Params steps_of(Params params, int64_t begin, int64_t steps,
                std::initializer_list<ArrayView Params::*> written) {
  params.seqlen = steps;
  const auto move = [&](ArrayView& view) { advance(view, begin, view.step); };
  for (const auto row : ScanParams::kRows) move(params.*row);
  move(params.B);
  move(params.C);
  for (ArrayView Params::* view : written) move(params.*view);
  if constexpr (std::is_same_v<Params, BackwardParams>) {
    for (const auto row : BackwardParams::kRowGradients) move(params.*row);
  }
  return params;
}

template <class Params>
Params params_of(const Params& packed, int64_t sequence,
                 std::initializer_list<ArrayView Params::*> written,
                 std::initializer_list<ArrayView Params::*> states) {
  const int64_t begin = packed.packed.begin(sequence);
  Params params = steps_of(packed, begin, packed.packed.end(sequence) - begin, written);
  params.packed = {};
  advance(params.initial_state, sequence, params.initial_state.batch);
  for (ArrayView Params::* view : states) advance(params.*view, sequence, (params.*view).batch);
  if (params.states) {
    params.states = static_cast<char*>(params.states) +
                    first_saved_state(begin) * params.dim * params.dstate * number_bytes(params);
  }
  return params;
}

void clear_steps(const ArrayView& view, int64_t begin, int64_t end) {
  for (int64_t step = begin; step < end; ++step) {
    store_element(view.data, view.dtype, step * view.step, 0.0f);
  }
}

/// Clears an array (outer, inner, step), complex if `imag` is not 0, at the steps of no sequence.
void clear_padding(const PackedSequences& packed, ArrayView view, int64_t outers,
                   int64_t outer_stride, int64_t inners, int64_t inner_stride) {
  if (!view.present()) return;
  for (int64_t row = 0; row < outers * inners; ++row) {
    for (const int64_t component : {int64_t{0}, view.imag}) {
      ArrayView of_row = view;
      advance(of_row, 1, row / inners * outer_stride + row % inners * inner_stride + component);
      clear_steps(of_row, 0, packed.first_begin());
      clear_steps(of_row, packed.last_end(), packed.total);
    }
  }
}

bool has_padding(const PackedSequences& packed) {
  return packed.first_begin() > 0 || packed.last_end() < packed.total;
}

}  // namespace

ForwardParams params_of(const ForwardParams& packed, int64_t sequence) {
  return params_of(packed, sequence, {&ForwardParams::out}, {&ForwardParams::last_state});
}

BackwardParams params_of(const BackwardParams& packed, int64_t sequence) {
  using P = BackwardParams;
  return params_of(packed, sequence, {&P::dout, &P::dB, &P::dC},
                   {&P::dlast_state, &P::dinitial_state});
}

ForwardParams steps_of(const ForwardParams& call, int64_t begin, int64_t steps) {
  return steps_of(call, begin, steps, {&ForwardParams::out});
}

void clear_padding(const ForwardParams& packed) {
  if (!has_padding(packed.packed)) return;
  clear_padding(packed.packed, packed.out, packed.dim, packed.out.channel, 1, 0);
}

void clear_padding(const BackwardParams& packed) {
  if (!has_padding(packed.packed)) return;
  for (const auto row : BackwardParams::kRowGradients) {
    const ArrayView& view = packed.*row;
    clear_padding(packed.packed, view, packed.dim, view.channel, 1, 0);
  }
  const auto clear_projection = [&](const ArrayView& view, bool is_variable) {
    if (!is_variable) return;
    clear_padding(packed.packed, view, packed.groups, view.group, packed.dstate, view.state);
  };
  clear_projection(packed.dB, packed.variable_B);
  clear_projection(packed.dC, packed.variable_C);
}

}  // namespace selective_scan::cpu
