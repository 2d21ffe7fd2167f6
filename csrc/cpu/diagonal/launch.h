// Entry points of the CPU kernels of the general diagonal scan.
#pragma once

#include <cstdint>

#include "../../core/diagonal_params.h"
#include "../thread_pool.h"

namespace selective_scan::cpu {

/// Into how many segments of time the kernels split every row, unless sequences are packed; a
/// function of the shape alone.
int64_t num_segments(const DiagonalScanParams& params);

int64_t workspace_bytes(const DiagonalForwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const DiagonalBackwardParams& params, const ThreadPool& pool);

/// The workspace is aligned to 64 bytes and its content does not matter. Results do not depend on
/// pool.num_threads.
void diagonal_scan_forward(const DiagonalForwardParams& params, void* workspace,
                           const ThreadPool& pool);
void diagonal_scan_backward(const DiagonalBackwardParams& params, void* workspace,
                            const ThreadPool& pool);

}  // namespace selective_scan::cpu
