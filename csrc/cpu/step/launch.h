// The entry points of the CPU kernels that take a token's step through a stack of layers.
#pragma once

#include <cstdint>

#include "../../core/step_params.h"
#include "../thread_pool.h"

namespace selective_scan::cpu {

int64_t step_workspace_bytes(const StepParams& params, const ThreadPool& pool);

/// The workspace must be aligned to 64 bytes; its contents do not matter. Results do not depend on
/// pool.num_threads.
void step(const StepParams& params, void* workspace, const ThreadPool& pool);

}  // namespace selective_scan::cpu
