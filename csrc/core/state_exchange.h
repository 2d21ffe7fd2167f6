// A pass over one part of a sequence's steps, while the other parts are scanned elsewhere.
//
// The pass first reports the map that its steps apply to the entering state, and receives that
// state in return. Kernels that cut time into segments compute every segment's map anyway, so the
// exchange takes place in the middle of the pass.
#pragma once

#include <functional>

#include "params.h"

namespace selective_scan {

struct StateExchange {
  /// Receive the map h → factor·h + offset of all steps. In the backward pass, `offset` receives
  /// the gradient that these steps alone give to the state before them, and factor is absent.
  ArrayView factor, offset;
  /// Called once on the host, after the work that stores the map has been enqueued. Returns the
  /// entering state or, in the backward pass, the gradient of the state after the last step.
  std::function<ArrayView()> enter;
};

/// Returns the parameters of a pass that computes the map alone.
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

/// Sets the state, or the gradient, that a pass begins with.
inline void set_entering(ForwardParams& params, const ArrayView& state) {
  params.initial_state = state;
}
inline void set_entering(BackwardParams& params, const ArrayView& gradient) {
  params.dlast_state = gradient;
}

}  // namespace selective_scan
