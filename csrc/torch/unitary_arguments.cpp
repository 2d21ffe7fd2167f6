#include "unitary_arguments.h"

#include "checked_call.h"

namespace selective_scan::op {
namespace {

ArrayView weights_view(const Tensor& tensor) {
  if (tensor.dim() == 1) return view_of(tensor, &ArrayView::state);
  return view_of(tensor, &ArrayView::batch, tensor.dim() == 4 ? &ArrayView::group : kNone,
                 &ArrayView::state, &ArrayView::step);
}

}  // namespace

UnitaryScanParams make_unitary_params(const UnitaryArguments& args, int64_t max_dstate) {
  UnitaryScanParams params;
  CheckedCall call(tables::kAdaptiveUnitaryScan, {max_dstate}, args.tensors());
  call.check_shapes();
  set_sizes(params, call);
  params.variable_b = args.b.dim() > 1;
  params.variable_c = args.c.dim() > 1;

  params.u = sequence_view(args.u);
  params.dt = sequence_view(args.dt);
  if (args.z) params.z = sequence_view(*args.z);
  params.x_bias = pole_view(args.x_bias);
  params.b = weights_view(args.b);
  params.c = weights_view(args.c);
  params.D = channel_view(args.D);
  return params;
}

}  // namespace selective_scan::op
