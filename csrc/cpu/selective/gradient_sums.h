// The last step of the backward pass: adding up, in a fixed order, what several tasks contributed
// to one gradient. A small part of the work, so plain loops.
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "../thread_pool.h"
#include "kernels.h"

namespace selective_scan::cpu {

/// Memory for rows of what tasks contribute to the gradients that have no steps, dA aside.
BackwardPartials take_rows(const BackwardParams& params, int64_t rows, Arena& arena);
/// Memory for what the blocks of a partition contribute to dB and dC.
void take_blocks(const BackwardParams& params, const Partition& partition, Arena& arena,
                 BackwardPartials& partials);

/// Gives the partial sums from row `row` on.
BackwardPartials rows_from(const BackwardParams& params, BackwardPartials partials, int64_t row);

/// Writes the gradients of which there are rows.
void sum_rows(const BackwardParams& params, const BackwardPartials& partials, int64_t workers,
              const ThreadPool& pool);
/// Writes dB and dC where blocks contribute to them.
void sum_blocks(const BackwardParams& params, const BackwardPartials& partials, int64_t workers,
                const ThreadPool& pool);

}  // namespace selective_scan::cpu
