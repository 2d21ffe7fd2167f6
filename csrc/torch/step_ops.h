// s6_step on one backend, and the ops that prepare a call and repeat it.
//
// A Backend (backend.h) also has for these, with this launch() in place of its other one:
//
//   static constexpr int64_t kAlignment
//       The alignment of weights and of the workspace, in bytes.
//   int64_t workspace_bytes(const StepParams& params) const
//       Returns the scratch memory of a call. Refuses calls that the kernels cannot run.
//   void clear(void* workspace, int64_t bytes) const
//       Prepares a new workspace for launch().
//   void launch(const StepParams& params, void* workspace) const
//       Runs the layers; there is at least one output value.
#pragma once

#include <torch/csrc/stable/library.h>

#include <memory>

#include "backend.h"
#include "prepared_step.h"

namespace selective_scan::op {

/// Launches a call with a workspace that the caller keeps between calls, or with one for this call
/// alone.
template <class Backend>
void launch_step(const Backend& backend, const StepParams& params, const Tensor& hidden,
                 const OptionalTensor& workspace) {
  const int64_t bytes = backend.workspace_bytes(params);
  if (!workspace) {
    const Workspace own(hidden, bytes);
    backend.clear(own.data(), bytes);
    return backend.launch(params, own.data());
  }
  if (workspace->size(0) < bytes) {
    fail("workspace must have at least ", bytes, " bytes, got ", workspace->size(0));
  }
  if (!is_aligned(*workspace, Backend::kAlignment)) {
    fail("workspace must begin at a multiple of ", Backend::kAlignment, " bytes");
  }
  backend.launch(params, workspace->mutable_data_ptr());
}

/// Runs a call with checked arguments.
template <class Backend>
Tensor run_step(StepParams params, const Tensor& hidden, const OptionalTensor& head,
                const OptionalTensor& workspace) {
  const Backend backend(hidden);
  backend.check(params);
  const int64_t width = head ? params.vocabulary : params.dim;
  const Tensor out =
      allocate(hidden, {params.batch, params.steps, width}, dtype_of(head ? *head : hidden));
  if (out.numel() == 0) return out;
  params.out = view_of(out, &ArrayView::batch, &ArrayView::step, &ArrayView::channel);
  launch_step(backend, params, hidden, workspace);
  return out;
}

/// s6_step
template <class Backend>
Tensor step_once(const StepArguments::Op& op) {
  const StepArguments args(op);
  const StepCall call = make_step_call(args, Backend::kAlignment);
  return run_step<Backend>(call.params, args.hidden(), args.single(StepArguments::Op::kHead),
                           args.single(StepArguments::Op::kWorkspace));
}

/// s6_step_prepare: checks a call and returns its number.
template <class Backend>
int64_t prepare_step(const StepArguments::Op& op) {
  return keep_prepared_step(std::make_shared<const PreparedStep>(op, Backend::kAlignment));
}

/// s6_step_again: runs the call with this number for this hidden, or returns None if the call has
/// changed.
template <class Backend>
OptionalTensor step_again(const Tensor& hidden, int64_t number) {
  const auto prepared = prepared_step(number);
  if (!prepared->is_as_it_was(hidden)) return std::nullopt;
  StepCall made;
  const StepParams params = prepared->params_for(hidden, made);
  return run_step<Backend>(params, hidden, prepared->head(), prepared->workspace());
}

template <class Backend>
void implement_step(auto& library) {
  using Op = StepArguments::Op;
  library.impl("s6_step", TORCH_BOX(&Op::one_by_one<&step_once<Backend>>));
  library.impl("s6_step_prepare", TORCH_BOX(&Op::one_by_one<&prepare_step<Backend>>));
  library.impl("s6_step_again", TORCH_BOX(&step_again<Backend>));
}

}  // namespace selective_scan::op
