// Launches of the streamed forward kernels.
#include "../kit/kernel_table.h"
#include "../kit/packed_bc.h"
#include "forward_kernels.h"
#include "plan.h"

namespace selective_scan::cuda::streamed {
namespace {

struct Kernels {
  cudaError_t (*launch)(const ForwardArgs&, const LaunchShape&, cudaStream_t);
  cudaError_t (*summarize)(const ForwardArgs&, cudaStream_t);
};

template <class T, int kStates, int kLaneBits>
const Kernels& kernels_of(Method method) {
  static constexpr auto kTable =
      make_kernel_table<Kernels, kIsCommonShape<T, kStates>>([&]<Method kMethod>() {
        using Instance = StreamedForward<T, kStates, kLaneBits, kMethod>;
        return Kernels{&Instance::launch, &Instance::summarize};
      });
  return kTable[method];
}

/// Returns the kernels for the call's kind of states; instantiations.py lists them.
const Kernels& kernels_for(const ScanParams& params, int lane_states) {
  if (params.is_complex) return kernels_of<Complex<float>, 2, 3>(params.method);
  if (lane_states == 4) return kernels_of<float, 4, 2>(params.method);
  if (lane_states == 8) return kernels_of<float, 8, 2>(params.method);
  return kernels_of<float, 16, 2>(params.method);
}

}  // namespace

cudaError_t run(const ForwardParams& call, const ForwardPlan& plan, void* memory,
                cudaStream_t stream, const StateExchange* exchange) {
  const ForwardParams params = in_chunks(call);
  const Kernels& kernels = kernels_for(params, plan.lane_states);
  ForwardArgs args{};
  static_cast<ForwardGeometry&>(args) = plan.geometry;
  args.params = params;
  const auto& [u, delta, z, out, input_delta] = plan.rows;  // as rows_of() returns them
  args.u = u;
  args.delta = delta;
  args.z = z;
  args.out = out;
  args.input_delta = input_delta;
  args.map = plan.map;
  args.chunks = plan.chunks;
  args.states = segment_states(plan.scratch, memory);
  void* const packed_bc = plan.scratch.packed_bc.in(memory);
  args.projections = static_cast<const char*>(packed_bc);
  if (packed_bc != nullptr) {
    const cudaError_t error =
        convert_projections(params, plan.padded_states, packed_bc, stream, plan.cuts);
    if (error != cudaSuccess) return error;
  }
  const auto scan = [&] { return kernels.launch(args, plan.shape, stream); };
  if (!wants_summary_alone(params) && args.segments == 1) return scan();
  args.summarizes_all = wants_summary_alone(params) || exchange != nullptr;
  const auto summarize = [&] { return kernels.summarize(args, stream); };
  return run_in_segments(args.params, args.segments, plan.padded_states, args.states, exchange,
                         stream, summarize, scan);
}

}  // namespace selective_scan::cuda::streamed
