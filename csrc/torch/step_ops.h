// s6_step on one backend, and the ops by which a call is prepared and made again.
//
// A Backend names where the kernels run. It has:
//
//   static constexpr int64_t kAlignment
//       Of weights and of the workspace, in bytes.
//   explicit Backend(const Tensor& hidden)
//       Selects the device of hidden.
//   void check_indices(const StepParams& params) const
//       Refuses indices of slots that there are not, if the host can read them.
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
#include <string>

#include "prepared_step.h"
#include "scan_arguments.h"

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
  backend.check_indices(params);
  const std::array<int64_t, 3> sizes = {params.batch, params.steps,
                                        head ? params.vocabulary : params.dim};
  const Tensor out = allocate(hidden, sizes, dtype_of(head ? *head : hidden));
  if (out.numel() == 0) return out;
  params.out = view_of(out, &ArrayView::batch, &ArrayView::step, &ArrayView::channel);
  launch_step(backend, params, hidden, workspace);
  return out;
}

/// s6_step
template <class Backend>
Tensor step_once(const StepArguments& args) {
  const StepCall call = make_step_call(args, Backend::kAlignment);
  return run_step<Backend>(call.params, args.hidden(), args.single(StepArguments::kHead),
                           args.single(StepArguments::kWorkspace));
}

/// s6_step_prepare: checks a call, and gives its number.
template <class Backend>
int64_t prepare_step(const StepArguments& args) {
  return keep_prepared_step(std::make_shared<const PreparedStep>(args, Backend::kAlignment));
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

/// An op that has the arguments of s6_step.
template <auto kOp>
auto with_step_arguments(const Tensor& hidden, const OptionalTensors& norm,
                         const TensorList& in_proj, const OptionalTensors& in_proj_bias,
                         const TensorList& conv1d, const OptionalTensors& conv1d_bias,
                         const TensorList& x_proj, const TensorList& dt_proj,
                         const OptionalTensors& dt_proj_bias, const TensorList& A_log,
                         const TensorList& D, const TensorList& out_proj,
                         const OptionalTensors& out_proj_bias, const TensorList& conv_state,
                         const TensorList& state, const OptionalTensor& norm_f,
                         const OptionalTensor& head, const OptionalTensor& state_batch_indices,
                         const OptionalTensor& workspace, double eps, bool delta_softplus,
                         const std::string& discretization_method) {
  using Entries = std::span<const Tensor>;
  const auto one = [](const OptionalTensor& tensor) {
    return tensor ? Entries(&*tensor, 1) : Entries();
  };
  const auto all = [](const OptionalTensors& tensors) {
    return tensors ? Entries(*tensors) : Entries();
  };
  return kOp(StepArguments{
      {Entries(&hidden, 1), all(norm), in_proj, all(in_proj_bias), conv1d, all(conv1d_bias), x_proj,
       dt_proj, all(dt_proj_bias), A_log, D, out_proj, all(out_proj_bias), conv_state, state,
       one(norm_f), one(head), one(state_batch_indices), one(workspace)},
      eps,
      delta_softplus,
      parse_method(discretization_method)});
}

template <class Backend>
void implement_step(auto& library) {
  library.impl("s6_step", TORCH_BOX(&with_step_arguments<&step_once<Backend>>));
  library.impl("s6_step_prepare", TORCH_BOX(&with_step_arguments<&prepare_step<Backend>>));
  library.impl("s6_step_again", TORCH_BOX(&step_again<Backend>));
}

}  // namespace selective_scan::op
