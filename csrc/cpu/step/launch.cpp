// A token's step through a stack of layers on the CPU: one parallel region, in which threads take
// tasks by tickets.
//
// Tickets number the tasks of all phases in order. A thread with a ticket waits until all tasks of
// earlier phases are done, then runs its task. The holder of the lowest ticket that is not done
// waits for no one, so any number of threads finish, concurrently or one after another.

#include "launch.h"

#include <algorithm>
#include <atomic>

#include "../capability.h"
#include "../tasks.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace selective_scan::cpu {
namespace {

/// Below this number of bytes of weights, waking other threads costs more than they save.
constexpr double kSerialBytes = 2 << 20;
/// The least bytes that a task reads, if its phase has as many, and the most tasks of a phase per
/// thread.
constexpr double kTaskBytes = 32 * 1024;
constexpr int64_t kTasksPerWorker = 4;
/// The number of times that a thread polls for other threads' tasks before it sleeps.
constexpr int kSpins = 4096;

/// The division of a phase's items into tasks of equal size.
struct PhaseSplit {
  int64_t items = 0;
  int64_t items_per_task = 1;
  int64_t tasks = 0;

  PhaseSplit() = default;
  PhaseSplit(int64_t items, double bytes, int64_t lanes, int64_t workers) : items(items) {
    const int64_t most = workers > 1 ? workers * kTasksPerWorker : 1;
    const auto worth = static_cast<int64_t>(bytes / kTaskBytes);
    items_per_task = round_up(ceil_div(items, std::clamp<int64_t>(worth, 1, most)), lanes);
    tasks = ceil_div(items, items_per_task);
  }
};

/// The division of a call. No result depends on it.
struct StepPlan {
  const StepKernels& kernels;
  PhaseSplit phases[kStepPhases];
  int64_t workers;
  int64_t tasks_per_layer = 0;
  int64_t tasks = 0;
  int64_t shared_bytes;
  int64_t scratch_bytes;  // of a worker

  StepPlan(const StepParams& params, const ThreadPool& pool)
      : kernels(*chosen_kernels(params.is_double).step),
        shared_bytes(kernels.shared_bytes(params)),
        scratch_bytes(round_up(kernels.scratch_bytes(params), Arena::kAlignment)) {
    const double element = static_cast<double>(element_size(params.weight_dtype));
    const double inner = element * params.inner;
    const int64_t last = params.head ? params.vocabulary : params.rows();
    const double bytes[kStepPhases] = {2 * inner * params.dim, inner * params.projections(),
                                       inner * (params.rank + params.dstate), inner * params.dim,
                                       params.head ? element * last * params.dim : 0};
    const double layer_bytes = bytes[0] + bytes[1] + bytes[2] + bytes[3];
    // Rows share the weights, but not the multiplications.
    const double work =
        (params.layers * layer_bytes + bytes[4]) * std::max(1.0, params.rows() / 4.0);
    workers = workers_for(pool.num_threads, work, kSerialBytes, pool);
    const int64_t items[kStepPhases] = {params.inner, params.projections(), params.inner,
                                        params.dim, last};
    for (int i = 0; i < kStepPhases; ++i) {
      const bool is_whole = i == kLayerPhases && !params.head;
      phases[i] = PhaseSplit(items[i], bytes[i], is_whole ? 1 : kernels.lanes, workers);
      if (i < kLayerPhases) tasks_per_layer += phases[i].tasks;
    }
    tasks = params.layers * tasks_per_layer + phases[kLayerPhases].tasks;
  }

  int64_t workspace_bytes() const { return shared_bytes + workers * scratch_bytes; }

  struct Ticket {
    StepTask task;
    int64_t first;  // of the phase's tickets
    int64_t end;
  };
  Ticket ticket(const StepParams& params, int64_t index) const {
    const int64_t layer = std::min(index / tasks_per_layer, params.layers);
    int64_t first = layer * tasks_per_layer;
    int phase = layer < params.layers ? 0 : kLayerPhases;
    while (index >= first + phases[phase].tasks) first += phases[phase++].tasks;
    const PhaseSplit& split = phases[phase];
    StepTask task{static_cast<StepPhase>(phase), layer, (index - first) * split.items_per_task, 0};
    task.count = std::min(split.items_per_task, split.items - task.first);
    return {task, first, first + split.tasks};
  }
};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__) && defined(__GNUC__)
  asm volatile("yield");
#endif
}

/// Sleeps until a number differs from `seen`. C++ libraries without this ability, such as GCC's for
/// Windows' own threads, keep polling.
void wait_for_change(const auto& number, int32_t seen) {
  if constexpr (requires { number.wait(seen); }) {
    number.wait(seen, std::memory_order_acquire);
  } else {
    pause();
  }
}
void wake_all(auto& number) {
  if constexpr (requires { number.notify_all(); }) number.notify_all();
}

/// Counts the finished tasks of all phases.
class DoneTasks {
 public:
  void add_one(int64_t end_of_phase) {
    if (count_.fetch_add(1, std::memory_order_acq_rel) + 1 == end_of_phase) wake_all(count_);
  }
  void wait_for(int64_t wanted) const {
    for (int i = 0; i < kSpins; ++i) {
      if (count_.load(std::memory_order_acquire) >= wanted) return;
      pause();
    }
    for (int32_t count; (count = count_.load(std::memory_order_acquire)) < wanted;) {
      wait_for_change(count_, count);
    }
  }

 private:
  std::atomic<int32_t> count_{0};  // the width that operating systems can wait on
};

/// Runs tasks until none are left.
struct StepRun {
  const StepParams& params;
  const StepPlan& plan;
  char* workspace;
  alignas(Arena::kAlignment) std::atomic<int64_t> next{0};
  alignas(Arena::kAlignment) DoneTasks done{};

  void work(int64_t index) {
    StepWorker worker{workspace + plan.shared_bytes + index * plan.scratch_bytes};
    for (int64_t ticket; (ticket = next++) < plan.tasks;) {
      const auto [task, first, end] = plan.ticket(params, ticket);
      done.wait_for(first);
      plan.kernels.run(params, task, workspace, worker);
      done.add_one(end);
    }
  }
};

void run(const StepParams& params, const StepPlan& plan, void* workspace, const ThreadPool& pool) {
  StepRun run{params, plan, static_cast<char*>(workspace)};
  plan.kernels.begin(params, workspace);
  parallel_for(plan.workers > 1 ? pool : pool.one_thread(), plan.workers,
               [&](int64_t worker) { run.work(worker); });
}

}  // namespace

int64_t step_workspace_bytes(const StepParams& params, const ThreadPool& pool) {
  const int64_t bytes = StepPlan(params, pool).workspace_bytes();
  return bytes <= kStackBytes ? 0 : bytes;
}

void step(const StepParams& params, void* workspace, const ThreadPool& pool) {
  const StepPlan plan(params, pool);
  if (plan.workspace_bytes() > kStackBytes) return run(params, plan, workspace, pool);
  alignas(Arena::kAlignment) char stack[kStackBytes];
  run(params, plan, stack, pool);
}

}  // namespace selective_scan::cpu
