#include "scan_arguments.h"

#include "../core/method_table.h"
#include "checked_call.h"

namespace selective_scan::op {
namespace {

bool is_variable(const Tensor& projection) {
  return projection.dim() != 2;
}

template <class Predicate>
std::string method_names(const Predicate& is_wanted, const char* separator) {
  std::string names;
  for (int i = 0; i < kNumMethods; ++i) {
    if (!is_wanted(static_cast<Method>(i))) continue;
    names += std::string(names.empty() ? "" : separator) + kMethodNames[i];
  }
  return names;
}

}  // namespace

std::string built_methods() {
  return method_names(&is_built, ",");
}

Method parse_method(const std::string& name) {
  for (int i = 0; i < kNumMethods; ++i) {
    if (name != kMethodNames[i]) continue;
    const auto method = static_cast<Method>(i);
    if (is_built(method)) return method;
    fail("discretization_method '", name,
         "' was left out of this build (SELECTIVE_SCAN_METHODS=", built_methods(),
         "); build again without it");
  }
  const std::string names = method_names([](Method) { return true; }, ", ");
  fail("discretization_method must be one of ", names, ", got '", name, "'");
}

ScalarType state_dtype(const ScanParams& params) {
  return float_dtype(params.is_double, params.is_complex);
}

ArrayView sequence_view(const Tensor& tensor, bool reverse) {
  const ArrayView view = sequence_view(tensor);
  return reverse ? reversed(view, tensor.size(2)) : view;
}

ArrayView projection_view(const Tensor& tensor, const ScanParams& params, bool reverse) {
  if (!is_variable(tensor)) return pole_view(tensor);
  const auto group = tensor.dim() == 4 ? &ArrayView::group : kNone;
  const ArrayView view =
      with_parts(view_of(tensor, &ArrayView::batch, group, &ArrayView::state, &ArrayView::step),
                 tensor, params.is_complex);
  return reverse ? reversed(view, params.seqlen) : view;
}

namespace {

/// Parses the name of a method that takes an A of shape (dim, dstate, dstate).
Method parse_matrix_method(const std::string& name) {
  const char* only = kMethodNames[static_cast<int>(Method::kBilinear)];
  if (name != only) fail("discretization_method must be one of ", only, ", got '", name, "'");
  return Method::kBilinear;
}

}  // namespace

ScanParams make_scan_params(const ScanArguments& args, bool is_matrix_A, int64_t max_dstate) {
  ScanParams params;
  params.method = is_matrix_A ? parse_matrix_method(args.discretization_method)
                              : parse_method(args.discretization_method);
  params.delta_softplus = args.delta_softplus;

  CheckedCall call(is_matrix_A ? tables::kMatrixScan : tables::kSelectiveScan, {max_dstate},
                   args.tensors());
  // The tables do not say what goes with a matrix A, and with no other.
  call.check_shapes([&](const Tensor& tensor) {
    if (is_matrix_A && args.cu_seqlens && &tensor == &*args.cu_seqlens) {
      fail("cu_seqlens must be None where A is (dim, dstate, dstate)");
    }
    const bool takes_matrices = is_matrix_A || params.method == Method::kBilinear;
    if (!takes_matrices && &tensor == &args.A && tensor.dim() == 3) {
      fail("A of shape ", shape_text(tensor), " needs discretization_method bilinear, got '",
           args.discretization_method, "'");
    }
  });
  set_sizes(params, call);
  params.variable_B = is_variable(args.B);
  params.variable_C = is_variable(args.C);
  if (args.cu_seqlens) {
    params.packed = packed_sequences(*args.cu_seqlens, params.seqlen);
    params.packed.reversed = args.reverse;
  }

  params.u = sequence_view(args.u, args.reverse);
  params.delta = sequence_view(args.delta, args.reverse);
  params.A = pole_view(args.A);
  params.B = projection_view(args.B, params, args.reverse);
  params.C = projection_view(args.C, params, args.reverse);
  if (args.D) params.D = channel_view(*args.D);
  if (args.z) params.z = sequence_view(*args.z, args.reverse);
  if (args.input_delta) params.input_delta = sequence_view(*args.input_delta, args.reverse);
  if (args.delta_bias) params.delta_bias = channel_view(*args.delta_bias);
  if (args.initial_state) params.initial_state = state_view(*args.initial_state);
  return params;
}

}  // namespace selective_scan::op
