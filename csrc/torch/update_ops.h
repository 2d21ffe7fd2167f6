// The op of the state update on one backend.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "backend.h"
#include "update_arguments.h"

namespace selective_scan::op {

/// Returns out, or no tensor where the caller gave one.
template <class Backend>
Tensor selective_state_update(const UpdateArguments& args) {
  UpdateParams params = make_update_params(args, Backend::kMaxDstate);
  const Backend backend(args.x);
  backend.check(params);
  const Tensor result = args.out ? Tensor() : allocate_like(args.x);
  if (args.x.numel() == 0) return result;
  params.out = update_view(args.out ? *args.out : result, args, params);
  launch_with_workspace(backend, args.x, params);
  return result;
}

/// Registers the schema, once for all backends.
void define_update(auto& library) {
  library.def(
      "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, "
      "Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, "
      "Tensor? state_batch_indices=None, Tensor? dst_state_batch_indices=None, "
      "int pad_slot_id=-1, Tensor(b!)? out=None, str discretization_method=\"zoh\", "
      "bool A_is_log=False, Tensor? input_delta=None) -> Tensor");
}

/// Registers the op of a backend.
template <class Backend>
void implement_update(auto& library) {
  library.impl("selective_state_update",
               TORCH_BOX(&UpdateArguments::one_by_one<&selective_state_update<Backend>>));
}

}  // namespace selective_scan::op
