// Copies of (batch, channel, step) arrays in another dtype or layout, and sums of several.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "row_sum.h"

namespace selective_scan::cuda {

/// Computes the sums. Elements have at most 4 bytes.
cudaError_t sum_rows(const std::vector<RowSum>& sums, cudaStream_t stream);

}  // namespace selective_scan::cuda
