// The convolution of packed sequences whose states are loaded from a pool and stored back there.
#include "../kit/state_slots.h"
#include "../launch.h"

namespace selective_scan::cuda {

cudaError_t launch(const ConvPrefillParams& params, const ScratchMemory& memory,
                   cudaStream_t stream) {
  const auto as_states = &ConvPrefillParams::as_states;
  cudaError_t error = load_slots(params.slots, as_states(params.initial_states), stream);
  if (error == cudaSuccess) {
    error = launch(static_cast<const ConvForwardParams&>(params), memory, stream);
  }
  if (error != cudaSuccess) return error;
  return store_slots(params.slots, as_states(params.final_states), params.packed(), params.out,
                     stream);
}

}  // namespace selective_scan::cuda
