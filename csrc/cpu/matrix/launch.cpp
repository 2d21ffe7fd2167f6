#include "../launch.h"

#include <algorithm>

#include "../capability.h"
#include "../selective/gradient_sums.h"
#include "../tasks.h"
#include "kernels.h"

namespace selective_scan::cpu {
namespace {

/// Below this number of multiplications, waking other threads costs more than they save.
constexpr double kSerialProducts = 64 * 1024;

const MatrixKernels& kernels_for(const ScanParams& params) {
  return *chosen_kernels(params.is_double).matrix[params.is_complex];
}

/// The kernels, partitions and memory that both passes share. With a null workspace it only
/// measures.
struct Plan {
  const MatrixKernels& kernels;
  Arena arena;
  Partition partition;
  Partition channels;  // of one batch entry
  int64_t workers;
  int64_t matrix_bytes;  // of one matrix per lane
  void* bases;

  Plan(const ScanParams& params, void* workspace, const ThreadPool& pool)
      : kernels(kernels_for(params)),
        arena{static_cast<char*>(workspace)},
        partition(partition_of(params, params.batch, 1, kernels.lanes)),
        channels(partition_of(params, 1, 1, kernels.lanes)) {
    const int64_t order = params.dstate;
    const double products = static_cast<double>(params.batch) * params.dim * order * order *
                            std::max<int64_t>(params.seqlen, 1);
    workers = workers_for(partition.chains(), products, kSerialProducts, pool);
    matrix_bytes = order * order * kernels.lanes * number_bytes(params);
    bases = arena.take<char>(channels.chains() * 2 * matrix_bytes);
  }

  void reduce(const MatrixForwardParams& params, const WorkerScratch& scratch,
              const ThreadPool& pool) const {
    run_tasks(channels.chains(), workers, pool, [&](int64_t task, int64_t worker) {
      kernels.reduce(params, channels.block(task, 0), bases, scratch.of(worker));
    });
  }
};

struct ForwardPlan : Plan {
  WorkerScratch scratch;

  ForwardPlan(const MatrixForwardParams& params, void* workspace, const ThreadPool& pool)
      : Plan(params, workspace, pool),
        scratch(
            arena, workers,
            std::max(kernels.basis_scratch_bytes(params), kernels.forward_scratch_bytes(params))) {}
};

struct BackwardPlan : Plan {
  BackwardPartials partials;
  void* dH;
  WorkerScratch scratch;

  BackwardPlan(const MatrixBackwardParams& params, void* workspace, const ThreadPool& pool)
      : Plan(params, workspace, pool),
        partials(take_rows(params, params.batch, arena)),
        dH(arena.take<char>(partition.chains() * matrix_bytes)),
        scratch(
            arena, workers,
            std::max(kernels.basis_scratch_bytes(params), kernels.backward_scratch_bytes(params))) {
    take_blocks(params, partition, arena, partials);
  }
};

}  // namespace

int64_t workspace_bytes(const MatrixForwardParams& params, const ThreadPool& pool) {
  return ForwardPlan(params, nullptr, pool).arena.bytes;
}

int64_t workspace_bytes(const MatrixBackwardParams& params, const ThreadPool& pool) {
  return BackwardPlan(params, nullptr, pool).arena.bytes;
}

void launch(const MatrixForwardParams& params, void* workspace, const ThreadPool& pool) {
  const ForwardPlan plan(params, workspace, pool);
  plan.reduce(params, plan.scratch, pool);
  run_tasks(plan.partition.chains(), plan.workers, pool, [&](int64_t task, int64_t worker) {
    plan.kernels.forward(params, plan.partition.block(task, 0), plan.bases,
                         plan.scratch.of(worker));
  });
}

void launch(const MatrixBackwardParams& params, void* workspace, const ThreadPool& pool) {
  const BackwardPlan plan(params, workspace, pool);
  plan.reduce(MatrixForwardParams(params, params.A_column), plan.scratch, pool);
  run_tasks(plan.partition.chains(), plan.workers, pool, [&](int64_t task, int64_t worker) {
    plan.kernels.backward(params, plan.partition.block(task, 0), plan.partials, plan.bases, plan.dH,
                          plan.scratch.of(worker));
  });
  run_tasks(plan.channels.chains(), plan.workers, pool, [&](int64_t task, int64_t worker) {
    plan.kernels.finish(params, plan.channels.block(task, 0), plan.bases, plan.dH,
                        plan.scratch.of(worker));
  });
  sum_rows(params, plan.partials, plan.workers, pool);
  sum_blocks(params, plan.partials, plan.workers, pool);
}

}  // namespace selective_scan::cpu
