// The op of chunked prefill on one backend.
//
// A Backend (backend.h) also has for it:
//
//   static constexpr bool kSavesStates
//       Whether checkpoints are derived from the states that the scan saves.
#pragma once

#include "../core/prefill_params.h"
#include "argument_tables.h"
#include "checked_call.h"
#include "scan_ops.h"
#include "state_slots.h"

namespace selective_scan::op {

using PrefillArguments = tables::SelectiveScanPrefillArguments;

inline void check_prefill_options(const PrefillArguments& args) {
  const int64_t every = args.checkpoint_every;
  if (every > 0 && !args.checkpoint_slots) {
    fail("checkpoint_slots must be a Tensor where checkpoint_every is above 0, got None");
  }
  if (every == 0 && args.checkpoint_slots) {
    fail("checkpoint_every must be at least 1 where checkpoint_slots is given, got 0");
  }
}

/// Refuses invalid and unsupported calls, without checking the values of indices, positions and
/// boundaries. Returns parameters with everything filled in but `out` and the states that the
/// kernels use. `max_dstate` is the backend's limit, 0 for none.
inline PrefillParams make_prefill_params(const PrefillArguments& args, int64_t max_dstate) {
  PrefillParams params;
  params.method = parse_method(args.discretization_method);
  if (args.checkpoint_every < 0) {
    fail("checkpoint_every must be at least 0, got ", args.checkpoint_every);
  }
  params.delta_softplus = args.delta_softplus;

  CheckedCall call(tables::kSelectiveScanPrefill, {max_dstate}, args.tensors());
  call.check_shapes();
  check_prefill_options(args);
  set_sizes(params, call);
  params.batch = 1;
  params.seqlen = call[tables::kTotal];
  params.packed = packed_sequences(args.cu_seqlens, params.seqlen);
  if (args.checkpoint_slots) params.columns = call[tables::kCheckpoints];

  set_inputs(params, args, /*reverse=*/false);
  params.slots = state_slots(args.states, params.packed.count, args.cache_indices,
                             args.has_initial_state, args.pad_slot_id);
  params.slots.is_complex = params.is_complex;
  params.slots.is_double = params.is_double;
  params.checkpoint_every = args.checkpoint_every;
  if (args.first_position) params.first_positions = index_view(*args.first_position);
  if (args.checkpoint_slots) params.checkpoint_slots = index_view(*args.checkpoint_slots);
  return params;
}

/// Refuses slots and columns that do not exist, and negative positions. Reads these arrays, so they
/// must be in host memory.
inline void check_checkpoints(const PrefillParams& params) {
  for (int64_t i = 0; i < params.packed.count && params.checkpoint_every > 0; ++i) {
    if (params.first_positions.present() && params.first_positions.at(i) < 0) {
      fail("first_position must be at least 0, got ", params.first_positions.at(i));
    }
    if (params.slots.of(i) == StateSlots::kNoSlot) continue;
    const int64_t length = params.packed.end(i) - params.packed.begin(i);
    for (int64_t k = 0; params.steps_before(i, k) <= length; ++k) {
      const int64_t column = params.column_of(i, k);
      if (column >= params.columns) {
        fail("checkpoint_slots must have checkpoints of at least ", column + 1,
             " for the positions of sequence ", i, ", got ", params.columns);
      }
      check_slot("checkpoint_slots", params.checkpoint_slots.at(i, column), params.slots);
    }
  }
}

/// Returns out, or an undefined tensor if the caller passed one to write to.
template <class Backend>
Tensor selective_scan_prefill(const PrefillArguments& args) {
  const Tensor& u = args.u;
  PrefillParams params = make_prefill_params(args, Backend::kMaxDstate);
  const Backend backend(u);
  backend.check(params);
  const Tensor result = args.out ? Tensor() : allocate_like(u);
  if (is_empty(params)) return result;
  params.out = sequence_view(args.out ? *args.out : result, /*reverse=*/false);
  const std::array<int64_t, 3> shape = {params.sequences(), params.dim, params.dstate};
  const Tensor before = allocate(u, shape, state_dtype(params));
  const Tensor behind = allocate(u, shape, state_dtype(params));
  params.initial_state = state_view(before);
  params.last_state = state_view(behind);
  OptionalTensor saved;
  if (Backend::kSavesStates && args.checkpoint_every > 0) {
    saved = new_states(u, params);
    params.states = saved->mutable_data_ptr();
  }
  launch_with_workspace(backend, u, params);
  return result;
}

/// Registers the op of a backend.
template <class Backend>
void implement_prefill(auto& library) {
  library.impl("selective_scan_prefill",
               TORCH_BOX(&PrefillArguments::one_by_one<&selective_scan_prefill<Backend>>));
}

}  // namespace selective_scan::op
