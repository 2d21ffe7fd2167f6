// The general diagonal scan on the CPU: the division of rows and the passes over them.
//
// If there are few rows, they are split into time segments and take three passes: the affine map
// h -> product·h + offset of every segment, the state with which every segment begins, and the scan
// itself. If there are many rows, one pass scans them.

#include "../launch.h"

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "../../core/affine_map.h"
#include "../../core/element.h"
#include "../calls.h"
#include "../capability.h"
#include "../tasks.h"

namespace selective_scan::cpu {
namespace {

/// Rows are split until there are this many chains, as long as segments keep kMinSegment steps.
constexpr int64_t kWantedChains = 512;
constexpr int64_t kMinSegment = 1024;
/// Fewer rows than this would leave lanes idle, so segments of one row fill the lanes instead.
constexpr int64_t kEnoughRows = 16;

DiagonalSplit split_of(const DiagonalScanParams& params) {
  DiagonalSplit split;
  split.segments = num_segments(params);
  split.segment_steps = ceil_div(params.seqlen, split.segments);
  const int64_t* sizes = params.row_sizes;
  // The last of the largest dimensions, whose rows are usually the closest in memory.
  for (int dim = 1; dim < params.row_dims; ++dim) {
    if (sizes[dim] >= sizes[split.lane_dim]) split.lane_dim = dim;
  }
  split.lane_rows = params.row_dims == 0 ? 1 : sizes[split.lane_dim];
  split.outers = params.rows / split.lane_rows;
  split.lanes_are_segments = split.segments > 1 && split.lane_rows < kEnoughRows;
  return split;
}

/// Replaces each map's offset by the state with which its segment begins, for the rows of one outer
/// index. `given` holds the states before the rows; absent means zero.
template <class T>
void start_segments(const DiagonalScanParams& params, const DiagonalSplit& split,
                    const DiagonalArray& given, int64_t outer, void* workspace) {
  auto* map = static_cast<AffineMap<T>*>(workspace) + outer * split.lane_rows * split.segments;
  const int64_t first = split.outer_offset(params, given, outer);
  for (int64_t row = 0; row < split.lane_rows; ++row) {
    T state{};
    if (given.present()) {
      const int64_t stride = params.row_dims == 0 ? 0 : given.row[split.lane_dim];
      state = load_value<T>(given, first + row * stride);
    }
    for (int64_t segment = 0; segment < split.segments; ++segment, ++map) {
      const T after = (*map)(state);
      map->offset = state;
      state = after;
    }
  }
}

const DiagonalKernels& kernels_for(const DiagonalScanParams& params) {
  return chosen_kernels(params.is_double).diagonal[params.is_complex];
}

template <class Params>
void run(const Params& params, const DiagonalPass<Params>& pass, void* workspace,
         const ThreadPool& pool) {
  const DiagonalSplit split = split_of(params);
  const int64_t tasks = split.tasks(kernels_for(params).lanes);
  if (split.segments > 1) {
    parallel_for(pool, tasks, [&](int64_t task) { pass.map(params, split, task, workspace); });
    const auto start =
        params.is_double
            ? (params.is_complex ? start_segments<Complex<double>> : start_segments<double>)
            : (params.is_complex ? start_segments<Complex<float>> : start_segments<float>);
    // The backward scan begins with zero: the gradient of the last state is part of dh.
    constexpr bool kIsForward = std::is_same_v<Params, DiagonalForwardParams>;
    const DiagonalArray initial_state = kIsForward ? params.initial_state : DiagonalArray();
    parallel_for(pool.one_thread(), split.outers,
                 [&](int64_t outer) { start(params, split, initial_state, outer, workspace); });
  }
  parallel_for(pool, tasks, [&](int64_t task) { pass.scan(params, split, task, workspace); });
}

void advance(DiagonalArray& array, int64_t index) {
  if (!array.present()) return;
  array.data = element_at(array, index * array.step);
}

/// Returns the parameters of one packed sequence, whose steps and states are found in the given
/// arrays.
template <class Params>
Params params_of(const Params& packed, int64_t sequence,
                 std::type_identity_t<std::initializer_list<DiagonalArray Params::*>> steps,
                 std::type_identity_t<std::initializer_list<DiagonalArray Params::*>> states) {
  Params params = packed;
  const int64_t begin = packed.packed.begin(sequence);
  params.packed = {};
  params.seqlen = packed.packed.end(sequence) - begin;
  for (DiagonalArray Params::* array : steps) advance(params.*array, begin);
  for (DiagonalArray Params::* array : states) advance(params.*array, sequence);
  return params;
}
DiagonalForwardParams params_of(const DiagonalForwardParams& packed, int64_t sequence) {
  using P = DiagonalForwardParams;
  return params_of(packed, sequence, {&P::a, &P::b, &P::h}, {&P::initial_state});
}
DiagonalBackwardParams params_of(const DiagonalBackwardParams& packed, int64_t sequence) {
  using P = DiagonalBackwardParams;
  return params_of(packed, sequence, {&P::a, &P::dh, &P::h_previous, &P::db, &P::da},
                   {&P::initial_state, &P::dinitial_state});
}

int64_t bytes_of_call(const DiagonalScanParams& call, const ThreadPool&) {
  const int64_t segments = num_segments(call);
  return segments == 1 ? 0 : call.rows * segments * 2 * number_bytes(call);
}

template <class Params>
void run_calls(const Params& params, const DiagonalPass<Params>& pass, void* workspace,
               const ThreadPool& pool) {
  const Calls calls(params, params_of, true, pool);
  calls.run(workspace, calls.workspace_bytes(bytes_of_call),
            [&](int64_t, const Params& call, void* memory, const ThreadPool& threads) {
              run(call, pass, memory, threads);
            });
}

}  // namespace

int64_t num_segments(const DiagonalScanParams& params) {
  if (params.rows == 0) return 1;
  const int64_t wanted = ceil_div(kWantedChains, params.rows);
  const int64_t segments = std::clamp<int64_t>(params.seqlen / kMinSegment, 1, wanted);
  // Recomputed from whole segments, since otherwise the last segments could be empty.
  const int64_t steps = ceil_div(params.seqlen, segments);
  return steps == 0 ? 1 : ceil_div(params.seqlen, steps);
}

int64_t workspace_bytes(const DiagonalForwardParams& params, const ThreadPool& pool) {
  return Calls(params, params_of, true, pool).workspace_bytes(bytes_of_call);
}

int64_t workspace_bytes(const DiagonalBackwardParams& params, const ThreadPool& pool) {
  return Calls(params, params_of, true, pool).workspace_bytes(bytes_of_call);
}

void launch(const DiagonalForwardParams& params, void* workspace, const ThreadPool& pool) {
  run_calls(params, kernels_for(params).forward, workspace, pool);
}

void launch(const DiagonalBackwardParams& params, void* workspace, const ThreadPool& pool) {
  run_calls(params, kernels_for(params).backward, workspace, pool);
}

}  // namespace selective_scan::cpu
