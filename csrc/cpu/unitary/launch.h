// Entry points of the CPU kernels of the adaptive unitary scan.
#pragma once

#include "../../core/unitary_params.h"
#include "../thread_pool.h"

namespace selective_scan::cpu {

/// Channels of a group that theta is padded to; lanes beyond a group's channels hold zeros.
constexpr int64_t kUnitaryLanes = 16;

/// One slab; theta has channel stride 1. Results do not depend on pool.num_threads.
void unitary_scan_forward(const UnitaryForwardParams& params, const ThreadPool& pool);
void unitary_scan_backward(const UnitaryBackwardParams& params, const ThreadPool& pool);

}  // namespace selective_scan::cpu
