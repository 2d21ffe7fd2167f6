// The streamed forward pass, for what it accepts: see ../launch.h for the interface.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../core/params.h"

namespace selective_scan::cuda {

/// Whether the streamed kernels can run this and are the better choice: fp32 arithmetic, 3 to 64
/// states (complex: 2 to 16), u, delta, z and out of one dtype, B and C both variable or, with up
/// to 16 states, both constant.
bool streamed_forward_accepts(const ForwardParams& params);
int64_t streamed_forward_workspace_bytes(const ForwardParams& params);
cudaError_t streamed_forward(const ForwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace selective_scan::cuda
