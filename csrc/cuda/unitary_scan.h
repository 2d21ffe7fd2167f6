// Entry points of the CUDA kernels of the adaptive unitary scan.
#pragma once

#include <cuda_runtime_api.h>

#include "../core/unitary_params.h"

namespace selective_scan::cuda {

/// Largest dstate the kernels take.
constexpr int64_t kMaxUnitaryDstate = 256;

/// One slab; theta has state stride 1. Enqueue on `stream` of the current device. Results are the
/// same bits on every run; safe under CUDA graph capture.
cudaError_t unitary_scan_forward(const UnitaryForwardParams& params, cudaStream_t stream);
cudaError_t unitary_scan_backward(const UnitaryBackwardParams& params, cudaStream_t stream);

}  // namespace selective_scan::cuda
