// Chunked prefill: loads states from a pool, scans the packed sequences, and stores the states
// back, including the intermediate ones that are wanted as checkpoints.
//
// A checkpoint is computed from the last state that the scan saved before it: a thread advances one
// state of one channel from there, by less than a chunk of steps. Checkpoints at chunk boundaries
// and at the end of a sequence are copies. Bound by latency, which the many threads of all
// checkpoints hide.
#include "../../core/method_table.h"
#include "../kit/launch_tools.h"
#include "../kit/slot_rows.cuh"
#include "../kit/state_slots.h"
#include "../kit/states.cuh"
#include "../launch.h"

namespace selective_scan::cuda {
namespace {

struct CheckpointArgs {
  PrefillParams params;
  SlotRows rows;  // one per candidate
};

/// Loads the last known state that is not after a checkpoint, and returns the number of steps
/// before it.
template <class T>
__device__ int64_t load_known_state(const PrefillParams& params, const Checkpoint& checkpoint,
                                    int64_t channel, int64_t state, T& value) {
  const PackedSequences& packed = params.packed;
  const int64_t begin = packed.begin(checkpoint.sequence);
  const auto value_in = [&](const ArrayView& view) {
    return load_component<T>(view, state_offset(view, checkpoint.sequence, channel, state));
  };
  const int64_t chunks = checkpoint.steps / kChunk;
  if (begin + checkpoint.steps == packed.end(checkpoint.sequence)) {
    value = value_in(params.last_state);
    return checkpoint.steps;
  }
  if (chunks == 0) {
    value = value_in(params.initial_state);
    return 0;
  }
  const int64_t row = first_saved_state(begin) + chunks - 1;
  const int64_t at = (row * params.dim + channel) * params.dstate + state;
  value = static_cast<const T*>(params.states)[at];
  return chunks * kChunk;
}

template <class T>
__global__ void __launch_bounds__(kSlotThreads)
    checkpoints_kernel(const __grid_constant__ CheckpointArgs args) {
  using R = real_t<T>;
  const PrefillParams& params = args.params;
  for_each_state(args.rows, [&](int64_t candidate, int64_t channel, int64_t state) {
    const Checkpoint checkpoint = params.candidate(candidate);
    if (checkpoint.slot == StateSlots::kNoSlot) return;
    T h;
    const int64_t known_steps = load_known_state(params, checkpoint, channel, state, h);
    const int64_t group = channel / (params.dim / params.groups);
    const int64_t begin = params.packed.begin(checkpoint.sequence);
    const auto A = load_component<T>(params.A, channel * params.A.channel + state * params.A.state);
    const Pole<T> pole = make_pole<DeviceMath>(A, params.method);
    const R bias = load_component<R>(params.delta_bias, channel * params.delta_bias.channel);
    visit_kernel_method(params.method, [&]<Method kMethod>() {
      for (int64_t t = begin + known_steps; t < begin + checkpoint.steps; ++t) {
        const auto at_step = [&](const ArrayView& view) {
          return load_component<R>(view, channel * view.channel + t * view.step);
        };
        const R delta = step_size(at_step(params.delta) + bias, params.delta_softplus);
        const auto B =
            load_component<T>(params.B, channel * params.B.channel + group * params.B.group +
                                            state * params.B.state + t * params.B.step);
        const R u = at_step(params.u);
        h = params.input_delta.present()
                ? after_driven_step<kMethod>(h, delta, at_step(params.input_delta) * u, pole, B)
                : after_step<kMethod>(h, delta, u, pole, B);
      }
    });
    const ArrayView& pool = params.slots.pool;
    store_component(pool, state_offset(pool, checkpoint.slot, channel, state), h);
  });
}

/// Writes the checkpoints to their slots. The scan must have saved its states.
cudaError_t store_checkpoints(const PrefillParams& params, cudaStream_t stream) {
  const CheckpointArgs args{params, SlotRows(params.slots, params.checkpoint_candidates())};
  if (args.rows.rows == 0 || params.packed.count == 0) return cudaSuccess;
  return with_state_type(params, [&]<class T>(T*) {
    return launch_kernel(checkpoints_kernel<T>, args.rows.shape(), stream, args);
  });
}

}  // namespace

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
