#include "launch.cuh"

namespace selective_scan::cuda {

cudaError_t launch(const ConvForwardParams& params, const ScratchMemory&, cudaStream_t stream) {
  using namespace conv;
  Device device;
  cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  const ConvPlan plan = plan_conv(params, device);
  const auto columns = [&](auto kernel) {
    return launch_kernel(kernel, plan.shape, stream, params, plan.columns);
  };
  if (plan.kernels == Kernels::kAnyStrides) {
    error = with_real(params, [&]<class R>(R*) {
      return columns(columns_forward<R, Scalars<R>, kMaxConvWidth, false>);
    });
  } else if (plan.kernels != Kernels::kNone) {
    error = with_element_type(params.x.dtype, [&]<class Element>(Element*) {
      return with_taps(params, [&](auto taps) {
        using Storage = Vectors<Element, column_channels(sizeof(Element), taps, false)>;
        if (plan.kernels == Kernels::kRows) {
          return launch_kernel(rows_forward<Element, taps>, plan.shape, stream, params, plan.rows);
        }
        return plan.is_whole ? columns(columns_forward<float, Storage, taps, true>)
                             : columns(columns_forward<float, Storage, taps, false>);
      });
    });
  }
  if (error != cudaSuccess || !params.final_states.present()) return error;
  if (params.sequences == 0 || params.width == 1) return cudaSuccess;
  return with_real(params, [&]<class R>(R*) {
    return launch_kernel(final_states_kernel<R>, state_shape(params), stream, params);
  });
}

}  // namespace selective_scan::cuda
