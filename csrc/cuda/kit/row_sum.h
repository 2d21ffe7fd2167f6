// The description of a sum of (batch, channel, step) arrays for row_sums.h.
#pragma once

#include <cstdint>

#include "../../core/params.h"

namespace selective_scan::cuda {

/// target = the sum of `count` arrays that lie `stride` elements apart, in fp32 and rounded once.
/// The first may be the target itself. A sum of one array is a copy.
struct RowSum {
  ArrayView source;
  ArrayView target;
  int64_t batch = 0;
  int64_t channels = 0;
  int64_t steps = 0;
  int64_t stride = 0;
  int count = 1;
};

}  // namespace selective_scan::cuda
