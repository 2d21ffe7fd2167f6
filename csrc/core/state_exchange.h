// A pass over a part of a sequence's steps, of which the other parts are elsewhere.
//
// What the steps do to a state that enters them is found first, and told; the state that enters is
// what comes of it. Kernels that cut time into segments find that out for each of these in any
// case, so the pass asks in its midst.
#pragma once

#include <functional>

#include "params.h"

namespace selective_scan {

struct StateExchange {
  /// Where the map of all steps is stored, h → factor·h + offset. Backwards that is what the
  /// gradient of the state in front is of the steps alone, in `offset`; there is no factor.
  ArrayView factor, offset;
  /// Is called on the host, once, behind what was enqueued to store these. Returns the state that
  /// enters, or backwards the gradient of the one that leaves.
  std::function<ArrayView()> enter;
};

/// The pass that finds out this alone.
inline ForwardParams alone(const ForwardParams& params, const StateExchange& exchange) {
  ForwardParams alone{static_cast<const ScanParams&>(params)};
  alone.wanted = ForwardWanted::kMapAlone;
  alone.D = alone.z = alone.initial_state = {};
  alone.map_factor = exchange.factor;
  alone.last_state = exchange.offset;
  return alone;
}
inline BackwardParams alone(const BackwardParams& params, const StateExchange& exchange) {
  BackwardParams alone{static_cast<const ScanParams&>(params)};
  alone.wanted = BackwardWanted::kStateAlone;
  alone.dout = params.dout;
  alone.dinitial_state = exchange.offset;
  return alone;
}

/// Has a pass begin with what enters.
inline void set_entering(ForwardParams& params, const ArrayView& state) {
  params.initial_state = state;
}
inline void set_entering(BackwardParams& params, const ArrayView& gradient) {
  params.dlast_state = gradient;
}

}  // namespace selective_scan
