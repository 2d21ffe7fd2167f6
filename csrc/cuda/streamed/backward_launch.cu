// Launches of the streamed backward kernels.
#include <algorithm>
#include <array>
#include <iterator>

#include "../../core/method_table.h"
#include "../kit/launch_tools.h"
#include "../kit/packed_bc.h"
#include "../plan/segments.h"
#include "backward_kernels.h"

namespace selective_scan::cuda::streamed {
namespace {

struct Kernels {
  cudaError_t (*summarize)(const BackwardArgs&, const LaunchShape&, cudaStream_t);
  cudaError_t (*run)(const BackwardArgs&, const LaunchShape&, cudaStream_t);
};

/// [element size / 2 - 1][LaneMap]
using KernelTables = std::array<std::array<MethodTable<Kernels>, 2>, 2>;

/// The tables of what make.operator()<kSize, kMap, kMethod>() returns.
template <class Make>
constexpr KernelTables make_tables(const Make& make) {
  const auto table = [&]<int kSize, LaneMap kMap>() {
    return make_method_table<Kernels>(
        [&]<Method kMethod>() { return make.template operator()<kSize, kMap, kMethod>(); });
  };
  using enum LaneMap;
  return {{{table.template operator()<2, kSteps>(), table.template operator()<2, kChannels>()},
           {table.template operator()<4, kSteps>(), table.template operator()<4, kChannels>()}}};
}

template <class T, int kLaneBits, bool kVariable>
const KernelTables& tables() {
  static constexpr KernelTables kTables =
      make_tables([&]<int kSize, LaneMap kMap, Method kMethod>() {
        using Instance = StreamedBackward<T, kLaneBits, kSize, kVariable, kMethod, kMap>;
        return Kernels{&Instance::summarize, &Instance::run};
      });
  return kTables;
}

template <int kWarps>
const KernelTables& team_tables() {
  static constexpr KernelTables kTables =
      make_tables([&]<int kSize, LaneMap kMap, Method kMethod>() {
        using Summary = StreamedBackward<float, 2, kSize, true, kMethod, kMap>;
        return Kernels{&Summary::summarize, &TeamBackward<kWarps, kSize, kMethod, kMap>::run};
      });
  return kTables;
}

/// See instantiations.py.
const KernelTables& tables_for(const ScanParams& params, int team_warps) {
  if (params.is_complex) return tables<Complex<float>, 3, true>();
  if (team_warps == 4) return team_tables<4>();
  if (team_warps == 2) return team_tables<2>();
  return params.variable_B ? tables<float, 2, true>() : tables<float, 2, false>();
}

/// The arguments of a summary run for the gradient of the initial state alone; plan.summary_rows
/// are what they must be already.
void begin_behind_front_segment(const BackwardParams& params, const StreamedBackwardPlan& plan,
                                BackwardArgs& summary) {
  summary.params = behind_front_segment(params, plan.geometry);
  // As where the last state has a gradient, the summary is then of dout·C.
  summary.params.dlast_state = params.dinitial_state;
  if (summary.projections == nullptr) return;
  const int chunk_bytes = PackedBC(params, plan.padded_states).chunk_bytes;
  summary.projections -= plan.geometry.segment_steps / kChunk * chunk_bytes;
}

}  // namespace

cudaError_t run(const BackwardParams& call, const StreamedBackwardPlan& plan, void* memory,
                cudaStream_t stream) {
  const BackwardParams params = in_chunks(call);
  const auto& maps = tables_for(params, plan.team_warps)[element_size(params.u.dtype) / 2 - 1];
  const auto kernels = [&](LaneMap map) -> const Kernels& {
    return maps[static_cast<size_t>(map)][params.method];
  };
  const BackwardScratch& scratch = plan.scratch;
  void* const packed_bc = scratch.packed_bc.in(memory);
  BackwardArgs args = {params,
                       plan.geometry,
                       backward_workspace(scratch, memory),
                       {},
                       static_cast<const char*>(packed_bc),
                       PackedBC(params, plan.padded_states).sequence_bytes(),
                       plan.split_tiles,
                       scratch.flags.in<int>(memory)};
  args.workspace.slices = plan.team_warps;
  std::copy(plan.rows.begin(), plan.rows.end(), std::begin(args.rows));
  const auto run_type = [&](auto type) {
    using T = decltype(type);
    cudaError_t error = cudaSuccess;
    if (packed_bc != nullptr) {
      error = convert_projections(params, plan.padded_states, packed_bc, stream, plan.team_warps,
                                  {args.done, static_cast<int>(plan.flags)});
    } else if (plan.flags > 0) {
      error = cudaMemsetAsync(args.done, 0, plan.flags * sizeof(int), stream);
    }
    if (error == cudaSuccess && plan.geometry.segments > 1) {
      BackwardArgs summary = args;
      std::copy(plan.summary_rows.begin(), plan.summary_rows.end(), std::begin(summary.rows));
      if (params.wants_state_alone()) begin_behind_front_segment(params, plan, summary);
      error = kernels(plan.summary_map).summarize(summary, plan.summary_shape, stream);
      if (error != cudaSuccess) return error;
      error = combine_segments<T>(params, params.dlast_state, plan.geometry, plan.padded_states,
                                  true, args.workspace.segments, stream);
    }
    if (error == cudaSuccess && params.wants_state_alone()) {
      return copy_state_gradient<T>(params, plan.padded_states, args.workspace.segments, stream);
    }
    if (error == cudaSuccess) error = kernels(plan.map).run(args, plan.shape, stream);
    if (error != cudaSuccess) return error;
    if (params.packed.present()) {
      return reduce_packed_gradients(params, args.packed_chunks(), plan.geometry,
                                     plan.padded_states, args.workspace, stream);
    }
    return reduce_gradients<T>(params, plan.geometry, plan.padded_states, args.workspace, stream);
  };
  return params.is_complex ? run_type(Complex<float>{}) : run_type(float{});
}

}  // namespace selective_scan::cuda::streamed
