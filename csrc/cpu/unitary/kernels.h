// The interface of the adaptive unitary scan's kernels.
#pragma once

#include <cstdint>

#include "../../core/unitary_params.h"
#include "../work.h"

namespace selective_scan::cpu {

/// The kernels of one compute type.
struct UnitaryKernels {
  int64_t block_channels;
  void (*forward)(const UnitaryForwardParams& params, const Block& block);
  void (*backward)(const UnitaryBackwardParams& params, const Block& block);
};

}  // namespace selective_scan::cpu
