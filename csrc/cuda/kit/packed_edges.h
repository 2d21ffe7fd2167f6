// What packed sequences leave that no scan comes to.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/params.h"

namespace selective_scan::cuda {

/// Writes zeros at the steps of no sequence, and the states of sequences without steps. To be
/// called when all else of the pass is enqueued.
cudaError_t write_packed_edges(const ForwardParams& params, cudaStream_t stream);
cudaError_t write_packed_edges(const BackwardParams& params, cudaStream_t stream);

}  // namespace selective_scan::cuda
