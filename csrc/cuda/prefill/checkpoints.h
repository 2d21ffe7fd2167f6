// The intermediate states that chunked prefill keeps.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/prefill_params.h"

namespace selective_scan::cuda {

/// Writes the checkpoints to their slots. The scan must have saved its states.
cudaError_t store_checkpoints(const PrefillParams& params, cudaStream_t stream);

}  // namespace selective_scan::cuda
