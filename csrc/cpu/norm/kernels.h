// The interface of the RMS norm's kernels.
#pragma once

#include <cstdint>

#include "../../core/norm_params.h"

namespace selective_scan::cpu {

/// The consecutive rows that one task normalizes.
struct NormTask {
  int64_t first_row = 0;
  int64_t rows = 0;
};

/// The kernels of one compute type. `part` receives the task's sum for dweight, contiguous, of the
/// compute type; null if it is not wanted.
struct NormKernels {
  /// Returns the bytes of a task's scratch memory, which must be aligned to 64 bytes.
  int64_t (*scratch_bytes)(const NormParams& params);
  void (*forward)(const NormForwardParams& params, const NormTask& task, void* scratch);
  void (*backward)(const NormBackwardParams& params, const NormTask& task, void* scratch,
                   void* part);
};

}  // namespace selective_scan::cpu
