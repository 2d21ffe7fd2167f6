#include "../launch.h"

#include <algorithm>

#include "../capability.h"
#include "../tasks.h"

namespace selective_scan::cpu {
namespace {

/// The channels of a task: a multiple of every instruction set's vector width, and enough to spread
/// the cost of staging B and C.
constexpr int64_t kTaskChannels = 128;

/// The division of a call. Only `workers` depends on the number of threads.
struct UpdatePlan {
  const UpdateKernels& kernels;
  int64_t task_channels;
  int64_t tasks_per_head;
  int64_t tasks;
  int64_t workers;
  int64_t scratch_bytes;  // of a worker

  UpdatePlan(const UpdateParams& params, const ThreadPool& pool)
      : kernels(chosen_kernels(params.is_double).update[params.is_complex]),
        task_channels(std::min(params.dim, kTaskChannels)),
        tasks_per_head(ceil_div(params.dim, task_channels)),
        tasks(params.batch * params.heads * tasks_per_head),
        scratch_bytes(
            round_up(kernels.scratch_bytes(params, 1, task_channels), Arena::kAlignment)) {
    const double updates = static_cast<double>(params.batch) * params.heads * params.dim *
                           params.dstate * params.steps;
    workers = workers_for(tasks, updates, kSerialUpdates, pool);
  }

  bool fits_stack() const { return scratch_bytes <= kStackBytes; }

  UpdateTask task(const UpdateParams& params, int64_t index) const {
    UpdateTask task;
    task.first_channel = index % tasks_per_head * task_channels;
    task.channels = std::min(task_channels, params.dim - task.first_channel);
    index /= tasks_per_head;
    task.head = index % params.heads;
    task.first_row = index / params.heads;
    return task;
  }
};

}  // namespace

int64_t workspace_bytes(const UpdateParams& params, const ThreadPool& pool) {
  const UpdatePlan plan(params, pool);
  return plan.fits_stack() ? 0 : plan.workers * plan.scratch_bytes;
}

void launch(const UpdateParams& params, void* workspace, const ThreadPool& pool) {
  const UpdatePlan plan(params, pool);
  run_tasks(plan.tasks, plan.workers, pool, [&](int64_t index, int64_t worker) {
    const UpdateTask task = plan.task(params, index);
    if (!plan.fits_stack()) {
      plan.kernels.run(params, task, static_cast<char*>(workspace) + worker * plan.scratch_bytes);
      return;
    }
    alignas(Arena::kAlignment) char stack[kStackBytes];
    plan.kernels.run(params, task, stack);
  });
}

}  // namespace selective_scan::cpu
