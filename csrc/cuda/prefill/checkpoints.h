// The states that chunked prefill keeps on its way.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/prefill_params.h"

namespace selective_scan::cuda {

/// Writes the checkpoints of a scan that has saved its states to their slots.
cudaError_t store_checkpoints(const PrefillParams& params, cudaStream_t stream);

}  // namespace selective_scan::cuda
