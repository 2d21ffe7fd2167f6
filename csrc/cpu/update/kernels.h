// The interface of the state update's kernels.
#pragma once

#include <cstdint>

#include "../../core/update_params.h"

namespace selective_scan::cpu {

/// The work of one task: consecutive channels of a head, in some rows of the batch.
struct UpdateTask {
  int64_t first_row = 0;
  int64_t rows = 1;
  int64_t head = 0;
  int64_t first_channel = 0;
  int64_t channels = 0;
};

/// The kernel of one compute type, real or complex, for all methods.
struct UpdateKernels {
  /// Returns the bytes of scratch memory, aligned to 64 bytes, for a task of `rows` rows and
  /// `channels` channels.
  int64_t (*scratch_bytes)(const UpdateParams& params, int64_t rows, int64_t channels);
  void (*run)(const UpdateParams& params, const UpdateTask& task, void* scratch);
};

}  // namespace selective_scan::cpu
