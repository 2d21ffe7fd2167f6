#include "scan_arguments.h"

#include "../core/method_table.h"
#include "tensor_views.h"

namespace selective_scan::op {
namespace {

/// Calls visit(name, tensor) for every tensor that is there, in schema order.
template <class Visit>
void for_each_tensor(const ScanArguments& args, const Visit& visit) {
  visit("u", args.u);
  visit("delta", args.delta);
  visit("A", args.A);
  visit("B", args.B);
  visit("C", args.C);
  if (args.D) visit("D", *args.D);
  if (args.z) visit("z", *args.z);
  if (args.delta_bias) visit("delta_bias", *args.delta_bias);
  if (args.initial_state) visit("initial_state", *args.initial_state);
  if (args.cu_seqlens) visit("cu_seqlens", *args.cu_seqlens);
}

bool is_variable(const Tensor& projection) {
  return projection.dim() != 2;
}

void check_dtypes(const ScanArguments& args, bool is_complex) {
  check_dtype("u", args.u, kRealDtypes);
  check_dtype("delta", args.delta, kRealDtypes);
  check_dtype(
      "A", args.A,
      {ScalarType::Float, ScalarType::Double, ScalarType::ComplexFloat, ScalarType::ComplexDouble});
  check_projection_dtype("B", args.B, is_complex);
  check_projection_dtype("C", args.C, is_complex);
  if (args.D) check_dtype("D", *args.D, kRealDtypes);
  if (args.z) check_dtype("z", *args.z, kRealDtypes);
  if (args.delta_bias) check_dtype("delta_bias", *args.delta_bias, kRealDtypes);
  if (args.initial_state && is_complex) {
    check_dtype("initial_state", *args.initial_state,
                {ScalarType::ComplexFloat, ScalarType::ComplexDouble});
  } else if (args.initial_state) {
    check_dtype("initial_state", *args.initial_state, {ScalarType::Float, ScalarType::Double});
  }
  if (args.cu_seqlens) check_dtype("cu_seqlens", *args.cu_seqlens, kIndexDtypes);
}

void check_A(const ScanArguments& args, const ScanParams& params) {
  const Tensor& A = args.A;
  if (!args.is_matrix_A) {
    if (A.dim() == 3 && args.method != Method::kBilinear) {
      fail("A of shape ", shape_text(A), " needs discretization_method bilinear, got '",
           kMethodNames[static_cast<int>(args.method)], "'");
    }
    check_shape("A", A, {{"dim", params.dim}, {"dstate"}});
    return;
  }
  check_shape("A", A, {{"dim", params.dim}, {"dstate"}, {"dstate"}});
  if (A.size(1) != A.size(2)) {
    fail("A must be (dim, dstate, dstate) = (", params.dim, ", *, *), got ", shape_text(A));
  }
}

void check_shapes(const ScanArguments& args, ScanParams& params, int64_t max_dstate) {
  check_shape("u", args.u, {{"batch"}, {"dim"}, {"seqlen"}});
  params.batch = args.u.size(0);
  params.dim = args.u.size(1);
  params.seqlen = args.u.size(2);
  const auto check_sequence = [&](const char* name, const Tensor& tensor) {
    check_shape(name, tensor,
                {{"batch", params.batch}, {"dim", params.dim}, {"seqlen", params.seqlen}});
  };
  const auto check_channels = [&](const char* name, const Tensor& tensor) {
    check_shape(name, tensor, {{"dim", params.dim}});
  };

  check_sequence("delta", args.delta);
  check_A(args, params);
  params.dstate = args.A.size(1);
  if (params.dstate == 0) fail("A must have dstate of at least 1, got ", shape_text(args.A));
  if (max_dstate > 0 && params.dstate > max_dstate) {
    fail("A must have dstate of at most ", max_dstate, " on ", device_name(args.A), ", got ",
         shape_text(args.A));
  }
  const auto groups_of = [&](const char* name, const Tensor& tensor) {
    const bool packed = params.is_complex && !is_complex_dtype(dtype_of(tensor));
    const Dim steps = packed ? Dim{"2*seqlen", 2 * params.seqlen} : Dim{"seqlen", params.seqlen};
    const Dim dim{"dim", params.dim}, dstate{"dstate", params.dstate};
    return check_projection_shape(name, tensor, {dim, dstate}, {"batch", params.batch}, dim, dstate,
                                  steps);
  };
  const int64_t groups_of_B = groups_of("B", args.B);
  const int64_t groups_of_C = groups_of("C", args.C);
  params.variable_B = groups_of_B > 0;
  params.variable_C = groups_of_C > 0;
  params.groups = common_groups("B", groups_of_B, "C", groups_of_C);
  if (args.D) check_channels("D", *args.D);
  if (args.z) check_sequence("z", *args.z);
  if (args.delta_bias) check_channels("delta_bias", *args.delta_bias);
  if (args.cu_seqlens) {
    if (args.is_matrix_A) fail("cu_seqlens must be None where A is (dim, dstate, dstate)");
    params.packed = packed_sequences(*args.cu_seqlens, "u", args.u);
    params.packed.reversed = args.reverse;
  }
  if (args.initial_state) check_state_shape("initial_state", *args.initial_state, params);
}

/// A view whose strides count components: `stride(i)` is the tensor's i-th.
struct Components {
  const Tensor& tensor;
  int64_t per_element;

  explicit Components(const Tensor& tensor) : tensor(tensor), per_element(components(tensor)) {}

  int64_t stride(int64_t dim) const { return tensor.stride(dim) * per_element; }

  ArrayView view() const {
    ArrayView view;
    // Inputs are only read; outputs are new, or given to be written to.
    view.data = const_cast<void*>(tensor.const_data_ptr());
    view.dtype = component_dtype(tensor);
    view.imag = per_element - 1;
    return view;
  }
};

template <class Predicate>
std::string method_names(const Predicate& is_wanted, const char* separator) {
  std::string names;
  for (int i = 0; i < kNumMethods; ++i) {
    if (!is_wanted(static_cast<Method>(i))) continue;
    names += std::string(names.empty() ? "" : separator) + kMethodNames[i];
  }
  return names;
}

ArrayView reversed(ArrayView view, int64_t seqlen) {
  if (seqlen == 0) return view;
  view.data = static_cast<char*>(view.data) + (seqlen - 1) * view.step * element_size(view.dtype);
  view.step = -view.step;
  return view;
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

void check_projection_dtype(const char* name, const Tensor& tensor, bool is_complex) {
  if (!is_complex) {
    check_dtype(name, tensor, kRealDtypes);
  } else if (is_variable(tensor)) {
    check_dtype(name, tensor,
                {ScalarType::ComplexFloat, ScalarType::ComplexDouble, ScalarType::Float,
                 ScalarType::Half, ScalarType::BFloat16, ScalarType::Double});
  } else {
    check_dtype(name, tensor, {ScalarType::ComplexFloat, ScalarType::ComplexDouble},
                " (complex A, constant B and C)");
  }
}

void check_state_shape(const char* name, const Tensor& tensor, const ScanParams& params) {
  check_shape(name, tensor,
              {{"sequences", params.sequences()}, {"dim", params.dim}, {"dstate", params.dstate}});
}

Method parse_matrix_method(const std::string& name) {
  const char* only = kMethodNames[static_cast<int>(Method::kBilinear)];
  if (name != only) fail("discretization_method must be one of ", only, ", got '", name, "'");
  return Method::kBilinear;
}

ScalarType state_dtype(const ScanParams& params) {
  return float_dtype(params.is_double, params.is_complex);
}

ArrayView sequence_view(const Tensor& tensor, bool reverse) {
  const Components components(tensor);
  ArrayView view = components.view();
  view.batch = components.stride(0);
  view.channel = components.stride(1);
  view.step = components.stride(2);
  return reverse ? reversed(view, tensor.size(2)) : view;
}

ArrayView channel_view(const Tensor& tensor) {
  const Components components(tensor);
  ArrayView view = components.view();
  view.channel = components.stride(0);
  return view;
}

ArrayView pole_view(const Tensor& tensor) {
  const Components components(tensor);
  ArrayView view = components.view();
  view.channel = components.stride(0);
  view.state = components.stride(1);
  return view;
}

ArrayView state_view(const Tensor& tensor) {
  const Components components(tensor);
  ArrayView view = components.view();
  view.batch = components.stride(0);
  view.channel = components.stride(1);
  view.state = components.stride(2);
  return view;
}

ArrayView projection_view(const Tensor& tensor, const ScanParams& params, bool reverse) {
  if (!is_variable(tensor)) return pole_view(tensor);
  const Components components(tensor);
  const int64_t rank = tensor.dim();
  ArrayView view = components.view();
  view.batch = components.stride(0);
  view.group = rank == 4 ? components.stride(1) : 0;
  view.state = components.stride(rank - 2);
  view.step = components.stride(rank - 1);
  if (params.is_complex && components.per_element == 1) {
    view.imag = view.step;
    view.step *= 2;
  }
  return reverse ? reversed(view, params.seqlen) : view;
}

ScanParams make_scan_params(const ScanArguments& args, int64_t max_dstate) {
  ScanParams params;
  params.method = args.method;
  params.delta_softplus = args.delta_softplus;

  for_each_tensor(args, check_dense);
  for_each_tensor(args, [&](const char* name, const Tensor& tensor) {
    check_same_device(name, tensor, "u", args.u);
    params.is_double = params.is_double || is_double_dtype(dtype_of(tensor));
  });
  params.is_complex = is_complex_dtype(dtype_of(args.A));
  check_dtypes(args, params.is_complex);
  check_shapes(args, params, max_dstate);

  params.u = sequence_view(args.u, args.reverse);
  params.delta = sequence_view(args.delta, args.reverse);
  params.A = pole_view(args.A);
  params.B = projection_view(args.B, params, args.reverse);
  params.C = projection_view(args.C, params, args.reverse);
  if (args.D) params.D = channel_view(*args.D);
  if (args.z) params.z = sequence_view(*args.z, args.reverse);
  if (args.delta_bias) params.delta_bias = channel_view(*args.delta_bias);
  if (args.initial_state) params.initial_state = state_view(*args.initial_state);
  return params;
}

}  // namespace selective_scan::op
