#include "launch.cuh"

namespace selective_scan::cuda {

int64_t workspace_bytes(const ConvForwardParams&) {
  return 0;
}

cudaError_t causal_conv1d_forward(const ConvForwardParams& params, void*, cudaStream_t stream) {
  using namespace conv;
  using Kernels = ConvPlan::Kernels;
  const ConvPlan plan = conv::plan(params, false);
  const auto columns = [&](auto kernel) {
    return launch_kernel(kernel, column_launch(params, plan.columns), stream, params, plan.columns);
  };
  cudaError_t error = cudaSuccess;
  if (plan.kernels == Kernels::kAnyStrides) {
    error = with_real(params, [&]<class R>(R*) {
      return columns(columns_forward<R, Scalars<R>, kMaxConvWidth>);
    });
  } else if (plan.kernels != Kernels::kNone) {
    error = with_element(params, [&]<class Element>(Element*) {
      return with_taps(params, [&](auto taps) {
        using Storage = Vectors<Element, column_channels(sizeof(Element), false)>;
        return plan.kernels == Kernels::kColumns
                   ? columns(columns_forward<float, Storage, taps>)
                   : launch_kernel(rows_forward<Element, taps>, row_launch(params, plan.rows),
                                   stream, params, plan.rows);
      });
    });
  }
  if (error != cudaSuccess || !params.final_states.present()) return error;
  if (params.sequences == 0 || params.width == 1) return cudaSuccess;
  return with_real(params, [&]<class R>(R*) {
    return launch_kernel(final_states_kernel<R>, state_launch(params), stream, params);
  });
}

}  // namespace selective_scan::cuda
