// Launches of the state update.
#include "../../core/method_table.h"
#include "../kit/launch_tools.h"
#include "../launch.h"
#include "kernels.h"

namespace selective_scan::cuda {
namespace {

using Launch = cudaError_t (*)(const UpdateParams&, const UpdatePlan&, cudaStream_t);

template <class T, int kStates, int kPacks>
struct AnyLaunch {
  template <Method kMethod>
  constexpr Launch operator()() const {
    return &update::Update<T, kStates, kPacks, kMethod>::launch;
  }
};
template <class T, int kStates, int kPacks>
constexpr auto kLaunches = make_kernel_table<Launch>(AnyLaunch<T, kStates, kPacks>());

template <class Access>
struct PlainLaunch {
  template <Method kMethod>
  constexpr Launch operator()() const {
    return &update::PlainUpdate<Access, kMethod>::launch;
  }
};
template <class Access>
constexpr auto kPlainLaunches = make_kernel_table<Launch>(PlainLaunch<Access>());

template <template <class State, class Input> class Access>
const MethodTable<Launch>& plain_launches_of(const UpdateParams& params) {
  const bool is_single = params.state.dtype == DType::kFloat32;
  switch (params.x.dtype) {
    case DType::kBFloat16:
      return is_single ? kPlainLaunches<Access<float, BFloat16>>
                       : kPlainLaunches<Access<BFloat16, BFloat16>>;
    case DType::kFloat16:
      return is_single ? kPlainLaunches<Access<float, Half>> : kPlainLaunches<Access<Half, Half>>;
    default:
      return kPlainLaunches<Access<float, float>>;
  }
}

/// See instantiations.py.
const MethodTable<Launch>& launches_of(const UpdateParams& params, const UpdatePlan& plan) {
  if (plan.is_dense) return plain_launches_of<update::DenseAccess>(params);
  if (plan.is_plain) return plain_launches_of<update::StridedAccess>(params);
  const bool many = plan.many_packs;
  if (params.is_complex && params.is_double) {
    return many ? kLaunches<Complex<double>, 1, 8> : kLaunches<Complex<double>, 1, 1>;
  }
  if (params.is_complex) {
    return many ? kLaunches<Complex<float>, 2, 4> : kLaunches<Complex<float>, 2, 1>;
  }
  if (params.is_double) return many ? kLaunches<double, 2, 4> : kLaunches<double, 2, 1>;
  if (plan.lane_states == 8) return kLaunches<float, 8, 1>;
  return many ? kLaunches<float, 4, 2> : kLaunches<float, 4, 1>;
}

}  // namespace

cudaError_t update_states(const UpdateParams& params, cudaStream_t stream) {
  const UpdatePlan plan = plan_update(params);
  return launches_of(params, plan)[params.method](params, plan, stream);
}

}  // namespace selective_scan::cuda
