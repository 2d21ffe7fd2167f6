// Real A with one state a channel, in fp32: bound by memory, so lanes lie along time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../core/params.h"

namespace selective_scan::cuda {

/// Whether this path can run a problem, and is the better choice for it.
bool dstate1_forward_accepts(const ForwardParams& params);
bool dstate1_backward_accepts(const BackwardParams& params);

int64_t dstate1_forward_workspace_bytes(const ForwardParams& params);
int64_t dstate1_backward_workspace_bytes(const BackwardParams& params);

cudaError_t dstate1_forward(const ForwardParams& params, void* workspace, cudaStream_t stream);
cudaError_t dstate1_backward(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace selective_scan::cuda
