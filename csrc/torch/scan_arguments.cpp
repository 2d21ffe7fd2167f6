#include "scan_arguments.h"

#include "../core/method_table.h"
#include "checked_call.h"

namespace selective_scan::op {
namespace {

template <class Predicate>
std::string method_names(const Predicate& is_wanted, const char* separator) {
  std::string names;
  for (int i = 0; i < kNumMethods; ++i) {
    if (!is_wanted(static_cast<Method>(i))) continue;
    names += std::string(names.empty() ? "" : separator) + kMethodNames[i];
  }
  return names;
}

/// Parses the name of a method that supports an A of shape (dim, dstate, dstate).
Method parse_matrix_method(const std::string& name) {
  const char* only = kMethodNames[static_cast<int>(Method::kBilinear)];
  if (name != only) fail("discretization_method must be one of ", only, ", got '", name, "'");
  return Method::kBilinear;
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
  return reverse ? reversed(view, tensor.size(tensor.dim() - 1)) : view;
}

ArrayView projection_view(const Tensor& tensor, const ScanParams& params, bool reverse,
                          bool has_batch) {
  if (tensor.dim() == 2) return pole_view(tensor);
  const auto batch = has_batch ? &ArrayView::batch : kNone;
  const auto group = tensor.dim() - has_batch == 3 ? &ArrayView::group : kNone;
  const ArrayView view =
      with_parts(view_of(tensor, batch, group, &ArrayView::state, &ArrayView::step), tensor,
                 params.is_complex);
  return reverse ? reversed(view, params.seqlen) : view;
}

ScanParams make_scan_params(const ScanArguments& args, bool is_matrix_A, int64_t max_dstate) {
  ScanParams params;
  params.method = is_matrix_A ? parse_matrix_method(args.discretization_method)
                              : parse_method(args.discretization_method);
  params.delta_softplus = args.delta_softplus;

  CheckedCall call(is_matrix_A ? tables::kMatrixScan : tables::kSelectiveScan, {max_dstate},
                   args.tensors());
  // Checks what the tables do not express: the options that need, or exclude, a matrix A.
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
  if (args.cu_seqlens) {
    params.packed = packed_sequences(*args.cu_seqlens, params.seqlen);
    params.packed.reversed = args.reverse;
  }
  set_inputs(params, args, args.reverse);
  if (args.initial_state) params.initial_state = state_view(*args.initial_state);
  return params;
}

}  // namespace selective_scan::op
