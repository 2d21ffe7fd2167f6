// The op of chunked prefill on one backend.
//
// A Backend (backend.h) has for it besides:
//
//   static constexpr bool kSavesStates
//       Whether checkpoints are found from states that the scan saves on its way.
#pragma once

#include "prefill_arguments.h"
#include "scan_ops.h"

namespace selective_scan::op {

/// Returns out, or no tensor where the caller gave one.
template <class Backend>
Tensor selective_scan_prefill(const PrefillArguments& args) {
  const Tensor& u = args.u;
  PrefillParams params = make_prefill_params(args, Backend::kMaxDstate);
  const Backend backend(u);
  backend.check(params);
  const Tensor result = args.out ? Tensor() : allocate_like(u);
  if (is_empty(params)) return result;
  params.out = prefill_view(args.out ? *args.out : result);
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
