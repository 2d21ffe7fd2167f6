// The results for packed sequences that no scan reaches.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/params.h"

namespace selective_scan::cuda {

/// Writes zeros at steps outside all sequences, and the states of sequences without steps. Call
/// this after everything else of the pass is enqueued.
cudaError_t write_packed_edges(const ForwardParams& params, cudaStream_t stream);
cudaError_t write_packed_edges(const BackwardParams& params, cudaStream_t stream);

}  // namespace selective_scan::cuda
