// Entry points of the CPU kernels of the state update.
#pragma once

#include <cstdint>

#include "../../core/update_params.h"
#include "../thread_pool.h"

namespace selective_scan::cpu {

/// 0 where a thread's stack has room for its scratch memory, as it has for most calls.
int64_t update_workspace_bytes(const UpdateParams& params, const ThreadPool& pool);

/// The workspace is aligned to 64 bytes and its content does not matter. Results do not depend on
/// pool.num_threads.
void update_states(const UpdateParams& params, void* workspace, const ThreadPool& pool);

}  // namespace selective_scan::cpu
