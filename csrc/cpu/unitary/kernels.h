// What the kernels of the adaptive unitary scan are called by.
#pragma once

#include <cstdint>

#include "../../core/unitary_params.h"
#include "../work.h"

namespace selective_scan::cpu {

/// The kernels of the adaptive unitary scan, of one compute type.
struct UnitaryKernels {
  int64_t block_channels;
  void (*forward)(const UnitaryForwardParams& params, const Block& block);
  void (*backward)(const UnitaryBackwardParams& params, const Block& block);
};

}  // namespace selective_scan::cpu
