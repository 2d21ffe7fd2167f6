#include "../launch.h"

#include "../capability.h"
#include "../tasks.h"

namespace selective_scan::cpu {
namespace {

template <class Params>
void run(const Params& params, void (*kernel)(const Params&, const Block&), int64_t block_channels,
         const ThreadPool& pool) {
  const Partition partition = partition_of(params, params.batches, 1, block_channels);
  parallel_for(pool, partition.chains(),
               [&](int64_t task) { kernel(params, partition.block(task, 0)); });
}

}  // namespace

void launch(const UnitaryForwardParams& params, void*, const ThreadPool& pool) {
  const UnitaryKernels& kernels = chosen_kernels(params.is_double).unitary;
  run(params, kernels.forward, kernels.block_channels, pool);
}

void launch(const UnitaryBackwardParams& params, void*, const ThreadPool& pool) {
  const UnitaryKernels& kernels = chosen_kernels(params.is_double).unitary;
  run(params, kernels.backward, kernels.block_channels, pool);
}

}  // namespace selective_scan::cpu
