#include "unitary_arguments.h"

namespace selective_scan::op {
namespace {

constexpr std::initializer_list<ScalarType> kComplexDtypes = {ScalarType::ComplexFloat,
                                                              ScalarType::ComplexDouble};

/// Calls visit(name, tensor) for every tensor that is there, in schema order.
template <class Visit>
void for_each_tensor(const UnitaryArguments& args, const Visit& visit) {
  visit("u", args.u);
  visit("dt", args.dt);
  visit("x", args.x);
  visit("x_bias", args.x_bias);
  visit("b", args.b);
  visit("c", args.c);
  visit("D", args.D);
  if (args.z) visit("z", *args.z);
  if (args.initial_state) visit("initial_state", *args.initial_state);
}

void check_dtypes(const UnitaryArguments& args) {
  for_each_tensor(args, [&](const char* name, const Tensor& tensor) {
    const bool is_complex = &tensor == &args.b || &tensor == &args.c ||
                            (args.initial_state && &tensor == &*args.initial_state);
    check_dtype(name, tensor, is_complex ? kComplexDtypes : kRealDtypes);
  });
}

void check_shapes(const UnitaryArguments& args, UnitaryScanParams& params, int64_t max_dstate) {
  check_shape("u", args.u, {{"batch"}, {"dim"}, {"seqlen"}});
  params.batch = args.u.size(0);
  params.dim = args.u.size(1);
  params.seqlen = args.u.size(2);
  const Dim batch{"batch", params.batch}, dim{"dim", params.dim}, steps{"seqlen", params.seqlen};

  check_shape("dt", args.dt, {batch, dim, steps});
  // The op also takes the blocks of a block-diagonal x, which are what a mapped x is.
  const int64_t block = args.x.dim() == 3 ? args.x.size(2) : 0;
  const bool is_in_blocks = block > 0 && params.dim % block == 0;
  check_shape("x", args.x, {dim, {"dstate"}, is_in_blocks ? Dim{"block"} : dim});
  params.dstate = args.x.size(1);
  if (params.dstate == 0) fail("x must have dstate of at least 1, got ", shape_text(args.x));
  if (max_dstate > 0 && params.dstate > max_dstate) {
    fail("x must have dstate of at most ", max_dstate, " on ", device_name(args.x), ", got ",
         shape_text(args.x));
  }
  const Dim dstate{"dstate", params.dstate};
  check_shape("x_bias", args.x_bias, {dim, dstate});
  const auto groups_of = [&](const char* name, const Tensor& tensor) {
    return check_projection_shape(name, tensor, {dstate}, batch, dim, dstate, steps);
  };
  const int64_t groups_of_b = groups_of("b", args.b);
  const int64_t groups_of_c = groups_of("c", args.c);
  params.variable_b = groups_of_b > 0;
  params.variable_c = groups_of_c > 0;
  params.groups = common_groups("b", groups_of_b, "c", groups_of_c);
  check_shape("D", args.D, {dim});
  if (args.z) check_shape("z", *args.z, {batch, dim, steps});
  if (args.initial_state) {
    check_shape("initial_state", *args.initial_state, {batch, dim, dstate});
  }
}

ArrayView view_of(const Tensor& tensor) {
  ArrayView view;
  // Inputs are only read; outputs are freshly allocated, so writing to them is safe.
  view.data = const_cast<void*>(tensor.const_data_ptr());
  view.dtype = component_dtype(tensor);
  view.imag = components(tensor) - 1;
  return view;
}

ArrayView weights_view(const Tensor& tensor) {
  ArrayView view = view_of(tensor);
  const int64_t rank = tensor.dim();
  const auto stride = [&](int64_t dim) { return tensor.stride(dim) * components(tensor); };
  if (rank == 1) {
    view.state = stride(0);
    return view;
  }
  view.batch = stride(0);
  view.group = rank == 4 ? stride(1) : 0;
  view.state = stride(rank - 2);
  view.step = stride(rank - 1);
  return view;
}

}  // namespace

ArrayView unitary_sequence_view(const Tensor& tensor) {
  ArrayView view = view_of(tensor);
  view.batch = tensor.stride(0);
  view.channel = tensor.stride(1);
  view.step = tensor.stride(2);
  return view;
}

ArrayView unitary_state_view(const Tensor& tensor) {
  ArrayView view = view_of(tensor);
  view.batch = tensor.stride(0) * components(tensor);
  view.channel = tensor.stride(1) * components(tensor);
  view.state = tensor.stride(2) * components(tensor);
  return view;
}

UnitaryScanParams make_unitary_params(const UnitaryArguments& args, int64_t max_dstate) {
  UnitaryScanParams params;
  for_each_tensor(args, check_dense);
  for_each_tensor(args, [&](const char* name, const Tensor& tensor) {
    check_same_device(name, tensor, "u", args.u);
    params.is_double = params.is_double || is_double_dtype(tensor.scalar_type());
  });
  check_dtypes(args);
  check_shapes(args, params, max_dstate);

  params.u = unitary_sequence_view(args.u);
  params.dt = unitary_sequence_view(args.dt);
  if (args.z) params.z = unitary_sequence_view(*args.z);
  params.x_bias = view_of(args.x_bias);
  params.x_bias.channel = args.x_bias.stride(0);
  params.x_bias.state = args.x_bias.stride(1);
  params.b = weights_view(args.b);
  params.c = weights_view(args.c);
  params.D = view_of(args.D);
  params.D.channel = args.D.stride(0);
  return params;
}

}  // namespace selective_scan::op
