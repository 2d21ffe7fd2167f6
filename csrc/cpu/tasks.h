// Tasks for the threads of a pool. Nothing here depends on the instruction set.
#pragma once

#include <atomic>
#include <cstdint>

#include "thread_pool.h"
#include "work.h"

namespace selective_scan::cpu {

/// Runs run(task, worker) for all tasks, on at most `workers` threads. Tasks go to whoever is free.
template <class Run>
void run_tasks(int64_t tasks, int64_t workers, const ThreadPool& pool, const Run& run) {
  if (workers <= 1) {
    for (int64_t task = 0; task < tasks; ++task) run(task, 0);
    return;
  }
  struct Context {
    const Run& run;
    int64_t tasks;
    std::atomic<int64_t> next{0};
  } context{run, tasks};
  pool.parallel_for(
      workers,
      [](int64_t begin, int64_t end, void* context_of_call) {
        Context& context = *static_cast<Context*>(context_of_call);
        for (int64_t worker = begin; worker < end; ++worker) {
          for (int64_t task; (task = context.next++) < context.tasks;) context.run(task, worker);
        }
      },
      &context);
}

/// Scratch memory of every worker.
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
