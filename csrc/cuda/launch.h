// Entry points of the CUDA kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../core/params.h"

namespace selective_scan::cuda {

/// Largest dstate the kernels take.
constexpr int64_t kMaxDstate = 256;

/// Bytes of scratch memory that a pass needs on the current device; no kernel
/// allocates.
int64_t forward_workspace_bytes(const ForwardParams& params);
int64_t backward_workspace_bytes(const BackwardParams& params);

/// Enqueue on `stream` of the current device. The workspace is aligned to 256
/// bytes and its content does not matter. Safe under CUDA graph capture.
cudaError_t scan_forward(const ForwardParams& params, void* workspace, cudaStream_t stream);

/// Results are the same bits on every run: every sum has a fixed order, no
/// atomics.
cudaError_t scan_backward(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace selective_scan::cuda
