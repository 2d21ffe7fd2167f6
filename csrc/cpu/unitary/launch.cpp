#include "launch.h"

#include "../capability.h"
#include "../work.h"

namespace selective_scan::cpu {
namespace {

Partition partition_of(const UnitaryScanParams& params, int64_t block_channels) {
  Partition partition;
  partition.batch = params.batches;
  partition.groups = params.groups;
  partition.dim = params.dim;
  partition.group_channels = params.dim / params.groups;
  partition.block_channels = block_channels;
  partition.blocks_per_group = ceil_div(partition.group_channels, block_channels);
  return partition;
}

template <class Params>
void run(const Params& params, void (*kernel)(const Params&, const Block&), int64_t block_channels,
         const ThreadPool& pool) {
  struct Context {
    const Params& params;
    void (*kernel)(const Params&, const Block&);
    Partition partition;
  } context{params, kernel, partition_of(params, block_channels)};
  pool.parallel_for(
      context.partition.chains(),
      [](int64_t begin, int64_t end, void* context_of_call) {
        const Context& context = *static_cast<const Context*>(context_of_call);
        for (int64_t task = begin; task < end; ++task) {
          context.kernel(context.params, context.partition.block(task, 0));
        }
      },
      &context);
}

}  // namespace

void unitary_scan_forward(const UnitaryForwardParams& params, const ThreadPool& pool) {
  const UnitaryKernels& kernels = chosen_capability().unitary[params.is_double];
  run(params, kernels.forward, kernels.block_channels, pool);
}

void unitary_scan_backward(const UnitaryBackwardParams& params, const ThreadPool& pool) {
  const UnitaryKernels& kernels = chosen_capability().unitary[params.is_double];
  run(params, kernels.backward, kernels.block_channels, pool);
}

}  // namespace selective_scan::cpu
