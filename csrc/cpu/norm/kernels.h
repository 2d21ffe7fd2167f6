// What the kernels of the RMS norm are called by.
#pragma once

#include <cstdint>

#include "../../core/norm_params.h"

namespace selective_scan::cpu {

/// What one task norms: consecutive rows.
struct NormTask {
  int64_t first_row = 0;
  int64_t rows = 0;
};

/// The kernels of one compute type. `part` receives the task's sum for dweight, contiguous, of the
/// compute type; null: it is not wanted.
struct NormKernels {
  /// The scratch memory of a task, aligned to 64 bytes.
  int64_t (*scratch_bytes)(const NormParams& params);
  void (*forward)(const NormForwardParams& params, const NormTask& task, void* scratch);
  void (*backward)(const NormBackwardParams& params, const NormTask& task, void* scratch,
                   void* part);
};

}  // namespace selective_scan::cpu
