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

/// Registers the op of a backend.
template <class Backend>
void implement_update(auto& library) {
  library.impl("selective_state_update",
               TORCH_BOX(&UpdateArguments::one_by_one<&selective_state_update<Backend>>));
}

}  // namespace selective_scan::op
