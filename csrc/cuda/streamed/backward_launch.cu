// Launches of the streamed backward kernels.
#include <algorithm>
#include <array>
#include <iterator>

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

/// Kernels by [Elements except kTwoBytes][LaneMap].
using LaneMapTables = std::array<MethodTable<Kernels>, 2>;
using KernelTables = std::array<LaneMapTables, 3>;

/// Returns tables of the results of make.operator()<kElements, kMap, kMethod>().
template <bool kHasMethods, class Make>
constexpr KernelTables make_tables(const Make& make) {
  const auto table = [&]<Elements kElements, LaneMap kMap>() {
    return make_kernel_table<Kernels, kHasMethods>(
        [&]<Method kMethod>() { return make.template operator()<kElements, kMap, kMethod>(); });
  };
  const auto tables = [&]<Elements kElements>() {
    return LaneMapTables{table.template operator()<kElements, LaneMap::kSteps>(),
                         table.template operator()<kElements, LaneMap::kChannels>()};
  };
  using enum Elements;
  return {tables.template operator()<kBFloat16>(), tables.template operator()<kFloat16>(),
          tables.template operator()<kFloat32>()};
}

Elements elements_of(DType dtype) {
  return dtype == DType::kFloat32   ? Elements::kFloat32
         : dtype == DType::kFloat16 ? Elements::kFloat16
                                    : Elements::kBFloat16;
}

template <class T, int kLaneBits, bool kVariable>
const KernelTables& tables() {
  constexpr bool kIsCommon = kIsCommonBackward<T, kVariable>;
  static constexpr KernelTables kTables =
      make_tables<kIsCommon>([&]<Elements kElements, LaneMap kMap, Method kMethod>() {
        constexpr int kSize = size_of(kElements);
        constexpr bool kIsEither = kSize == 2 && !kIsCommon;
        constexpr Elements kOwn = kIsEither ? Elements::kTwoBytes : kElements;
        Kernels kernels{};
        // Time is not cut into segments if B and C are constant.
        if constexpr (kVariable) {
          kernels.summarize = &StreamedSummary<T, kLaneBits, kSize, kMethod, kMap>::run;
        }
        kernels.run = &StreamedBackward<T, kLaneBits, kOwn, kVariable, kMethod, kMap>::run;
        return kernels;
      });
  return kTables;
}

template <int kWarps>
const KernelTables& team_tables() {
  static constexpr KernelTables kTables =
      make_tables<false>([&]<Elements kElements, LaneMap kMap, Method kMethod>() {
        constexpr int kSize = size_of(kElements);
        return Kernels{&StreamedSummary<float, 2, kSize, kMethod, kMap>::run,
                       &TeamBackward<kWarps, kSize, kMethod, kMap>::run};
      });
  return kTables;
}

/// Returns the tables for the call's kind of states; instantiations.py lists the kernels.
const KernelTables& tables_for(const ScanParams& params, int team_warps) {
  if (params.is_complex) return tables<Complex<float>, 3, true>();
  if (team_warps == 4) return team_tables<4>();
  if (team_warps == 2) return team_tables<2>();
  return params.variable_B ? tables<float, 2, true>() : tables<float, 2, false>();
}

}  // namespace

cudaError_t run(const BackwardParams& call, const BackwardPlan& plan, void* memory,
                cudaStream_t stream, const StateExchange* exchange) {
  const BackwardParams params = in_chunks(call);
  const auto elements = static_cast<size_t>(elements_of(params.u.dtype));
  const LaneMapTables& maps = tables_for(params, plan.team_warps)[elements];
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
  std::copy(plan.rows.begin(), plan.rows.end(), std::begin(args.rows));
  const auto run_type = [&](auto type) {
    using T = decltype(type);
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
      return kernels(plan.summary_map).summarize(summary, plan.summary_shape, stream);
    };
    const auto scan = [&] { return kernels(plan.map).run(args, plan.shape, stream); };
    error = plan.geometry.segments > 1 || wants_summary_alone(params)
                ? run_in_segments<T>(args.params, plan.geometry.segments, plan.padded_states,
                                     args.workspace.segments, exchange, stream, summarize, scan)
                : scan();
    if (error != cudaSuccess || wants_summary_alone(params)) return error;
    GradientParts parts{plan.geometry.sums_per_group, plan.geometry.segments * params.batch,
                        plan.padded_states, plan.team_warps};
    if (params.packed.present()) parts.chunks = args.packed_chunks();
    return add_gradients(params, args.workspace, parts, stream);
  };
  return params.is_complex ? run_type(Complex<float>{}) : run_type(float{});
}

}  // namespace selective_scan::cuda::streamed
