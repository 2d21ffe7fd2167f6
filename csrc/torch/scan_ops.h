// The forward and backward ops of one backend: validate, allocate, launch.
//
// A Backend names where the kernels run:
//   static constexpr int64_t kMaxDstate                       0: no limit
//   explicit Backend(const Tensor& u)                         selects the tensors' device
//   int64_t workspace_bytes(const ForwardParams&) const       and for BackwardParams
//   void launch(const ForwardParams&, void* workspace) const  and for BackwardParams
//   void zero(void* data, int64_t bytes) const
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "scan_arguments.h"
#include "tensor_views.h"

namespace selective_scan::op {

/// The saved states are one flat tensor with some zeros at its end: torch.compile makes a graph of
/// its own for every size of 0 and of 1, and short sequences have no or one state to save.
constexpr int64_t kStatesPadding = 2;

inline int64_t num_saved_values(const ScanParams& params) {
  return num_saved_states(params.seqlen) * params.batch * params.dim * params.dstate +
         kStatesPadding;
}

inline Tensor new_states(const Tensor& u, const ScanParams& params) {
  const std::array<int64_t, 1> shape = {num_saved_values(params)};
  return allocate(u, shape, state_dtype(params));
}

template <class Backend, class Params>
void launch_with_workspace(const Backend& backend, const Tensor& u, const Params& params) {
  const Workspace workspace(u, backend.workspace_bytes(params));
  backend.launch(params, workspace.data());
}

inline bool is_empty(const ScanParams& params) {
  return params.batch == 0 || params.dim == 0;
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> selective_scan_fwd(
    const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
    const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
    bool delta_softplus, const std::string& discretization_method,
    const OptionalTensor& initial_state, bool reverse, bool save_states) {
  ForwardParams params(make_scan_params({u, delta, A, B, C, D, z, delta_bias, delta_softplus,
                                         discretization_method, initial_state, reverse},
                                        Backend::kMaxDstate));
  const Backend backend(u);

  const std::array<int64_t, 1> none = {0};
  const std::array<int64_t, 3> state_shape = {params.batch, params.dim, params.dstate};
  Tensor out = allocate_like(u);
  Tensor last_state = allocate(u, state_shape, state_dtype(params));
  Tensor states = save_states ? new_states(u, params) : allocate(u, none, state_dtype(params));
  if (save_states) {
    params.states = states.mutable_data_ptr();
    const int64_t value_size = (params.is_double ? 8 : 4) * (params.is_complex ? 2 : 1);
    const int64_t padding = num_saved_values(params) - kStatesPadding;
    backend.zero(static_cast<char*>(params.states) + padding * value_size,
                 kStatesPadding * value_size);
  }
  if (!is_empty(params)) {
    params.out = sequence_view(out, reverse);
    params.last_state = state_view(last_state);
    launch_with_workspace(backend, u, params);
  }
  return {out, last_state, states};
}

/// Runs the forward scan for its states alone, for a backward pass that was given none.
template <class Backend>
Tensor recompute_states(const Backend& backend, const Tensor& u, const ScanParams& inputs) {
  const std::array<int64_t, 3> state_shape = {inputs.batch, inputs.dim, inputs.dstate};
  Tensor states = new_states(u, inputs);
  Tensor last_state = allocate(u, state_shape, state_dtype(inputs));
  ForwardParams params(inputs);
  params.last_state = state_view(last_state);
  params.states = states.mutable_data_ptr();
  launch_with_workspace(backend, u, params);
  return states;
}

inline void check_gradients(const ScanParams& params, const Tensor& u, const OptionalTensor& dout,
                            const OptionalTensor& dlast_state, const OptionalTensor& states) {
  const auto check = [&](const char* name, const Tensor& tensor, ScalarType dtype, Dims dims) {
    check_dense(name, tensor);
    check_same_device(name, tensor, "u", u);
    check_dtype(name, tensor, {dtype});
    check_shape(name, tensor, dims);
  };
  const Dim batch{"batch", params.batch}, dim{"dim", params.dim}, dstate{"dstate", params.dstate};
  if (dout) check("dout", *dout, dtype_of(u), {batch, dim, {"seqlen", params.seqlen}});
  if (dlast_state) {
    check("dlast_state", *dlast_state, state_dtype(params), {batch, dim, dstate});
  }
  if (states && states->numel() > 0) {
    check("states", *states, state_dtype(params), {{"saved values", num_saved_values(params)}});
  }
}

/// Whether kernels can read saved states as they lie. Those of the forward op always; vmap hands
/// over slices of a stack of them.
inline bool is_readable(const Tensor& states) {
  constexpr uintptr_t kAlignment = 16;  // of the kernels' widest accesses
  const auto address = reinterpret_cast<uintptr_t>(states.const_data_ptr());
  return states.is_contiguous() && address % kAlignment == 0;
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
selective_scan_bwd(const OptionalTensor& dout, const OptionalTensor& dlast_state, const Tensor& u,
                   const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
                   const OptionalTensor& D, const OptionalTensor& z,
                   const OptionalTensor& delta_bias, bool delta_softplus,
                   const std::string& discretization_method, const OptionalTensor& initial_state,
                   bool reverse, const OptionalTensor& states) {
  BackwardParams params(make_scan_params({u, delta, A, B, C, D, z, delta_bias, delta_softplus,
                                          discretization_method, initial_state, reverse},
                                         Backend::kMaxDstate));
  check_gradients(params, u, dout, dlast_state, states);
  const Backend backend(u);

  const auto gradient_of = [&](const OptionalTensor& input) {
    const std::array<int64_t, 1> none = {0};
    return input ? allocate_like(*input) : allocate(u, none, compute_dtype(params));
  };
  std::tuple gradients{allocate_like(u), allocate_like(delta),    allocate_like(A),
                       allocate_like(B), allocate_like(C),        gradient_of(D),
                       gradient_of(z),   gradient_of(delta_bias), gradient_of(initial_state)};
  auto& [du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state] = gradients;
  if (is_empty(params)) {
    std::apply([](auto&... tensors) { (torch::stable::zero_(tensors), ...); }, gradients);
    return gradients;
  }

  const bool has_states = states && states->numel() > 0;
  Tensor own_states;
  if (has_states && is_readable(*states)) {
    params.states = const_cast<void*>(states->const_data_ptr());
  } else if (num_saved_states(params.seqlen) > 0) {
    own_states = has_states ? torch::stable::clone(*states) : recompute_states(backend, u, params);
    params.states = own_states.mutable_data_ptr();
  }
  if (dout) params.dout = sequence_view(*dout, reverse);
  if (dlast_state) params.dlast_state = state_view(*dlast_state);
  params.du = sequence_view(du, reverse);
  params.ddelta = sequence_view(ddelta, reverse);
  params.dA = pole_view(dA);
  params.dB = projection_view(dB, params, reverse);
  params.dC = projection_view(dC, params, reverse);
  if (D) params.dD = channel_view(dD);
  if (z) params.dz = sequence_view(dz, reverse);
  if (delta_bias) params.ddelta_bias = channel_view(ddelta_bias);
  if (initial_state) params.dinitial_state = state_view(dinitial_state);
  launch_with_workspace(backend, u, params);
  return gradients;
}

}  // namespace selective_scan::op
