// Moves arrays of states between memory and tiles; complex ones as their real and imaginary parts.
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "tile.h"

namespace selective_scan::cpu {

/// Returns a contiguous (batch, channel, state) array of the compute type at `data`.
template <class State, class Params>
SELECTIVE_SCAN_HD ArrayView contiguous_states(void* data, const Params& params) {
  ArrayView view;
  view.data = data;
  view.dtype = sizeof(scalar_t<State>) == 8 ? DType::kFloat64 : DType::kFloat32;
  view.state = kComponents<State>;
  view.channel = params.dstate * view.state;
  view.batch = params.dim * view.channel;
  view.imag = 1;
  return view;
}

/// Returns the section (state, lane) of the real parts, whose rows are states; `offset` is the
/// first lane's element.
SELECTIVE_SCAN_HD Section state_section(const ArrayView& view, int64_t offset, int64_t lanes,
                                        int64_t lane_stride, int64_t dstate) {
  return {element_at(view, offset), view.dtype, dstate, lanes, view.state, lane_stride};
}

SELECTIVE_SCAN_HD Section imaginary_part(Section section, const ArrayView& view) {
  section.data = element_at(section, view.imag);
  return section;
}

/// Load or store a section of real parts and, if states are complex, the section of their imaginary
/// parts, which lie `imaginary` after the real ones in the tile.
template <class State>
void load_parts(const Section& section, const ArrayView& view, scalar_t<State>* tile, int64_t pitch,
                int64_t imaginary) {
  using R = real_t<State>;
  load_rows<R>(section, tile, pitch);
  if constexpr (is_complex_v<State>) {
    load_rows<R>(imaginary_part(section, view), tile + imaginary, pitch);
  }
}
template <class State>
void store_parts(const Section& section, const ArrayView& view, const scalar_t<State>* tile,
                 int64_t pitch, int64_t imaginary) {
  using R = real_t<State>;
  store_rows<R>(section, tile, pitch);
  if constexpr (is_complex_v<State>) {
    store_rows<R>(imaginary_part(section, view), tile + imaginary, pitch);
  }
}

/// Loads (state, lane) into an array of State; zeros if the view is absent.
template <class State>
void load_states(const ArrayView& view, int64_t offset, int64_t lanes, int64_t lane_stride,
                 int64_t dstate, State* states) {
  using R = real_t<State>;
  if (!view.present()) {
    for (int64_t n = 0; n < dstate; ++n) states[n] = State{};
    return;
  }
  load_parts<State>(state_section(view, offset, lanes, lane_stride, dstate), view,
                    reinterpret_cast<scalar_t<State>*>(states), kComponents<State> * R::kWidth,
                    R::kWidth);
}

template <class State>
void store_states(const ArrayView& view, int64_t offset, int64_t lanes, int64_t lane_stride,
                  int64_t dstate, const State* states) {
  using R = real_t<State>;
  store_parts<State>(state_section(view, offset, lanes, lane_stride, dstate), view,
                     reinterpret_cast<const scalar_t<State>*>(states),
                     kComponents<State> * R::kWidth, R::kWidth);
}

}  // namespace selective_scan::cpu
