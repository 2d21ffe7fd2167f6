// A sum of (batch, channel, step) arrays: what row_sums.h has done.
#pragma once

#include <cstdint>

#include "../../core/params.h"

namespace selective_scan::cuda {

/// target = the sum of `count` arrays, from each to the next `stride` elements, in fp32 and rounded
/// once. The first may be the target itself. Of one array that is a copy.
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
