// The forward and backward ops of one backend: validate, allocate, launch.
//
// A Backend (backend.h) also has for these:
//
//   static constexpr bool kIsMatrixA
//   using Forward, using Backward
//       Whether A is (dim, dstate, dstate), and the parameters of the passes; see DiagonalA.
//   void launch(const auto& params, const auto& memory, const StateExchange& exchange) const
//       Optional: runs a pass that asks for the entering state midway, if that is faster than two
//       passes with the question between them.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "../core/matrix_params.h"
#include "../core/state_exchange.h"
#include "backend.h"
#include "optional_results.h"
#include "ranks.h"
#include "scan_arguments.h"
#include "tensor_views.h"

namespace selective_scan::op {

struct DiagonalA {
  static constexpr bool kIsMatrixA = false;
  using Forward = ForwardParams;
  using Backward = BackwardParams;
};
struct MatrixA {
  static constexpr bool kIsMatrixA = true;
  using Forward = MatrixForwardParams;
  using Backward = MatrixBackwardParams;
};

/// Saved states are one flat tensor that ends in some values which nobody reads. They keep its size
/// from being 0 or 1, for each of which torch.compile makes a separate graph: short sequences save
/// no state, or one.
constexpr int64_t kStatesPadding = 2;

inline int64_t num_saved_values(int64_t num_states, const auto& params) {
  return num_states * params.batch * params.dim * params.dstate + kStatesPadding;
}
inline int64_t num_saved_values(const ScanParams& params) {
  return num_saved_values(num_saved_states(params.seqlen), params);
}

inline Tensor new_states(const Tensor& u, const ScanParams& params) {
  return allocate(u, {num_saved_values(params)}, state_dtype(params));
}

/// Allocates memory for the map that all steps apply to a state, or backward for the gradient of
/// the state before them.
inline Tensor new_own(const Tensor& u, const ForwardParams& params) {
  return allocate(u, {params.batch, 2, params.dim, params.dstate}, state_dtype(params));
}
inline Tensor new_own(const Tensor& u, const BackwardParams& params) {
  return allocate(u, {params.batch, params.dim, params.dstate}, state_dtype(params));
}

/// Writes the map or the gradient of zero steps.
inline void set_to_no_steps(const ForwardParams&, const Tensor& own) {
  Tensor factor = torch::stable::select(own, 1, 0), all = own;
  torch::stable::zero_(all);
  torch::stable::fill_(factor, 1);
}
inline void set_to_no_steps(const BackwardParams&, const Tensor& own) {
  Tensor all = own;
  torch::stable::zero_(all);
}

inline StateExchange exchange_of(const ForwardParams&, const Tensor& own) {
  return {state_view(torch::stable::select(own, 1, 0)),
          state_view(torch::stable::select(own, 1, 1)),
          {}};
}
inline StateExchange exchange_of(const BackwardParams&, const Tensor& own) {
  return {{}, state_view(own), {}};
}

/// The results of a forward pass: out, the last state, and the saved states.
using ScanResults = std::tuple<Tensor, Tensor, OptionalTensor>;
/// The results of a backward pass: all gradients, in this order, or those for which the caller has
/// no memory. The gradients of D, z, delta_bias, initial_state and input_delta are undefined
/// tensors (None in Python) if the input is absent.
using AllGradients =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using OtherGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

/// Runs a pass. If `enter` is given, the pass begins with the state that `enter` returns for the
/// map of all steps or, unless `is_told`, for the map of zero steps.
template <class Backend, class Params>
void launch_between(const Backend& backend, const Tensor& u, Params params, const Enter* enter,
                    bool is_told) {
  [[maybe_unused]] Tensor entering;
  std::vector<Workspace> workspaces;
  const auto memory = [&](int64_t bytes) { return workspaces.emplace_back(u, bytes).data(); };
  if constexpr (!Backend::kIsMatrixA) {
    if (enter != nullptr) {
      const Tensor own = new_own(u, params);
      StateExchange exchange = exchange_of(params, own);
      exchange.enter = [&] {
        entering = (*enter)(own);
        return state_view(entering);
      };
      if (!is_told || is_empty(params) || params.seqlen == 0) {
        set_to_no_steps(params, own);
      } else if constexpr (requires { backend.launch(params, memory, exchange); }) {
        return backend.launch(params, memory, exchange);
      } else {
        backend.launch(alone(params, exchange), memory);
      }
      set_entering(params, exchange.enter());
    }
  }
  if (!is_empty(params)) backend.launch(params, memory);
}

/// Returns the stride between the columns of a matrix A, in components.
inline int64_t column_stride(const Tensor& A) {
  return A.stride(2) * components(A);
}

/// The checked arguments of a call, and the backend on which it runs.
template <class Backend>
struct Problem {
  ScanArguments args;
  ScanParams params;
  Backend backend;

  explicit Problem(const ScanArguments& args)
      : args(args),
        params(make_scan_params(args, Backend::kIsMatrixA, Backend::kMaxDstate)),
        backend(args.u) {
    backend.check(params.packed);
  }

  /// Returns the parameters of a pass without its results.
  template <class Params>
  Params inputs() const {
    Params inputs(params);
    if constexpr (Backend::kIsMatrixA) inputs.A_column = column_stride(args.A);
    return inputs;
  }
};

/// Runs the forward scan only for its states, for a backward pass that was given none.
template <class Backend>
Tensor recompute_states(const Problem<Backend>& problem) {
  const Tensor& u = problem.args.u;
  Tensor states = new_states(u, problem.params);
  auto params = problem.template inputs<typename Backend::Forward>();
  params.wanted = ForwardWanted::kStatesAlone;
  params.states = states.mutable_data_ptr();
  params.z = {};
  launch_with_workspace(problem.backend, u, params);
  return states;
}

inline void check_gradients(const ScanParams& params, const Tensor& u, const OptionalTensor& dout,
                            const OptionalTensor& dlast_state, const OptionalTensor& states) {
  const auto check = [&](const char* name, const OptionalTensor& tensor, ScalarType dtype,
                         Dims dims) {
    if (tensor) check_beside(name, *tensor, "u", u, {dtype}, dims);
  };
  const Dim dim{"dim", params.dim};
  check("dout", dout, dtype_of(u), {{"batch", params.batch}, dim, {"seqlen", params.seqlen}});
  check("dlast_state", dlast_state, state_dtype(params),
        {{"sequences", params.sequences()}, dim, {"dstate", params.dstate}});
  if (states && states->numel() > 0) {
    check("states", states, state_dtype(params), {{"saved values", num_saved_values(params)}});
  }
}

/// Returns whether kernels can read saved states in place. They always can if the forward op made
/// them, but vmap passes slices of a stack of such tensors.
inline bool is_readable(const Tensor& states) {
  constexpr uintptr_t kAlignment = 16;  // of the kernels' widest accesses
  const auto address = reinterpret_cast<uintptr_t>(states.const_data_ptr());
  return states.is_contiguous() && address % kAlignment == 0;
}

/// Writes all of `gradients`. If `enter` is given, it provides the gradient of the last state.
template <class Backend>
void scan_backward(const Problem<Backend>& problem, const OptionalTensor& dout,
                   const OptionalTensor& dlast_state, const OptionalTensor& states,
                   const AllGradients& gradients, const Enter* enter, bool is_told) {
  const auto& [du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state, dinput_delta] =
      gradients;
  const Backend& backend = problem.backend;
  const ScanArguments& args = problem.args;
  auto params = problem.template inputs<typename Backend::Backward>();
  if (is_empty(params)) {
    fill_with_zeros(gradients);
    if constexpr (!Backend::kIsMatrixA) {
      if (enter != nullptr) (*enter)(new_own(args.u, params));
    }
    return;
  }

  const bool has_states = states && states->numel() > 0;
  Tensor own_states;
  if (has_states && is_readable(*states)) {
    params.states = const_cast<void*>(states->const_data_ptr());
  } else if (num_saved_states(params.seqlen) > 0) {
    own_states = has_states ? allocating(*states, [&] { return torch::stable::clone(*states); })
                            : recompute_states(problem);
    params.states = own_states.mutable_data_ptr();
  }
  const bool reverse = args.reverse;
  if (dout) params.dout = sequence_view(*dout, reverse);
  if (dlast_state) params.dlast_state = state_view(*dlast_state);
  params.du = sequence_view(du, reverse);
  params.ddelta = sequence_view(ddelta, reverse);
  params.dA = pole_view(dA);
  if constexpr (Backend::kIsMatrixA) params.dA_column = column_stride(dA);
  params.dB = projection_view(dB, params, reverse);
  params.dC = projection_view(dC, params, reverse);
  if (args.D) params.dD = channel_view(dD);
  if (args.z) params.dz = sequence_view(dz, reverse);
  if (args.delta_bias) params.ddelta_bias = channel_view(ddelta_bias);
  if (args.initial_state) params.dinitial_state = state_view(dinitial_state);
  if (args.input_delta) params.dinput_delta = sequence_view(dinput_delta, reverse);
  launch_between(backend, args.u, params, enter, is_told && dout.has_value());
}

/// Runs the forward scan. If `enter` is given, it provides the initial state.
template <class Backend>
ScanResults scan_forward(const ScanArguments& args, bool save_states, const Enter* enter,
                         bool is_told) {
  const Problem<Backend> problem(args);
  auto params = problem.template inputs<typename Backend::Forward>();
  const Tensor out = allocate_like(args.u);
  const Tensor last_state =
      allocate(args.u, {params.sequences(), params.dim, params.dstate}, state_dtype(params));
  params.out = sequence_view(out, args.reverse);
  params.last_state = state_view(last_state);
  OptionalTensor states;
  if (save_states) {
    states = new_states(args.u, params);
    params.states = states->mutable_data_ptr();
  }
  launch_between(problem.backend, args.u, params, enter, is_told);
  return {out, last_state, states};
}

/// Checks that a tensor for the gradient of an optional input is given exactly if the input is.
inline void check_given_gradient(const char* name, const OptionalTensor& gradient,
                                 const char* input_name, const OptionalTensor& input) {
  if (gradient.has_value() != input.has_value()) {
    fail(name, input ? " must be a Tensor where " : " must be None where ", input_name, " is");
  }
  if (input) check_given_gradient(name, *gradient, input_name, *input);
}

/// Computes all gradients, in their order.
template <class Backend>
AllGradients all_gradients(const ScanArguments& args, const OptionalTensor& dout,
                           const OptionalTensor& dlast_state, const OptionalTensor& states,
                           const Enter* enter, bool is_told) {
  const Problem<Backend> problem(args);
  check_gradients(problem.params, args.u, dout, dlast_state, states);
  const auto like = [](const auto&... inputs) { return AllGradients{allocate_like(inputs)...}; };
  const AllGradients made = like(args.u, args.delta, args.A, args.B, args.C, args.D, args.z,
                                 args.delta_bias, args.initial_state, args.input_delta);
  scan_backward(problem, dout, dlast_state, states, made, enter, is_told);
  return made;
}

/// Writes the gradients that may be large into tensors from the caller, such as slices of wider
/// rows, and returns the others.
template <class Backend>
OtherGradients other_gradients(const ScanArguments& args, const OptionalTensor& dout,
                               const OptionalTensor& dlast_state, const OptionalTensor& states,
                               const Tensor& du, const Tensor& ddelta, const Tensor& dB,
                               const Tensor& dC, const OptionalTensor& dz, const Enter* enter,
                               bool is_told) {
  const Problem<Backend> problem(args);
  check_gradients(problem.params, args.u, dout, dlast_state, states);
  check_given_gradient("du", du, "u", args.u);
  check_given_gradient("ddelta", ddelta, "delta", args.delta);
  check_given_gradient("dB", dB, "B", args.B);
  check_given_gradient("dC", dC, "C", args.C);
  check_given_gradient("dz", dz, "z", args.z);
  const Tensor dA = allocate_like(args.A), dD = allocate_like(args.D);
  const Tensor ddelta_bias = allocate_like(args.delta_bias);
  const Tensor dinitial_state = allocate_like(args.initial_state);
  const Tensor dinput_delta = allocate_like(args.input_delta);
  scan_backward(
      problem, dout, dlast_state, states,
      {du, ddelta, dA, dB, dC, dD, or_undefined(dz), ddelta_bias, dinitial_state, dinput_delta},
      enter, is_told);
  return {dA, dD, ddelta_bias, dinitial_state, dinput_delta};
}

/// The ops. Types are those of the arguments `scanned`, which all ops share and which ScanArguments
/// names.
template <class... Types>
struct ScanOpsOf {
  template <class Backend>
  static ScanResults forward(Types... scanned, const OptionalTensor& cu_seqlens,
                             const OptionalTensor& input_delta, bool save_states) {
    return scan_forward<Backend>({scanned..., cu_seqlens, input_delta}, save_states, nullptr,
                                 false);
  }

  template <class Backend>
  static AllGradients backward(const OptionalTensor& dout, const OptionalTensor& dlast_state,
                               Types... scanned, const OptionalTensor& cu_seqlens,
                               const OptionalTensor& input_delta, const OptionalTensor& states) {
    return all_gradients<Backend>({scanned..., cu_seqlens, input_delta}, dout, dlast_state, states,
                                  nullptr, false);
  }

  template <class Backend>
  static OtherGradients backward_out(const OptionalTensor& dout, const OptionalTensor& dlast_state,
                                     Types... scanned, const OptionalTensor& cu_seqlens,
                                     const OptionalTensor& input_delta,
                                     const OptionalTensor& states, const Tensor& du,
                                     const Tensor& ddelta, const Tensor& dB, const Tensor& dC,
                                     const OptionalTensor& dz) {
    return other_gradients<Backend>({scanned..., cu_seqlens, input_delta}, dout, dlast_state,
                                    states, du, ddelta, dB, dC, dz, nullptr, false);
  }

  /// These two ask Python for the state that enters, and for the gradient of the one that leaves;
  /// see enter_by_python().
  template <class Backend>
  static ScanResults forward_asking(Types... scanned, const OptionalTensor& input_delta,
                                    bool is_told, int64_t entrance, bool save_states) {
    const Enter enter = enter_by_python(entrance);
    return scan_forward<Backend>({scanned..., std::nullopt, input_delta}, save_states, &enter,
                                 is_told);
  }
  template <class Backend>
  static AllGradients backward_asking(const OptionalTensor& dout, Types... scanned,
                                      const OptionalTensor& input_delta,
                                      const OptionalTensor& states, bool is_told,
                                      int64_t entrance) {
    const Enter enter = enter_by_python(entrance);
    return all_gradients<Backend>({scanned..., std::nullopt, input_delta}, dout, std::nullopt,
                                  states, &enter, is_told);
  }
};
using SelectiveScan =
    ScanOpsOf<const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, bool,
              const Text&, const OptionalTensor&, bool>;

/// Registers the schemas that no Operator provides, once for all backends. `entrance` is the number
/// of a Python function; see ranks.h.
void define_scans_between(auto& library) {
  const std::string scanned =
      "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
      "Tensor? delta_bias, bool delta_softplus, str discretization_method, "
      "Tensor? initial_state, bool reverse";
  library.def(joined("selective_scan_between_fwd(", scanned,
                     ", Tensor? input_delta, bool is_told, int entrance, bool save_states) -> "
                     "(Tensor out, Tensor last_state, Tensor? states)")
                  .c_str());
  library.def(joined("selective_scan_between_bwd(Tensor? dout, ", scanned,
                     ", Tensor? input_delta, Tensor? states, bool is_told, int entrance) -> "
                     "(Tensor du, Tensor ddelta, Tensor dA, Tensor dB, Tensor dC, Tensor dD, "
                     "Tensor dz, Tensor ddelta_bias, Tensor dinitial_state, Tensor dinput_delta)")
                  .c_str());
}

/// Registers the ops of two backends; the second one takes matrices A.
template <class Backend, class MatrixBackend>
void implement_scans(auto& library) {
  implement_forward<&SelectiveScan::forward<Backend>>(library, "selective_scan_fwd");
  library.impl("selective_scan_bwd", TORCH_BOX(&SelectiveScan::backward<Backend>));
  library.impl("selective_scan_bwd_out", TORCH_BOX(&SelectiveScan::backward_out<Backend>));
  library.impl("selective_scan_between_fwd", TORCH_BOX(&SelectiveScan::forward_asking<Backend>));
  library.impl("selective_scan_between_bwd", TORCH_BOX(&SelectiveScan::backward_asking<Backend>));
  implement_forward<&SelectiveScan::forward<MatrixBackend>>(library, "matrix_scan_fwd");
  library.impl("matrix_scan_bwd", TORCH_BOX(&SelectiveScan::backward<MatrixBackend>));
}

/// The scans of a backend, for composite ops.
struct ScanOps {
  decltype(&scan_forward<DiagonalA>) forward;
  decltype(&other_gradients<DiagonalA>) backward;
};

}  // namespace selective_scan::op
