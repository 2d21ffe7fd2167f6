// Entry points of the CPU kernels.
#pragma once

#include <cstdint>

#include "../core/params.h"

namespace selective_scan::cpu {

/// The threads to work on. The kernels know no thread library: the caller lends them its pool.
struct ThreadPool {
  /// Calls task(begin, end, context) on ranges that together cover [0, count), and waits.
  void (*parallel_for)(int64_t count, void (*task)(int64_t begin, int64_t end, void* context),
                       void* context);
  int num_threads = 1;
};

/// Bytes of scratch memory that a pass needs; no kernel allocates.
int64_t forward_workspace_bytes(const ForwardParams& params, const ThreadPool& pool);
int64_t backward_workspace_bytes(const BackwardParams& params, const ThreadPool& pool);

/// The workspace is aligned to 64 bytes and its content does not matter. Results do not depend on
/// pool.num_threads: what they are computed from follows from the shape alone, in a fixed order.
void scan_forward(const ForwardParams& params, void* workspace, const ThreadPool& pool);
void scan_backward(const BackwardParams& params, void* workspace, const ThreadPool& pool);

/// The instruction set in use: "default", "avx2" or "avx512".
const char* capability();

}  // namespace selective_scan::cpu
