// Entry points of the CPU kernels of the scan with full state matrices.
#pragma once

#include <cstdint>

#include "../../core/matrix_params.h"
#include "../thread_pool.h"

namespace selective_scan::cpu {

int64_t forward_workspace_bytes(const MatrixForwardParams& params, const ThreadPool& pool);
int64_t backward_workspace_bytes(const MatrixBackwardParams& params, const ThreadPool& pool);

/// The workspace is aligned to 64 bytes and its content does not matter. Results do not depend on
/// pool.num_threads.
void scan_forward(const MatrixForwardParams& params, void* workspace, const ThreadPool& pool);
void scan_backward(const MatrixBackwardParams& params, void* workspace, const ThreadPool& pool);

}  // namespace selective_scan::cpu
