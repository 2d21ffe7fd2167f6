#include "unitary_arguments.h"

#include "checked_call.h"

namespace selective_scan::op {
namespace {

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
  CheckedCall call(tables::kAdaptiveUnitaryScan, {max_dstate}, args.u, args.dt, args.x, args.x_bias,
                   args.b, args.c, args.D, args.z, args.initial_state);
  call.check_shapes();
  set_sizes(params, call);
  params.variable_b = args.b.dim() > 1;
  params.variable_c = args.c.dim() > 1;

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
