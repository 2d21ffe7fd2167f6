#include "packed_edges.h"

#include <algorithm>

#include "elements.cuh"
#include "launch_tools.h"

namespace selective_scan::cuda {
namespace {

constexpr int kEdgeThreads = 128;
/// Few enough to take no time in the most common case, in which there is nothing to do.
constexpr int64_t kMostEdgeBlocks = 1024;
constexpr int64_t kFewestEdgeBlocks = 64;

/// An output array (outer, inner, step), complex if `is_complex`.
struct StepArray {
  ArrayView view;
  bool is_complex = false;
  int64_t outers = 0;
  int64_t inners = 1;
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;
};

struct EdgeArgs {
  PackedSequences packed;
  int64_t dim;
  int64_t dstate;
  ArrayView from;  // the states of sequences without steps, and their destination
  ArrayView to;
  StepArray arrays[2 + BackwardParams::kRowGradients.size()];
};

StepArray channels_of(const ArrayView& view, const ScanParams& params) {
  return {view, false, view.present() ? params.dim : 0, 1, view.channel, 0};
}

StepArray projections_of(const ArrayView& view, bool is_variable, const ScanParams& params) {
  return {view,          params.is_complex, is_variable ? params.groups : 0,
          params.dstate, view.group,        view.state};
}

template <class T>
__device__ void copy_empty_states(const EdgeArgs& args) {
  if (!args.to.present()) return;
  for (int64_t sequence = blockIdx.x; sequence < args.packed.count; sequence += gridDim.x) {
    if (args.packed.begin(sequence) < args.packed.end(sequence)) continue;
    for (int64_t i = threadIdx.x; i < args.dim * args.dstate; i += kEdgeThreads) {
      const auto at = [&](const ArrayView& view) {
        return sequence * view.batch + i / args.dstate * view.channel +
               i % args.dstate * view.state;
      };
      store_component(args.to, at(args.to), load_component<T>(args.from, at(args.from)));
    }
  }
}

template <class T>
__device__ void clear_steps_of_none(const EdgeArgs& args) {
  const int64_t before = args.packed.first_begin();
  const int64_t behind = args.packed.last_end();
  const int64_t steps = before + (behind < args.packed.total ? args.packed.total - behind : 0);
  if (steps == 0) return;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kEdgeThreads;
  for (const StepArray& array : args.arrays) {
    const int64_t count = array.outers * array.inners * steps;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kEdgeThreads + threadIdx.x; i < count;
         i += threads) {
      const int64_t row = i / steps;
      const int64_t rest = i % steps;
      const int64_t step = rest < before ? rest : behind + (rest - before);
      const int64_t at = row / array.inners * array.outer_stride +
                         row % array.inners * array.inner_stride + step * array.view.step;
      if (array.is_complex) {
        store_component(array.view, at, T{});
      } else {
        store_component(array.view, at, real_t<T>{});
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kEdgeThreads)
    packed_edges_kernel(const __grid_constant__ EdgeArgs args) {
  copy_empty_states<T>(args);
  clear_steps_of_none<T>(args);
}

cudaError_t launch(const ScanParams& params, const EdgeArgs& args, cudaStream_t stream) {
  const int64_t blocks = std::clamp(params.packed.count, kFewestEdgeBlocks, kMostEdgeBlocks);
  return with_state_type(params, [&]<class T>(T*) {
    return launch_kernel(packed_edges_kernel<T>, {blocks, kEdgeThreads}, stream, args);
  });
}

}  // namespace

cudaError_t write_packed_edges(const ForwardParams& params, cudaStream_t stream) {
  const EdgeArgs args{params.packed,        params.dim,        params.dstate,
                      params.initial_state, params.last_state, {channels_of(params.out, params)}};
  return launch(params, args, stream);
}

cudaError_t write_packed_edges(const BackwardParams& params, cudaStream_t stream) {
  EdgeArgs args{params.packed,
                params.dim,
                params.dstate,
                params.dlast_state,
                params.dinitial_state,
                {projections_of(params.dB, params.variable_B, params),
                 projections_of(params.dC, params.variable_C, params)}};
  StepArray* array = args.arrays + 2;
  for (const auto row : BackwardParams::kRowGradients) {
    *array++ = channels_of(params.*row, params);
  }
  return launch(params, args, stream);
}

}  // namespace selective_scan::cuda
