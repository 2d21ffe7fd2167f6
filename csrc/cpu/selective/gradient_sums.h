// The last step of the backward pass: adds up, in a fixed order, the contributions of several tasks
// to one gradient. It is a small part of the work, so plain loops suffice.
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "../thread_pool.h"
#include "kernels.h"

namespace selective_scan::cpu {

/// Takes memory for rows of the tasks' contributions to the gradients without steps, except dA.
BackwardPartials take_rows(const BackwardParams& params, int64_t rows, Arena& arena);
/// Takes memory for the contributions of a partition's blocks to dB and dC.
void take_blocks(const BackwardParams& params, const Partition& partition, Arena& arena,
                 BackwardPartials& partials);

/// Returns the partial sums from row `row` on.
BackwardPartials rows_from(const BackwardParams& params, BackwardPartials partials, int64_t row);

/// Writes the gradients that are sums over rows.
void sum_rows(const BackwardParams& params, const BackwardPartials& partials, int64_t workers,
              const ThreadPool& pool);
/// Writes dB and dC if several blocks contribute to them.
void sum_blocks(const BackwardParams& params, const BackwardPartials& partials, int64_t workers,
                const ThreadPool& pool);

}  // namespace selective_scan::cpu
