// This goes from the arguments of the adaptive unitary scan ops to kernel parameters.
#pragma once

#include "../core/unitary_params.h"
#include "argument_tables.h"
#include "tensor_views.h"

namespace selective_scan::op {

/// What the forward and the backward op have in common.
using UnitaryArguments = tables::AdaptiveUnitaryScanArguments;

/// Refuses whatever no kernel may see; returns parameters with sizes, flags and inputs filled in,
/// but for theta and the states. `max_dstate` is the backend's limit, 0 for none.
UnitaryScanParams make_unitary_params(const UnitaryArguments& args, int64_t max_dstate);

}  // namespace selective_scan::op
