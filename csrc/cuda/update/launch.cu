// Launches of the state update.
#include "../../core/method_table.h"
#include "../launch.h"
#include "kernels.h"

namespace selective_scan::cuda {
namespace {

using update::DenseArgs;
using update::UpdateArgs;

template <class State, class Input>
cudaError_t launch_dense(const UpdateArgs& args, cudaStream_t stream) {
  using Launch = cudaError_t (*)(const DenseArgs<Input>&, const LaunchShape&, cudaStream_t);
  static constexpr auto kLaunches = make_kernel_table<Launch>(
      [&]<Method kMethod>() { return &update::DenseUpdate<State, Input, kMethod>::launch; });
  return kLaunches[args.params.method](DenseArgs<Input>(args.params), args.plan.shape, stream);
}

template <class T, int kStates, int kPacks>
cudaError_t launch_any(const UpdateArgs& args, cudaStream_t stream) {
  using Launch = cudaError_t (*)(const UpdateArgs&, cudaStream_t);
  static constexpr auto kLaunches = make_kernel_table<Launch>(
      [&]<Method kMethod>() { return &update::Update<T, kStates, kPacks, kMethod>::launch; });
  return kLaunches[args.params.method](args, stream);
}

/// See instantiations.py.
auto find_launch(const UpdateParams& params, const UpdatePlan& plan) {
  if (plan.is_dense) {
    const bool is_single = params.state.dtype == DType::kFloat32;
    switch (params.x.dtype) {
      case DType::kBFloat16:
        return is_single ? &launch_dense<float, BFloat16> : &launch_dense<BFloat16, BFloat16>;
      case DType::kFloat16:
        return is_single ? &launch_dense<float, Half> : &launch_dense<Half, Half>;
      default:
        return &launch_dense<float, float>;
    }
  }
  const bool many = plan.many_packs;
  if (params.is_complex && params.is_double) {
    return many ? &launch_any<Complex<double>, 1, 8> : &launch_any<Complex<double>, 1, 1>;
  }
  if (params.is_complex) {
    return many ? &launch_any<Complex<float>, 2, 4> : &launch_any<Complex<float>, 2, 1>;
  }
  if (params.is_double) return many ? &launch_any<double, 2, 4> : &launch_any<double, 2, 1>;
  if (plan.lane_states == 8) return &launch_any<float, 8, 1>;
  return many ? &launch_any<float, 4, 2> : &launch_any<float, 4, 1>;
}

}  // namespace

cudaError_t update_states(const UpdateParams& params, cudaStream_t stream) {
  const UpdatePlan plan = plan_update(params);
  return find_launch(params, plan)({params, plan}, stream);
}

}  // namespace selective_scan::cuda
