// Entry points of the CPU kernels of the selective scan.
#pragma once

#include <cstdint>

#include "../../core/prefill_params.h"
#include "../thread_pool.h"

namespace selective_scan::cpu {

/// Bytes of scratch memory that a pass needs; no kernel allocates.
int64_t forward_workspace_bytes(const ForwardParams& params, const ThreadPool& pool);
int64_t backward_workspace_bytes(const BackwardParams& params, const ThreadPool& pool);
int64_t prefill_workspace_bytes(const PrefillParams& params, const ThreadPool& pool);

/// The workspace is aligned to 64 bytes and its content does not matter. Results do not depend on
/// pool.num_threads: what they are computed from follows from the shape alone, in a fixed order.
void scan_forward(const ForwardParams& params, void* workspace, const ThreadPool& pool);
void scan_backward(const BackwardParams& params, void* workspace, const ThreadPool& pool);
void scan_prefill(const PrefillParams& params, void* workspace, const ThreadPool& pool);

}  // namespace selective_scan::cpu
