// Launches of the streamed backward kernels.
#include <algorithm>
#include <iterator>
#include <type_traits>

#include "../kit/kernel_table.h"
#include "../kit/launch_tools.h"
#include "../kit/packed_bc.h"
#include "backward_kernels.h"
#include "backward_shape.h"
#include "plan.h"

namespace selective_scan::cuda::streamed {
namespace {

struct Kernels {
  cudaError_t (*summarize)(const BackwardArgs&, const LaunchShape&, cudaStream_t);
  cudaError_t (*run)(const BackwardArgs&, const LaunchShape&, cudaStream_t);
};

template <class T, int kLaneBits, bool kVariable, Elements kElements, LaneMap kMap>
const Kernels& kernels_of(Method method) {
  constexpr bool kIsCommon = kIsCommonBackward<T, kVariable>;
  static constexpr auto kTable = make_kernel_table<Kernels, kIsCommon>([&]<Method kMethod>() {
    constexpr int kSize = size_of(kElements);
    constexpr Elements kOwn = kSize == 2 && !kIsCommon ? Elements::kTwoBytes : kElements;
    Kernels kernels{};
    // Time is not cut into segments if B and C are constant.
    if constexpr (kVariable) {
      kernels.summarize = &StreamedSummary<T, kLaneBits, kSize, kMethod, kMap>::run;
    }
    kernels.run = &StreamedBackward<T, kLaneBits, kOwn, kVariable, kMethod, kMap>::run;
    return kernels;
  });
  return kTable[method];
}

template <int kWarps, Elements kElements, LaneMap kMap>
const Kernels& kernels_of_team(Method method) {
  static constexpr auto kTable = make_kernel_table<Kernels, false>([&]<Method kMethod>() {
    constexpr int kSize = size_of(kElements);
    return Kernels{&StreamedSummary<float, 2, kSize, kMethod, kMap>::run,
                   &TeamBackward<kWarps, kSize, kMethod, kMap>::run};
  });
  return kTable[method];
}

/// Returns the kernels for the call's kind of states; instantiations.py lists them.
template <Elements kElements, LaneMap kMap>
const Kernels& kernels_for(const ScanParams& params, int team_warps) {
  const Method method = params.method;
  if (params.is_complex) return kernels_of<Complex<float>, 3, true, kElements, kMap>(method);
  if (team_warps == 4) return kernels_of_team<4, kElements, kMap>(method);
  if (team_warps == 2) return kernels_of_team<2, kElements, kMap>(method);
  return params.variable_B ? kernels_of<float, 2, true, kElements, kMap>(method)
                           : kernels_of<float, 2, false, kElements, kMap>(method);
}

const Kernels& kernels_for(const ScanParams& params, int team_warps, LaneMap map) {
  return *with_element_type(params.u.dtype, [&]<class Element>(Element*) {
    constexpr Elements kElements = std::is_same_v<Element, float>  ? Elements::kFloat32
                                   : std::is_same_v<Element, Half> ? Elements::kFloat16
                                                                   : Elements::kBFloat16;
    return map == LaneMap::kSteps ? &kernels_for<kElements, LaneMap::kSteps>(params, team_warps)
                                  : &kernels_for<kElements, LaneMap::kChannels>(params, team_warps);
  });
}

}  // namespace

cudaError_t run(const BackwardParams& call, const BackwardPlan& plan, void* memory,
                cudaStream_t stream, const StateExchange* exchange) {
  const BackwardParams params = in_chunks(call);
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
  std::copy(plan.rows.begin(), plan.rows.end(), std::begin(args.rows));
  cudaError_t error = cudaSuccess;
  if (packed_bc != nullptr) {
    error = convert_projections(params, plan.padded_states, packed_bc, stream, plan.cuts,
                                plan.team_warps, {args.done, static_cast<int>(plan.flags)});
  } else if (plan.flags > 0) {
    error = cudaMemsetAsync(args.done, 0, plan.flags * sizeof(int), stream);
  }
  if (error != cudaSuccess) return error;
  const auto summarize = [&] {
    BackwardArgs summary = args;
    std::copy(plan.summary_rows.begin(), plan.summary_rows.end(), std::begin(summary.rows));
    summary.summarizes_all = wants_summary_alone(params) || exchange != nullptr;
    return kernels_for(params, plan.team_warps, plan.summary_map)
        .summarize(summary, plan.summary_shape, stream);
  };
  const auto scan = [&] {
    return kernels_for(params, plan.team_warps, plan.map).run(args, plan.shape, stream);
  };
  error = plan.geometry.segments > 1 || wants_summary_alone(params)
              ? run_in_segments(args.params, plan.geometry.segments, plan.padded_states,
                                args.workspace.segments, exchange, stream, summarize, scan)
              : scan();
  if (error != cudaSuccess || wants_summary_alone(params)) return error;
  GradientParts parts{plan.geometry.sums_per_group, plan.geometry.segments * params.batch,
                      plan.padded_states, plan.team_warps};
  if (params.packed.present()) parts.chunks = args.packed_chunks();
  return add_gradients(params, args.workspace, parts, stream);
}

}  // namespace selective_scan::cuda::streamed
