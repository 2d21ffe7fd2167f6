#include "../sums/sums.h"
#include "launch.cuh"

namespace selective_scan::cuda {
namespace conv {

/// Sums rows of partial sums, (tap, channel) with the bias after the last tap, into dweight and
/// dbias.
template <class R>
cudaError_t add_parts(const ConvBackwardParams& params, const R* parts, int64_t rows,
                      cudaStream_t stream) {
  const int64_t row_size = (params.width + 1) * params.dim;
  Sums sums;
  sums.is_double = params.is_double;
  const auto add = [&](int64_t first, int64_t taps, const ArrayView& target) {
    sums.parameters.add({parts + first * params.dim, true, rows, row_size, params.dim, 1, taps,
                         params.dim, target, target.step, target.channel});
  };
  add(0, params.width, params.dweight);
  if (params.dbias.present()) add(params.width, 1, params.dbias);
  return add_up(sums, stream);
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
    return with_element_type(params.x.dtype, [&]<class Element>(Element*) {
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

cudaError_t launch(const ConvBackwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream) {
  using namespace conv;
  Device device;
  cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  const ConvPlan plan = plan_conv(params, device);
  return with_real(params, [&]<class R>(R*) {
    const int64_t bytes = plan.part_rows * (params.width + 1) * params.dim * sizeof(R);
    auto* const parts = static_cast<R*>(bytes > 0 ? memory(bytes) : nullptr);
    if (params.dinitial_states.present() && params.sequences > 0 && params.width > 1) {
      error = launch_kernel(initial_gradient_kernel<R>, state_shape(params), stream, params);
    }
    if (error == cudaSuccess && plan.part_rows > 0) {
      error = launch_parts(params, plan, parts, stream);
    }
    if (error != cudaSuccess) return error;
    return add_parts(params, parts, plan.part_rows, stream);
  });
}

}  // namespace selective_scan::cuda
