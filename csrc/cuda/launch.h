// Entry points of the CUDA kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "../core/params.h"

namespace selective_scan::cuda {

/// Largest dstate the kernels take, but for complex128 states where a block has less shared memory
/// than on Hopper: the passes return cudaErrorLaunchOutOfResources if there is not enough of it.
constexpr int64_t kMaxDstate = 256;

/// Gives a pass its scratch memory, of which it asks at most once: that many bytes, aligned to 256,
/// whose content does not matter. What is enqueued on the same stream behind the pass may have it
/// again. No kernel allocates.
using ScratchMemory = std::function<void*(int64_t bytes)>;

/// Enqueue on `stream` of the current device. Safe under CUDA graph capture.
cudaError_t scan_forward(const ForwardParams& params, const ScratchMemory& memory,
                         cudaStream_t stream);

/// Results are the same bits on every run: every sum has a fixed order, no atomics.
cudaError_t scan_backward(const BackwardParams& params, const ScratchMemory& memory,
                          cudaStream_t stream);

}  // namespace selective_scan::cuda
