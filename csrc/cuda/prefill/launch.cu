// Chunked prefill: loads states from a pool, scans the packed sequences, and stores the states
// back.
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
