// Launches of the relay kernels.
#include "../../core/method_table.h"
#include "../kit/launch_tools.h"
#include "../kit/packed_bc.h"
#include "kernels.h"
#include "plan.h"

namespace selective_scan::cuda::relay {
namespace {

/// Calls visit with the Storage that suits arrays of vectors of `size` bytes an element, or of
/// none.
template <class Visit>
cudaError_t visit_storage(int size, const Visit& visit) {
  if (size == 2) return visit.template operator()<Vectors<2>>();
  if (size == 4) return visit.template operator()<Vectors<4>>();
  return visit.template operator()<Elements>();
}

template <class Args>
using Launch = cudaError_t (*)(const Args&, const LaunchShape&, cudaStream_t);

/// What rounds.cuh takes; the plan has seen to it that everything fits 32 bits.
RoundsForwardArgs make_rounds_args(const ForwardParams& params, const ForwardPlan& plan) {
  const auto size = static_cast<int>(element_size(params.u.dtype));
  const bool is_reversed = params.u.step < 0;
  const auto bytes = [&](int64_t stride) { return static_cast<int>(stride) * size; };
  const auto first = [&](const ArrayView& view, int steps) {
    return static_cast<char*>(view.data) - (is_reversed ? (steps - 1) * size : 0);
  };
  const auto rows = [&](const ArrayView& view) -> RoundsForwardArgs::Rows {
    if (!view.present()) return {};
    return {first(view, Shape<1, kChunk>::kItems), bytes(view.batch), bytes(view.channel)};
  };
  const auto projection = [&](const ArrayView& view) -> RoundsForwardArgs::Projection {
    return {first(view, kChunk), bytes(view.batch), bytes(view.group), bytes(view.state)};
  };
  const auto once = [&](const ArrayView& view) -> RoundsForwardArgs::Once {
    return {view.data, view.dtype, static_cast<int>(view.batch), static_cast<int>(view.channel),
            static_cast<int>(view.state)};
  };
  RoundsForwardArgs args;
  args.u = rows(params.u);
  args.delta = rows(params.delta);
  args.z = rows(params.z);
  args.out = rows(params.out);
  args.B = projection(params.B);
  args.C = projection(params.C);
  args.dstate = static_cast<int>(params.dstate);
  args.seqlen = static_cast<int>(params.seqlen);
  args.dim = static_cast<int>(params.dim);
  args.group_channels = static_cast<int>(params.dim / params.groups);
  args.slots = plan.slots;
  args.pairs = plan.pairs;
  args.rounds = plan.rounds;
  args.is_reversed = is_reversed;
  args.has_output = params.wanted == ForwardWanted::kOutput;
  args.delta_softplus = params.delta_softplus;
  args.method = params.method;
  args.A = once(params.A);
  args.D = once(params.D);
  args.delta_bias = once(params.delta_bias);
  args.initial_state = once(params.initial_state);
  args.last_state = once(params.last_state);
  args.states = static_cast<float*>(params.states);
  args.groups = static_cast<int>(params.groups);
  args.batches = static_cast<int>(params.batch);
  return args;
}

cudaError_t run_rounds(const ForwardParams& params, const ForwardPlan& plan, cudaStream_t stream) {
  const RoundsForwardArgs args = make_rounds_args(params, plan);
  const auto launch = [&]<DType kType>() {
    static constexpr auto kTable = make_kernel_table<Launch<RoundsForwardArgs>>(
        [&]<Method kMethod>() { return &RoundsForward<kType, kMethod>::launch; });
    return kTable[params.method](args, plan.shape, stream);
  };
  if (params.u.dtype == DType::kFloat32) return launch.template operator()<DType::kFloat32>();
  if (params.u.dtype == DType::kFloat16) return launch.template operator()<DType::kFloat16>();
  return launch.template operator()<DType::kBFloat16>();
}

template <int kWarpsPerMap>
cudaError_t run_relay(const RelayForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  return visit_storage(plan.vector_size, [&]<class Storage>() {
    static constexpr auto kTable =
        make_kernel_table<Launch<RelayForwardArgs>>([&]<Method kMethod>() {
          return &RelayForward<4, 16, kWarpsPerMap, Storage, kMethod>::launch;
        });
    return kTable[args.params.method](args, plan.shape, stream);
  });
}

}  // namespace

cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void* memory,
                cudaStream_t stream) {
  if (plan.has_one_state) return run_rounds(params, plan, stream);
  void* const packed_bc = plan.scratch.packed_bc.in(memory);
  const cudaError_t error = convert_projections(params, kPaddedStates, packed_bc, stream);
  if (error != cudaSuccess) return error;
  const RelayForwardArgs args{params, plan.geometry, static_cast<const char*>(packed_bc),
                              PackedBC(params, kPaddedStates).sequence_bytes(),
                              plan.shape.is_dependent};
  return plan.geometry.cluster > 1 ? run_relay<kClusterWarpsPerMap>(args, plan, stream)
                                   : run_relay<1>(args, plan, stream);
}

cudaError_t run(const BackwardParams& params, const BackwardPlan& plan, void* memory,
                cudaStream_t stream) {
  const RelayBackwardArgs args{params, plan.geometry, backward_workspace(plan.scratch, memory)};
  const cudaError_t error = visit_storage(plan.vector_size, [&]<class Storage>() {
    static constexpr auto kTable = make_kernel_table<Launch<RelayBackwardArgs>>(
        [&]<Method kMethod>() { return &RelayBackward<Storage, kMethod>::launch; });
    return kTable[params.method](args, plan.shape, stream);
  });
  if (error != cudaSuccess) return error;
  return add_gradients(params, args.workspace, {plan.geometry.tiles, params.batch, kPaddedStates},
                       stream);
}

}  // namespace selective_scan::cuda::relay
