// The last step of the backward pass: adding up, in a fixed order, what several tasks contributed
// to one gradient. A small part of the work, so plain loops.
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "../thread_pool.h"
#include "kernels.h"

namespace selective_scan::cpu {

/// Memory for what the blocks of a partition contribute, dA aside.
BackwardPartials take_partials(const BackwardParams& params, const Partition& partition,
                               Arena& arena);

/// Writes the gradients of which there are partial sums.
void sum_partials(const BackwardParams& params, const BackwardPartials& partials, int64_t workers,
                  const ThreadPool& pool);

}  // namespace selective_scan::cpu
