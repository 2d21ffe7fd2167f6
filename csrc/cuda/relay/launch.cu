// Launches of the relay kernels.
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
  return visit.template operator()<Scattered>();
}

}  // namespace

cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void* memory,
                cudaStream_t stream) {
  void* const packed_bc = plan.scratch.packed_bc.in(memory);
  const cudaError_t error = convert_projections(params, kPaddedStates, packed_bc, stream);
  if (error != cudaSuccess) return error;
  const RelayForwardArgs args{params, plan.geometry, static_cast<const char*>(packed_bc),
                              PackedBC(params, kPaddedStates).sequence_bytes(),
                              plan.shape.is_dependent};
  return visit_storage(plan.vector_size, [&]<class Storage>() {
    return RelayForward<4, 16, Storage>::launch(args, plan.shape, stream);
  });
}

cudaError_t run(const BackwardParams& params, const BackwardPlan& plan, void* memory,
                cudaStream_t stream) {
  const RelayBackwardArgs args{params, plan.geometry, backward_workspace(plan.scratch, memory)};
  const cudaError_t error = visit_storage(plan.vector_size, [&]<class Storage>() {
    return RelayBackward<Storage>::launch(args, plan.shape, stream);
  });
  if (error != cudaSuccess) return error;
  return add_gradients(params, args.workspace, {plan.geometry.tiles, params.batch, kPaddedStates},
                       stream);
}

}  // namespace selective_scan::cuda::relay
