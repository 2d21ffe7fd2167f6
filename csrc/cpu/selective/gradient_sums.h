// The last step of the backward pass: adding up, in a fixed order, what several tasks contributed
// to one gradient. A small part of the work, so plain loops.
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "kernels.h"

namespace selective_scan::cpu {

/// dA, dD, ddelta_bias and those of constant B and C of one channel: sums over the batch and, where
/// sequences are segmented, over the sets of segments.
void sum_over_rows(const BackwardParams& params, const BackwardPartials& partials, int64_t channel);

/// Variable B and C in groups of several blocks: sums over the blocks, for one chunk of a group.
void sum_over_blocks(const BackwardParams& params, const BackwardPartials& partials, int64_t batch,
                     int64_t group, int64_t chunk);

}  // namespace selective_scan::cpu
