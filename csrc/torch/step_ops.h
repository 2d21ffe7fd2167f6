// s6_step on one backend, and the ops by which a call is prepared and made again.
//
// A Backend (backend.h) has for these besides, and in place of its other launch():
//
//   static constexpr int64_t kAlignment
//       Of weights and of the workspace, in bytes.
//   int64_t workspace_bytes(const StepParams& params) const
//       How much scratch memory a call takes. Refuses what the kernels cannot run.
//   void clear(void* workspace, int64_t bytes) const
//       Makes a new workspace what launch() may be given.
//   void launch(const StepParams& params, void* workspace) const
//       Runs the layers; there is at least one value.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>

#include "backend.h"
#include "prepared_step.h"

namespace selective_scan::op {

/// Takes a workspace that the caller keeps from call to call, or one for this call alone.
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

/// Runs a call whose arguments were checked.
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

/// s6_step_prepare: checks a call, and gives its number.
template <class Backend>
int64_t prepare_step(const StepArguments::Op& op) {
  return keep_prepared_step(std::make_shared<const PreparedStep>(op, Backend::kAlignment));
}

/// s6_step_again: the call of this number with this hidden; None where it is another call by now.
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
