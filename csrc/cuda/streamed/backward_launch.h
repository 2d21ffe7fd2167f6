// The streamed backward pass, for what it accepts: see ../launch.h for the interface.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../core/params.h"

namespace selective_scan::cuda {

/// Whether the streamed kernels can run this and are the better choice.
bool streamed_backward_accepts(const BackwardParams& params);
int64_t streamed_backward_workspace_bytes(const BackwardParams& params);
cudaError_t streamed_backward(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace selective_scan::cuda
