// Launches of the relay kernels.
#include "../kit/launch_tools.h"
#include "../kit/packed_bc.h"
#include "kernels.h"
#include "plan.h"

namespace selective_scan::cuda::relay {

cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void* memory,
                cudaStream_t stream) {
  void* const packed_bc = plan.scratch.packed_bc.in(memory);
  const cudaError_t error = convert_projections(params, kPaddedStates, packed_bc, stream);
  if (error != cudaSuccess) return error;
  const RelayForwardArgs args{params, plan.geometry, static_cast<const char*>(packed_bc),
                              PackedBC(params, kPaddedStates).sequence_bytes(),
                              plan.shape.is_dependent};
  const auto launch =
      element_size(params.u.dtype) == 2 ? &RelayForward<2>::launch : &RelayForward<4>::launch;
  return launch(args, plan.shape, stream);
}

}  // namespace selective_scan::cuda::relay
