#include "../kit/batch_sums.cuh"
#include "../kit/dependent_launch.cuh"
#include "launch.cuh"

namespace selective_scan::cuda {
namespace conv {

/// dweight and dbias from rows of partial sums (tap, channel), the bias behind the last tap. A
/// block has kBatchSums of them. Bound by latency.
template <class R>
__global__ void __launch_bounds__(kReduceThreads)
    sum_parts_kernel(const __grid_constant__ ConvBackwardParams params, const R* parts,
                     int64_t rows) {
  wait_for_primary();
  const int64_t row_size = (params.width + 1) * params.dim;
  const int64_t index = int64_t{blockIdx.x} * kBatchSums + threadIdx.x % kBatchSums;
  const R sum = sum_rows<R>(parts, rows, row_size, index, 1, index < row_size);
  if (index >= row_size || threadIdx.x >= kBatchSums) return;
  const int64_t tap = index / params.dim;
  const int64_t channel = index - tap * params.dim;
  if (tap < params.width) {
    store_component(params.dweight, channel * params.dweight.channel + tap * params.dweight.step,
                    sum);
  } else if (params.dbias.present()) {
    store_component(params.dbias, channel * params.dbias.channel, sum);
  }
}

template <class R>
cudaError_t launch_parts(const ConvBackwardParams& params, const ConvPlan& plan, R* parts,
                         cudaStream_t stream) {
  const auto columns = [&](auto kernel) {
    return launch_kernel(kernel, plan.shape, stream, params, plan.columns, parts);
  };
  if (plan.kernels == Kernels::kAnyStrides) {
    return columns(columns_backward<R, Scalars<R>, kMaxConvWidth, false>);
  }
  if constexpr (std::is_same_v<R, float>) {
    return with_element(params, [&]<class Element>(Element*) {
      return with_taps(params, [&](auto taps) {
        using Storage = Vectors<Element, column_channels(sizeof(Element), taps, true)>;
        if (plan.kernels == Kernels::kRows) {
          return launch_kernel(rows_backward<Element, taps>, plan.shape, stream, params, plan.rows,
                               parts);
        }
        return plan.is_whole ? columns(columns_backward<float, Storage, taps, true>)
                             : columns(columns_backward<float, Storage, taps, false>);
      });
    });
  }
  return cudaErrorInvalidValue;
}

}  // namespace conv

int64_t workspace_bytes(const ConvBackwardParams& params) {
  const int64_t bytes = params.is_double ? sizeof(double) : sizeof(float);
  Device device;
  current_device(device);  // what went wrong the launch reports
  return conv::plan_conv(params, device).part_rows * (params.width + 1) * params.dim * bytes;
}

cudaError_t causal_conv1d_backward(const ConvBackwardParams& params, void* workspace,
                                   cudaStream_t stream) {
  using namespace conv;
  Device device;
  cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  const ConvPlan plan = plan_conv(params, device);
  return with_real(params, [&]<class R>(R*) {
    auto* parts = static_cast<R*>(workspace);
    if (params.dinitial_states.present() && params.sequences > 0 && params.width > 1) {
      error = launch_kernel(initial_gradient_kernel<R>, state_shape(params), stream, params);
    }
    if (error == cudaSuccess && plan.part_rows > 0) {
      error = launch_parts(params, plan, parts, stream);
    }
    if (error != cudaSuccess) return error;
    const int64_t sums = (params.width + 1) * params.dim;
    const LaunchShape shape{ceil_div(sums, int64_t{kBatchSums}), kReduceThreads, 0, true};
    return launch_kernel(sum_parts_kernel<R>, shape, stream, params, static_cast<const R*>(parts),
                         plan.part_rows);
  });
}

}  // namespace selective_scan::cuda
