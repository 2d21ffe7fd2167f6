// Entry points of the CPU kernels of the RMS norm.
#pragma once

#include <cstdint>

#include "../../core/norm_params.h"
#include "../thread_pool.h"

namespace selective_scan::cpu {

int64_t workspace_bytes(const NormForwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const NormBackwardParams& params, const ThreadPool& pool);

/// The workspace is aligned to 64 bytes and its content does not matter. Results do not depend on
/// pool.num_threads.
void norm_forward(const NormForwardParams& params, void* workspace, const ThreadPool& pool);
void norm_backward(const NormBackwardParams& params, void* workspace, const ThreadPool& pool);

}  // namespace selective_scan::cpu
