#include "../launch.h"

#include <algorithm>

#include "../capability.h"
#include "../tasks.h"

namespace selective_scan::cpu {
namespace {

/// The number of values in a task's rows, and the largest number of tasks, each of which leaves a
/// row of sums.
constexpr int64_t kTaskChannels = 16384;
constexpr int64_t kMostTasks = 256;
/// The channels whose parts are summed at a time.
constexpr int64_t kSumChannels = 512;

/// The division of a call. Only `workers` depends on the number of threads.
struct NormPlan {
  const NormKernels& kernels;
  int64_t task_rows, tasks, workers;
  Arena arena;
  WorkerScratch scratch;
  int64_t part_bytes;
  char* parts;  // one row of sums per task

  NormPlan(const NormParams& params, bool has_parts, const ThreadPool& pool, void* workspace)
      : kernels(chosen_kernels(params.is_double).norm),
        task_rows(std::max({kTaskChannels / std::max<int64_t>(params.channels, 1),
                            ceil_div(params.rows, kMostTasks), int64_t{1}})),
        tasks(ceil_div(params.rows, task_rows)),
        workers(std::clamp<int64_t>(tasks, 1, pool.num_threads)),
        arena{static_cast<char*>(workspace)},
        scratch(arena, workers, kernels.scratch_bytes(params)),
        part_bytes(round_up(params.channels * (params.is_double ? 8 : 4), Arena::kAlignment)),
        parts(arena.take<char>(has_parts ? tasks * part_bytes : 0)) {}

  template <class Run>
  void run(const NormParams& params, const ThreadPool& pool, const Run& run) const {
    run_tasks(tasks, workers, pool, [&](int64_t index, int64_t worker) {
      const int64_t first = index * task_rows;
      run(NormTask{first, std::min(task_rows, params.rows - first)}, scratch.of(worker),
          parts + index * part_bytes);
    });
  }
};

/// Sums the tasks' parts in a fixed order.
template <class T>
void add_parts(const NormBackwardParams& params, const NormPlan& plan, const ThreadPool& pool) {
  const int64_t blocks = ceil_div(params.channels, kSumChannels);
  parallel_for(pool, blocks, [&](int64_t block) {
    const int64_t first = block * kSumChannels;
    const int64_t count = std::min(kSumChannels, params.channels - first);
    double sums[kSumChannels] = {};
    for (int64_t task = 0; task < plan.tasks; ++task) {
      const T* part = reinterpret_cast<const T*>(plan.parts + task * plan.part_bytes) + first;
      for (int64_t i = 0; i < count; ++i) sums[i] += part[i];
    }
    for (int64_t i = 0; i < count; ++i) {
      store_element(params.dweight.data, params.dweight.dtype, first + i, sums[i]);
    }
  });
}

}  // namespace

int64_t workspace_bytes(const NormForwardParams& params, const ThreadPool& pool) {
  return NormPlan(params, false, pool, nullptr).arena.bytes;
}

int64_t workspace_bytes(const NormBackwardParams& params, const ThreadPool& pool) {
  return NormPlan(params, params.dweight.present(), pool, nullptr).arena.bytes;
}

void launch(const NormForwardParams& params, void* workspace, const ThreadPool& pool) {
  const NormPlan plan(params, false, pool, workspace);
  plan.run(params, pool, [&](const NormTask& task, void* scratch, void*) {
    plan.kernels.forward(params, task, scratch);
  });
}

void launch(const NormBackwardParams& params, void* workspace, const ThreadPool& pool) {
  const bool has_parts = params.dweight.present();
  const NormPlan plan(params, has_parts, pool, workspace);
  plan.run(params, pool, [&](const NormTask& task, void* scratch, void* part) {
    plan.kernels.backward(params, task, scratch, has_parts ? part : nullptr);
  });
  if (has_parts) (params.is_double ? &add_parts<double> : &add_parts<float>)(params, plan, pool);
}

}  // namespace selective_scan::cpu
