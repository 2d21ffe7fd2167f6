// Entry points of the CUDA kernels of the general diagonal scan.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../core/diagonal_params.h"

namespace selective_scan::cuda {

/// Into how many segments of time the kernels split every row on the current device.
int64_t num_segments(const DiagonalBackwardParams& params);

int64_t workspace_bytes(const DiagonalForwardParams& params);
int64_t workspace_bytes(const DiagonalBackwardParams& params);

/// Enqueue on `stream` of the current device. The workspace is aligned to 256 bytes and its content
/// does not matter. Results are the same bits on every run; safe under CUDA graph capture.
cudaError_t diagonal_scan_forward(const DiagonalForwardParams& params, void* workspace,
                                  cudaStream_t stream);
cudaError_t diagonal_scan_backward(const DiagonalBackwardParams& params, void* workspace,
                                   cudaStream_t stream);

}  // namespace selective_scan::cuda
