// Launches of the state update.
#include "../kit/launch_tools.h"
#include "../launch.h"
#include "kernels.h"

namespace selective_scan::cuda {
namespace update {
namespace {

template <class State, class Input>
cudaError_t launch_dense(const UpdateArgs& args, cudaStream_t stream) {
  return DenseUpdate<State, Input>::launch(DenseArgs<Input>(args.params), args.plan.shape, stream);
}

/// Returns the launch of one of the instances in instantiations.py.
auto find_launch(const UpdateParams& params, const UpdatePlan& plan) {
  if (plan.is_dense) {
    return with_element_type(params.x.dtype, [&]<class Input>(Input*) {
      return params.state.dtype == DType::kFloat32 ? &launch_dense<float, Input>
                                                   : &launch_dense<Input, Input>;
    });
  }
  const bool many = plan.many_packs;
  if (params.is_complex && params.is_double) {
    return many ? &Update<Complex<double>, 1, 8>::launch : &Update<Complex<double>, 1, 1>::launch;
  }
  if (params.is_complex) {
    return many ? &Update<Complex<float>, 2, 4>::launch : &Update<Complex<float>, 2, 1>::launch;
  }
  if (params.is_double) return many ? &Update<double, 2, 4>::launch : &Update<double, 2, 1>::launch;
  if (plan.lane_states == 8) return &Update<float, 8, 1>::launch;
  return many ? &Update<float, 4, 2>::launch : &Update<float, 4, 1>::launch;
}

}  // namespace
}  // namespace update

cudaError_t launch(const UpdateParams& params, const ScratchMemory&, cudaStream_t stream) {
  const UpdatePlan plan = plan_update(params);
  return update::find_launch(params, plan)({params, plan}, stream);
}

}  // namespace selective_scan::cuda
