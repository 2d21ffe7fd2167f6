// This goes from the arguments of the adaptive unitary scan ops to kernel parameters.
#pragma once

#include "../core/unitary_params.h"
#include "tensor_views.h"

namespace selective_scan::op {

/// What the forward and the backward op have in common, in the order of their schemas.
struct UnitaryArguments {
  const Tensor& u;
  const Tensor& dt;
  const Tensor& x;
  const Tensor& x_bias;
  const Tensor& b;
  const Tensor& c;
  const Tensor& D;
  const OptionalTensor& z;
  const OptionalTensor& initial_state;
};

/// Refuses whatever no kernel may see; returns parameters with sizes, flags and inputs filled in,
/// but for theta and the states. `max_dstate` is the backend's limit, 0 for none.
UnitaryScanParams make_unitary_params(const UnitaryArguments& args, int64_t max_dstate);

}  // namespace selective_scan::op
