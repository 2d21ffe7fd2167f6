#include "../launch.h"

#include <algorithm>
#include <type_traits>

#include "../calls.h"
#include "../capability.h"
#include "../tasks.h"
#include "gradient_sums.h"
#include "kernels.h"
#include "packed.h"
#include "segments.h"

namespace selective_scan::cpu {
namespace {

/// A forward task is small enough to keep all threads busy and large enough to spread the cost of
/// staging B and C. Both sizes are multiples of every instruction set's vector width.
constexpr int64_t kLargestForwardBlock = 64;
constexpr int64_t kSmallestForwardBlock = 16;
/// A backward task is large enough that the partial sums of dB and dC, one each per block, stay
/// within batch·dim·dstate·seqlen/32 values. Its size never depends on the number of threads.
constexpr int64_t kSmallestBackwardBlock = 64;

const Kernels& kernels_for(const ScanParams& params) {
  return chosen_kernels(params.is_double).selective[params.is_complex];
}

Partition partition_of(const ScanParams& params, int64_t block_channels) {
  const int64_t lanes = kernels_for(params).lanes;
  const int64_t lane_groups = lanes_are_groups(params, lanes) ? lanes : 1;
  return cpu::partition_of(params, params.batch, lane_groups, block_channels);
}

double updates_of(const ScanParams& params) {
  return static_cast<double>(params.batch) * params.dim * params.dstate *
         std::max<int64_t>(params.seqlen, 1);
}
/// Returns whether the problem is large enough for more than one thread.
bool is_parallel(const ScanParams& params, const ThreadPool& pool) {
  return pool.num_threads > 1 && updates_of(params) >= kSerialUpdates;
}

/// A chain's parts of the sequence, grouped into runs of about equal length, each taken by one
/// thread. While the first run is scanned, other threads find the maps of the runs between the
/// first and the last. Then those runs, whose entering states are known by now, and the last run
/// are scanned. There is only one run if there are enough chains.
struct Runs {
  int64_t count = 1;
  int64_t parts;

  Runs(const ScanParams& params, const Partition& partition, const ThreadPool& pool)
      : parts(partition.segmentation.parts()) {
    const int64_t chains = std::max<int64_t>(partition.chains(), 1);
    if (!is_parallel(params, pool) || 3 * chains > 2 * pool.num_threads) return;
    // Two runs per thread, once the first runs are scanned.
    const int64_t most = 1 + 2 * pool.num_threads / chains;
    if (parts >= kFewestRuns) count = std::min(most, parts);
  }
  /// Returns the first part of a run, in the order of the scan.
  int64_t begin(int64_t run) const { return run * parts / count; }

 private:
  static constexpr int64_t kFewestRuns = 3;
};

int64_t workers_for(const ScanParams& params, int64_t tasks, const ThreadPool& pool) {
  return workers_for(tasks, updates_of(params), kSerialUpdates, pool);
}

Partition forward_partition(const ScanParams& params, const ThreadPool& pool) {
  if (!is_parallel(params, pool)) return partition_of(params, kLargestForwardBlock);
  // A few tasks per thread, so that the threads finish together.
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

/// Adds the segments that the shape suggests to a partition, and at least `fewest`, 0 or 1.
Partition segmented(Partition partition, const ScanParams& params, const Kernels& kernels,
                    int64_t chain_channels, int64_t fewest, Arena& arena) {
  Segmentation& segmentation = partition.segmentation;
  segmentation = segmentation_of(params, partition, kernels.lanes, chain_channels);
  if (segmentation.count < fewest) {
    segmentation.steps = round_up(params.seqlen, kStateChunk);
    segmentation.count = fewest;
  }
  take_arrays(segmentation, params, arena);
  return partition;
}

int64_t map_scratch_bytes(const ScanParams& params, const Partition& partition,
                          const Kernels& kernels) {
  if (!partition.segmentation.present()) return 0;
  return kernels.map_scratch_bytes(params, partition.block(0, 0));
}

/// The plan of a pass over one call, and its memory. With a null workspace it only measures.
struct ScanPlan {
  const Kernels& kernels;
  Arena arena;
  Partition partition;
  Runs runs;
  int64_t workers;

  /// Cuts `whole` into segments if chains of `chain_channels` channels would leave threads idle.
  ScanPlan(const ScanParams& params, const Partition& whole, int64_t chain_channels,
           void* workspace, const ThreadPool& pool, int64_t fewest_segments = 0)
      : kernels(kernels_for(params)),
        arena{static_cast<char*>(workspace)},
        partition(segmented(whole, params, kernels, chain_channels, fewest_segments, arena)),
        runs(params, partition, pool),
        workers(workers_for(params, partition.chains() * runs.parts, pool)) {}
};

struct ForwardPlan : ScanPlan {
  WorkerScratch scratch;

  ForwardPlan(const ForwardParams& params, void* workspace, const ThreadPool& pool)
      : ScanPlan(params, forward_partition(params, pool), kSmallestForwardBlock, workspace, pool),
        scratch(arena, workers,
                std::max(map_scratch_bytes(params, partition, kernels),
                         kernels.forward_scratch_bytes(params, partition.block(0, 0)))) {}
};

struct BackwardPlan : ScanPlan {
  BackwardPartials blocks;
  WorkerScratch scratch;

  BackwardPlan(const BackwardParams& params, void* workspace, const ThreadPool& pool)
      : ScanPlan(params, backward_partition(params), kSmallestBackwardBlock, workspace, pool),
        scratch((take_blocks(params, partition, arena, blocks), arena), workers,
                std::max(map_scratch_bytes(params, partition, kernels),
                         kernels.backward_scratch_bytes(params, partition.block(0, 0)))) {}
};

/// The plan for computing maps alone, of at least one segment.
struct MapPlan : ScanPlan {
  WorkerScratch scratch;

  MapPlan(const ScanParams& params, void* workspace, const ThreadPool& pool)
      : ScanPlan(params, forward_partition(params, pool), kSmallestForwardBlock, workspace, pool,
                 1),
        scratch(arena, workers, map_scratch_bytes(params, partition, kernels)) {}
};

/// A kernel that computes the affine maps of a block's segments.
template <class Params>
using Maps = void (*)(const Params&, const Block&, void* scratch);

/// A pass in which scan(block, scratch) scans a block. Parts and segments are numbered in the order
/// of the scan.
template <class Plan, class Params, class Scan>
class Pass {
 public:
  Pass(const Plan& plan, const Params& params, const ThreadPool& pool, Maps<Params> maps,
       const Scan& scan)
      : plan_(plan), params_(params), pool_(pool), maps_(maps), scan_(scan) {}

  void run() const {
    const Segmentation& segmentation = plan_.partition.segmentation;
    if (segmentation.lanes_are_segments()) {
      for_each_run(0, runs_.parts, [&](int64_t chain, int64_t part, void* scratch) {
        maps_(params_, block(chain, part), scratch);
      });
      join_channels(0, segmentation.count);
      for_each_run(0, runs_.parts, [&](int64_t chain, int64_t part, void* scratch) {
        scan_(block(chain, part), scratch);
      });
      return;
    }
    // Nothing waits for the last run's map.
    const int64_t last = runs_.count - 1;
    for_each_run(0, std::max<int64_t>(last, 1), [&](int64_t chain, int64_t run, void* scratch) {
      if (run == 0) return scan_run(chain, run, scratch);
      for (int64_t part = runs_.begin(run); part < runs_.begin(run + 1); ++part) {
        maps_(params_, block(chain, part), scratch);
      }
    });
    if (last == 0) return;
    join_channels(runs_.begin(1), runs_.begin(last));
    for_each_run(1, runs_.count,
                 [&](int64_t chain, int64_t run, void* scratch) { scan_run(chain, run, scratch); });
  }

 private:
  static constexpr bool kIsForward = std::is_same_v<Params, ForwardParams>;

  Block block(int64_t chain, int64_t part) const {
    return plan_.partition.block(chain, kIsForward ? part : runs_.parts - 1 - part);
  }

  /// Scans a run. In the first and the last run, the states between segments are computed on the
  /// way.
  void scan_run(int64_t chain, int64_t run, void* scratch) const {
    const bool is_known = run > 0 && run < runs_.count - 1;
    for (int64_t part = runs_.begin(run); part < runs_.begin(run + 1); ++part) {
      Block block = this->block(chain, part);
      block.finds_map = !is_known && part + 1 < runs_.parts;
      scan_(block, scratch);
      if (!block.finds_map) continue;
      for (int64_t channel = 0; channel < block.channels; ++channel) {
        join_segments(params_, block.segmentation, block.batch, block.first_channel + channel, part,
                      part + 1);
      }
    }
  }

  /// Calls run(chain, run, scratch) for the runs `begin` to `end` - 1 of all chains.
  template <class Run>
  void for_each_run(int64_t begin, int64_t end, const Run& run) const {
    const int64_t chains = plan_.partition.chains();
    run_tasks(chains * (end - begin), plan_.workers, pool_, [&](int64_t task, int64_t worker) {
      run(task % chains, begin + task / chains, plan_.scratch.of(worker));
    });
  }

  void join_channels(int64_t begin, int64_t end) const {
    run_tasks(params_.batch * params_.dim, plan_.workers, pool_, [&](int64_t task, int64_t) {
      join_segments(params_, plan_.partition.segmentation, task / params_.dim, task % params_.dim,
                    begin, end);
    });
  }

  const Plan& plan_;
  const Runs& runs_ = plan_.runs;
  const Params& params_;
  const ThreadPool& pool_;
  const Maps<Params> maps_;
  const Scan& scan_;
};

int64_t bytes_of_forward(const ForwardParams& call, const ThreadPool& pool) {
  if (wants_summary_alone(call)) return MapPlan(call, nullptr, pool).arena.bytes;
  return ForwardPlan(call, nullptr, pool).arena.bytes;
}
int64_t bytes_of_backward(const BackwardParams& call, const ThreadPool& pool) {
  return BackwardPlan(call, nullptr, pool).arena.bytes;
}

/// The sums over the calls, and the memory of the calls themselves.
struct BackwardSums {
  Calls<BackwardParams> calls;
  Arena arena;
  BackwardPartials rows;
  int64_t* first_rows;  // of each call
  int64_t bytes_of_calls;
  char* of_calls;

  BackwardSums(const BackwardParams& params, void* workspace, const ThreadPool& pool)
      : calls(params, params_of, is_parallel(params, pool), pool),
        arena{static_cast<char*>(workspace)} {
    // One more, so that the memory is never empty: with no calls, null pointers would mean that the
    // sums are not wanted.
    first_rows = arena.take<int64_t>(calls.count() + 1);
    int64_t count = 0;
    for (int64_t i = 0; i < calls.count(); ++i) {
      if (workspace) first_rows[i] = count;
      count += rows_of(calls[i]);
    }
    rows = take_rows(params, count, arena);
    rows.dA = arena.take<char>(count * params.dim * params.dstate * number_bytes(params));
    bytes_of_calls = calls.workspace_bytes(bytes_of_backward);
    of_calls = arena.take<char>(bytes_of_calls);
  }

  static int64_t rows_of(const BackwardParams& call) {
    const int64_t lanes = kernels_for(call).lanes;
    return call.batch *
           segmentation_of(call, backward_partition(call), lanes, kSmallestBackwardBlock).parts();
  }
};

/// Computes and joins the maps of segments and, in a forward pass, stores their common factor.
template <class Params>
void find_map(const Params& params, void* workspace, const ThreadPool& pool, Maps<Params> maps) {
  const MapPlan plan(params, workspace, pool);
  const Partition& partition = plan.partition;
  const Segmentation& segmentation = partition.segmentation;
  const int64_t tasks = partition.chains() * plan.runs.parts;
  run_tasks(tasks, plan.workers, pool, [&](int64_t task, int64_t worker) {
    const Block block = partition.block(task % partition.chains(), task / partition.chains());
    maps(params, block, plan.scratch.of(worker));
  });
  run_tasks(params.batch * params.dim, plan.workers, pool, [&](int64_t row, int64_t) {
    const int64_t batch = row / params.dim, channel = row % params.dim;
    join_segments(params, segmentation, batch, channel, 0, segmentation.count);
    if constexpr (std::is_same_v<Params, ForwardParams>) {
      store_map_factor(params, segmentation, batch, channel);
    }
  });
}

void forward_call(const ForwardParams& params, void* workspace, const ThreadPool& pool) {
  if (wants_summary_alone(params)) {
    return find_map(params, workspace, pool, kernels_for(params).forward_maps_alone);
  }
  const ForwardPlan plan(params, workspace, pool);
  const auto scan = [&](const Block& block, void* scratch) {
    plan.kernels.forward(params, block, scratch);
  };
  Pass(plan, params, pool, plan.kernels.forward_maps, scan).run();
}

void backward_call(const BackwardParams& params, const BackwardPartials& rows, void* workspace,
                   const ThreadPool& pool) {
  const BackwardPlan plan(params, workspace, pool);
  BackwardPartials partials = rows;
  partials.dB_blocks = plan.blocks.dB_blocks;
  partials.dC_blocks = plan.blocks.dC_blocks;
  partials.blocks_per_group = plan.blocks.blocks_per_group;
  const auto scan = [&](const Block& block, void* scratch) {
    plan.kernels.backward(params, block, partials, scratch);
  };
  Pass(plan, params, pool, plan.kernels.backward_maps, scan).run();
  sum_blocks(params, partials, plan.workers, pool);
}

}  // namespace

int64_t workspace_bytes(const ForwardParams& params, const ThreadPool& pool) {
  return Calls(params, params_of, is_parallel(params, pool), pool)
      .workspace_bytes(bytes_of_forward);
}

int64_t workspace_bytes(const BackwardParams& params, const ThreadPool& pool) {
  return wants_summary_alone(params) ? MapPlan(params, nullptr, pool).arena.bytes
                                     : BackwardSums(params, nullptr, pool).arena.bytes;
}

void launch(const ForwardParams& params, void* workspace, const ThreadPool& pool) {
  if (!params.packed.present()) return forward_call(params, workspace, pool);
  const Calls calls(params, params_of, is_parallel(params, pool), pool);
  calls.run(workspace, calls.workspace_bytes(bytes_of_forward),
            [&](int64_t, const ForwardParams& call, void* memory, const ThreadPool& threads) {
              forward_call(call, memory, threads);
            });
  clear_padding(params);
}

void launch(const BackwardParams& params, void* workspace, const ThreadPool& pool) {
  if (wants_summary_alone(params)) {
    return find_map(params, workspace, pool, kernels_for(params).backward_maps_alone);
  }
  const BackwardSums sums(params, workspace, pool);
  sums.calls.run(
      sums.of_calls, sums.bytes_of_calls,
      [&](int64_t i, const BackwardParams& call, void* memory, const ThreadPool& threads) {
        backward_call(call, rows_from(params, sums.rows, sums.first_rows[i]), memory, threads);
      });
  sum_rows(params, sums.rows, is_parallel(params, pool) ? pool.num_threads : 1, pool);
  if (params.packed.present()) clear_padding(params);
}

}  // namespace selective_scan::cpu
