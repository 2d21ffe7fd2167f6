// This goes from the arguments of the prefill op to kernel parameters.
#pragma once

#include "../core/prefill_params.h"
#include "packed_sequences.h"
#include "tensor_views.h"

namespace selective_scan::op {

/// The arguments are in the order of the schema.
struct PrefillArguments {
  const Tensor& u;
  const Tensor& states;
  const Tensor& delta;
  const Tensor& A;
  const Tensor& B;
  const Tensor& C;
  const OptionalTensor& D;
  const OptionalTensor& z;
  const OptionalTensor& delta_bias;
  bool delta_softplus;
  const Tensor& cu_seqlens;
  const OptionalTensor& cache_indices;
  const OptionalTensor& has_initial_state;
  int64_t pad_slot_id;
  int64_t checkpoint_every;
  const OptionalTensor& first_position;
  const OptionalTensor& checkpoint_slots;
  const OptionalTensor& out;
  Method method;
  const OptionalTensor& input_delta;
};

/// Refuses whatever no kernel may see, but for values of indices, positions and boundaries; returns
/// parameters with everything filled in but `out` and the states that kernels use. `max_dstate` is
/// the backend's limit, 0 for none.
PrefillParams make_prefill_params(const PrefillArguments& args, int64_t max_dstate);

/// (channel, step)
ArrayView prefill_view(const Tensor& tensor);

/// Refuses slots and columns that there are not, and positions below 0; reads these, so that they
/// must be the host's.
void check_checkpoints(const PrefillParams& params);

}  // namespace selective_scan::op
