// Launches of the state update.
#include "../../core/method_table.h"
#include "../launch.h"
#include "dense_access.cuh"
#include "kernels.h"
#include "strided_access.cuh"

namespace selective_scan::cuda {
namespace {

using update::DenseAccess;
using update::StridedAccess;
using update::UpdateArgs;

template <class Access>
cudaError_t launch_plain(const UpdateParams& params, const UpdatePlan& plan, cudaStream_t stream) {
  using Args = typename Access::Args;
  using Launch = cudaError_t (*)(const Args&, const LaunchShape&, cudaStream_t);
  static constexpr auto kLaunches = make_kernel_table<Launch>(
      [&]<Method kMethod>() { return &update::PlainUpdate<Access, kMethod>::launch; });
  return kLaunches[params.method](Args(params, plan), plan.shape, stream);
}

template <template <class State, class Input> class Access>
cudaError_t launch_plain_of(const UpdateParams& params, const UpdatePlan& plan,
                            cudaStream_t stream) {
  const bool is_single = params.state.dtype == DType::kFloat32;
  switch (params.x.dtype) {
    case DType::kBFloat16:
      return is_single ? launch_plain<Access<float, BFloat16>>(params, plan, stream)
                       : launch_plain<Access<BFloat16, BFloat16>>(params, plan, stream);
    case DType::kFloat16:
      return is_single ? launch_plain<Access<float, Half>>(params, plan, stream)
                       : launch_plain<Access<Half, Half>>(params, plan, stream);
    default:
      return launch_plain<Access<float, float>>(params, plan, stream);
  }
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
  if (plan.is_dense) return launch_plain_of<DenseAccess>(params, plan, stream);
  if (plan.is_plain) return launch_plain_of<StridedAccess>(params, plan, stream);
  return find_launch(params, plan)({params, plan}, stream);
}

}  // namespace selective_scan::cuda
