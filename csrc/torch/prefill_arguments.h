// This goes from the arguments of the prefill op to kernel parameters.
#pragma once

#include "../core/prefill_params.h"
#include "argument_tables.h"
#include "packed_sequences.h"
#include "tensor_views.h"

namespace selective_scan::op {

using PrefillArguments = tables::SelectiveScanPrefillArguments;

/// Refuses whatever no kernel may see, but for values of indices, positions and boundaries; returns
/// parameters with everything filled in but `out` and the states that kernels use. `max_dstate` is
/// the backend's limit, 0 for none.
PrefillParams make_prefill_params(const PrefillArguments& args, int64_t max_dstate);

/// (channel, step)
ArrayView prefill_view(const Tensor& tensor);

/// Refuses slots and columns that there are not, and positions below 0; reads these, so that they
/// must be the host's.
void check_checkpoints(const PrefillParams& params);

}  // namespace selective_scan::op
