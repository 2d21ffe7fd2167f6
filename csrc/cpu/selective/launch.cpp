#include "launch.h"

#include <algorithm>

#include "../capability.h"
#include "../tasks.h"
#include "gradient_sums.h"
#include "kernels.h"
#include "segments.h"

namespace selective_scan::cpu {
namespace {

/// Below so many state updates, waking other threads costs more than they save.
constexpr int64_t kSerialUpdates = 32 * 1024;

/// A forward task is small enough to keep all threads busy, and large enough to spread the cost of
/// staging B and C. The vectors of all instruction sets divide these.
constexpr int64_t kLargestForwardBlock = 64;
constexpr int64_t kSmallestForwardBlock = 16;
/// A backward task: few enough that the partial sums of dB and dC, one each per block, stay within
/// batch·dim·dstate·seqlen/32 values; never dependent on the number of threads.
constexpr int64_t kSmallestBackwardBlock = 64;

const Kernels& kernels_for(const ScanParams& params) {
  return chosen_capability().kernels[params.is_double][params.is_complex];
}

Partition partition_of(const ScanParams& params, int64_t block_channels) {
  Partition partition;
  partition.batch = params.batch;
  partition.groups = params.groups;
  partition.group_channels = params.dim / params.groups;
  partition.block_channels = std::min(block_channels, partition.group_channels);
  partition.blocks_per_group =
      ceil_div(partition.group_channels, std::max<int64_t>(partition.block_channels, 1));
  return partition;
}

/// Whether the problem is large enough for more than one thread.
bool is_parallel(const ScanParams& params, const ThreadPool& pool) {
  const double updates = static_cast<double>(params.batch) * params.dim * params.dstate *
                         std::max<int64_t>(params.seqlen, 1);
  return pool.num_threads > 1 && updates >= kSerialUpdates;
}

/// Threads worth using.
int64_t workers_for(const ScanParams& params, const Partition& partition, const ThreadPool& pool) {
  if (!is_parallel(params, pool)) return 1;
  return std::clamp<int64_t>(partition.count(), 1, pool.num_threads);
}

Partition forward_partition(const ScanParams& params, const ThreadPool& pool) {
  if (!is_parallel(params, pool)) return partition_of(params, kLargestForwardBlock);
  // A few tasks for each thread, so that they finish together.
  const int64_t channels = params.batch * params.dim / (4 * int64_t{pool.num_threads});
  const int64_t block = channels / kSmallestForwardBlock * kSmallestForwardBlock;
  return partition_of(params, std::clamp(block, kSmallestForwardBlock, kLargestForwardBlock));
}

Partition backward_partition(const ScanParams& params) {
  const int64_t group_channels = params.dim / params.groups;
  const int64_t blocks = std::max<int64_t>(group_channels / kSmallestBackwardBlock, 1);
  const int64_t block = ceil_div(group_channels, blocks);
  return partition_of(params, round_up(block, kSmallestForwardBlock));
}

/// The partition with the segments that the shape suggests.
Partition segmented(Partition partition, const ScanParams& params, const Kernels& kernels,
                    Arena& arena) {
  partition.segmentation = segmentation_of(params, kernels.lanes);
  take_arrays(partition.segmentation, params, arena);
  return partition;
}

int64_t map_scratch_bytes(const ScanParams& params, const Partition& partition,
                          const Kernels& kernels) {
  if (!partition.segmentation.present()) return 0;
  return kernels.map_scratch_bytes(params, partition.block(0));
}

/// How a pass is run, and its memory; over a null workspace it only measures.
struct ForwardPlan {
  const Kernels& kernels;
  Arena arena;
  Partition partition;
  int64_t workers;
  WorkerScratch scratch;

  ForwardPlan(const ForwardParams& params, void* workspace, const ThreadPool& pool)
      : kernels(kernels_for(params)),
        arena{static_cast<char*>(workspace)},
        partition(segmented(forward_partition(params, pool), params, kernels, arena)),
        workers(workers_for(params, partition, pool)),
        scratch(arena, workers,
                std::max(map_scratch_bytes(params, partition, kernels),
                         kernels.forward_scratch_bytes(params, partition.block(0)))) {}
};

struct BackwardPlan {
  const Kernels& kernels;
  Arena arena;
  Partition partition;
  int64_t workers;
  BackwardPartials partials;
  WorkerScratch scratch;

  BackwardPlan(const BackwardParams& params, void* workspace, const ThreadPool& pool)
      : kernels(kernels_for(params)),
        arena{static_cast<char*>(workspace)},
        partition(segmented(backward_partition(params), params, kernels, arena)),
        workers(workers_for(params, partition, pool)),
        partials(take_partials(params, partition, arena)),
        scratch(arena, workers,
                std::max(map_scratch_bytes(params, partition, kernels),
                         kernels.backward_scratch_bytes(params, partition.block(0)))) {
    partials.dA = arena.take<char>(partials.rows * params.dim * params.dstate *
                                   (params.is_complex ? 2 : 1) * (params.is_double ? 8 : 4));
  }
};

/// Finds the states at the segments' boundaries, if sequences are segmented.
template <class Plan, class Params>
void prepare_segments(const Plan& plan, void (*maps)(const Params&, const Block&, void*),
                      const Params& params, const ThreadPool& pool) {
  const Partition& partition = plan.partition;
  if (!partition.segmentation.present()) return;
  run_tasks(partition.count(), plan.workers, pool, [&](int64_t task, int64_t worker) {
    maps(params, partition.block(task), plan.scratch.of(worker));
  });
  run_tasks(params.batch * params.dim, plan.workers, pool, [&](int64_t task, int64_t) {
    join_segments(params, partition.segmentation, task / params.dim, task % params.dim);
  });
}

}  // namespace

int64_t forward_workspace_bytes(const ForwardParams& params, const ThreadPool& pool) {
  return ForwardPlan(params, nullptr, pool).arena.bytes;
}

int64_t backward_workspace_bytes(const BackwardParams& params, const ThreadPool& pool) {
  return BackwardPlan(params, nullptr, pool).arena.bytes;
}

void scan_forward(const ForwardParams& params, void* workspace, const ThreadPool& pool) {
  const ForwardPlan plan(params, workspace, pool);
  prepare_segments(plan, plan.kernels.forward_maps, params, pool);
  run_tasks(plan.partition.count(), plan.workers, pool, [&](int64_t task, int64_t worker) {
    plan.kernels.forward(params, plan.partition.block(task), plan.scratch.of(worker));
  });
}

void scan_backward(const BackwardParams& params, void* workspace, const ThreadPool& pool) {
  const BackwardPlan plan(params, workspace, pool);
  prepare_segments(plan, plan.kernels.backward_maps, params, pool);
  run_tasks(plan.partition.count(), plan.workers, pool, [&](int64_t task, int64_t worker) {
    plan.kernels.backward(params, plan.partition.block(task), plan.partials,
                          plan.scratch.of(worker));
  });
  sum_partials(params, plan.partials, plan.workers, pool);
}

}  // namespace selective_scan::cpu
