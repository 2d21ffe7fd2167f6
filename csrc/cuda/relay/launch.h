// Real A of up to 16 states in fp32 with few channels: warps take turns in time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../core/params.h"

namespace selective_scan::cuda {

/// Whether this path can run a problem, and is the better choice for it.
bool relay_forward_accepts(const ForwardParams& params);
bool relay_backward_accepts(const BackwardParams& params);

int64_t relay_forward_workspace_bytes(const ForwardParams& params);
int64_t relay_backward_workspace_bytes(const BackwardParams& params);

cudaError_t relay_forward(const ForwardParams& params, void* workspace, cudaStream_t stream);
cudaError_t relay_backward(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace selective_scan::cuda
