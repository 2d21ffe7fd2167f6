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
  using Kernels = ConvPlan::Kernels;
  const auto columns = [&](auto kernel) {
    return launch_kernel(kernel, column_launch(params, plan.columns), stream, params, plan.columns,
                         parts);
  };
  if (plan.kernels == Kernels::kAnyStrides) {
    return columns(columns_backward<R, Scalars<R>, kMaxConvWidth>);
  }
  if constexpr (std::is_same_v<R, float>) {
    return with_element(params, [&]<class Element>(Element*) {
      return with_taps(params, [&](auto taps) {
        using Storage = Vectors<Element, column_channels(sizeof(Element), true)>;
        return plan.kernels == Kernels::kColumns
                   ? columns(columns_backward<float, Storage, taps>)
                   : launch_kernel(rows_backward<Element, taps>, row_launch(params, plan.rows),
                                   stream, params, plan.rows, parts);
      });
    });
  }
  return cudaErrorInvalidValue;
}

}  // namespace conv

int64_t workspace_bytes(const ConvBackwardParams& params) {
  const int64_t bytes = params.is_double ? sizeof(double) : sizeof(float);
  return conv::plan(params, true).part_rows * (params.width + 1) * params.dim * bytes;
}

cudaError_t causal_conv1d_backward(const ConvBackwardParams& params, void* workspace,
                                   cudaStream_t stream) {
  using namespace conv;
  const ConvPlan plan = conv::plan(params, true);
  return with_real(params, [&]<class R>(R*) {
    auto* parts = static_cast<R*>(workspace);
    cudaError_t error = cudaSuccess;
    if (params.dinitial_states.present() && params.sequences > 0 && params.width > 1) {
      error = launch_kernel(initial_gradient_kernel<R>, state_launch(params), stream, params);
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
