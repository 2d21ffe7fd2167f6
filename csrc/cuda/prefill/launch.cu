// Chunked prefill: the scan of packed sequences between what brings their states from a pool and
// back there.
#include "../launch.h"

#include "../kit/state_slots.h"
#include "checkpoints.h"

namespace selective_scan::cuda {

cudaError_t launch(const PrefillParams& params, const ScratchMemory& memory, cudaStream_t stream) {
  cudaError_t error = load_slots(params.slots, params.initial_state, stream);
  if (error == cudaSuccess) {
    error = launch(static_cast<const ForwardParams&>(params), memory, stream);
  }
  if (error == cudaSuccess) error = store_checkpoints(params, stream);
  if (error != cudaSuccess) return error;
  return store_slots(params.slots, params.last_state, params.packed, params.out, stream);
}

}  // namespace selective_scan::cuda
