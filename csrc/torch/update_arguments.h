// This goes from the arguments of the state update op to kernel parameters.
#pragma once

#include "../core/update_params.h"
#include "argument_tables.h"
#include "packed_sequences.h"
#include "tensor_views.h"

namespace selective_scan::op {

using UpdateArguments = tables::SelectiveStateUpdateArguments;

/// Refuses whatever no kernel may see, but for indices out of range; returns parameters with
/// everything filled in but `out`. `max_dstate` is the backend's limit, 0 for none.
UpdateParams make_update_params(const UpdateArguments& args, int64_t max_dstate);

/// (batch, [step,] [head,] channel)
ArrayView update_view(const Tensor& tensor, const UpdateArguments& args,
                      const UpdateParams& params);

/// Refuses indices of slots that there are not; reads them, so that they must be the host's.
void check_slots(const UpdateParams& params);

}  // namespace selective_scan::op
