// The op of the state update on one backend.
//
// A Backend names where the kernels run. It has:
//
//   static constexpr int64_t kMaxDstate
//       The largest dstate; 0 says that there is no limit.
//   explicit Backend(const Tensor& x)
//       Selects the device of x.
//   void check_indices(const UpdateParams& params) const
//       Refuses indices of slots that there are not, if the host can read them.
//   void launch(const UpdateParams& params, const Tensor& x) const
//       Runs the update; scratch memory is allocated like x.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

#include "scan_arguments.h"
#include "update_arguments.h"

namespace selective_scan::op {

/// Returns out, or no tensor where the caller gave one.
template <class Backend>
Tensor selective_state_update(const Tensor& state, const Tensor& x, const Tensor& dt,
                              const Tensor& A, const Tensor& B, const Tensor& C,
                              const OptionalTensor& D, const OptionalTensor& z,
                              const OptionalTensor& dt_bias, bool dt_softplus,
                              const OptionalTensor& state_batch_indices,
                              const OptionalTensor& dst_state_batch_indices, int64_t pad_slot_id,
                              const OptionalTensor& out, const std::string& discretization_method,
                              bool A_is_log, const OptionalTensor& input_delta) {
  const UpdateArguments args{state,
                             x,
                             dt,
                             A,
                             B,
                             C,
                             D,
                             z,
                             dt_bias,
                             dt_softplus,
                             state_batch_indices,
                             dst_state_batch_indices,
                             pad_slot_id,
                             out,
                             parse_method(discretization_method),
                             A_is_log,
                             input_delta};
  UpdateParams params = make_update_params(args, Backend::kMaxDstate);
  const Backend backend(x);
  backend.check_indices(params);
  const Tensor result = out ? Tensor() : allocate_like(x);
  if (x.numel() == 0) return result;
  params.out = update_view(out ? *out : result, args, params);
  backend.launch(params, x);
  return result;
}

}  // namespace selective_scan::op
