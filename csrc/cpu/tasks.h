// Runs tasks on the threads of a pool. Nothing here depends on the instruction set.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "flush_denormals.h"
#include "thread_pool.h"
#include "work.h"

namespace selective_scan::cpu {

/// Divides every group into blocks of at most `block_channels` channels. If the lanes of a vector
/// are several groups, a block covers these groups whole.
template <class Params>
Partition partition_of(const Params& params, int64_t batch, int64_t lane_groups,
                       int64_t block_channels) {
  Partition partition;
  partition.batch = batch;
  partition.dim = params.dim;
  partition.groups = ceil_div(params.groups, lane_groups);
  partition.lane_groups = lane_groups;
  partition.group_channels = params.dim / params.groups * lane_groups;
  partition.block_channels = lane_groups > 1 ? partition.group_channels
                                             : std::min(block_channels, partition.group_channels);
  partition.blocks_per_group =
      ceil_div(partition.group_channels, std::max<int64_t>(partition.block_channels, 1));
  partition.seqlen = params.seqlen;
  return partition;
}

/// Runs run(index) for all indices; each thread of the pool takes a range of them.
template <class Run>
void parallel_for(const ThreadPool& pool, int64_t count, const Run& run) {
  const auto run_range = [](int64_t begin, int64_t end, void* context) {
    const FlushDenormals flush;
    for (int64_t index = begin; index < end; ++index) (*static_cast<const Run*>(context))(index);
  };
  void* context = const_cast<Run*>(&run);
  if (pool.num_threads <= 1) return run_range(0, count, context);
  pool.parallel_for(count, run_range, context);
}

/// Runs run(task, worker) for all tasks, on at most `workers` threads. Each task goes to a free
/// thread.
template <class Run>
void run_tasks(int64_t tasks, int64_t workers, const ThreadPool& pool, const Run& run) {
  if (workers <= 1) {
    return parallel_for(pool.one_thread(), tasks, [&](int64_t task) { run(task, 0); });
  }
  std::atomic<int64_t> next{0};
  parallel_for(pool, workers, [&](int64_t worker) {
    for (int64_t task; (task = next++) < tasks;) run(task, worker);
  });
}

/// Below this number of state updates, waking other threads costs more than they save.
constexpr int64_t kSerialUpdates = 32 * 1024;
/// The scratch memory that a call may take on a thread's stack.
constexpr int64_t kStackBytes = 32 * 1024;

/// Returns the number of threads to use for `tasks` tasks of `work` in total: one if `work` is less
/// than `least`.
inline int64_t workers_for(int64_t tasks, double work, double least, const ThreadPool& pool) {
  return work < least ? 1 : std::clamp<int64_t>(tasks, 1, pool.num_threads);
}

/// The scratch memory of all workers.
struct WorkerScratch {
  char* base;
  int64_t bytes_each;

  WorkerScratch(Arena& arena, int64_t workers, int64_t bytes)
      : bytes_each(round_up(bytes, Arena::kAlignment)) {
    base = arena.take<char>(workers * bytes_each);
  }
  void* of(int64_t worker) const { return base + worker * bytes_each; }
};

}  // namespace selective_scan::cpu
