#include "basis.h"

#include "row.cuh"

namespace selective_scan::cuda::matrix {
namespace {

template <class T>
using Wide = std::conditional_t<is_complex_v<T>, Complex<double>, double>;

__device__ double narrowed(double value, double) {
  return value;
}
__device__ float narrowed(double value, float) {
  return static_cast<float>(value);
}
template <class R>
__device__ Complex<R> narrowed(Complex<double> value, Complex<R>) {
  return {narrowed(value.re, R()), narrowed(value.im, R())};
}

/// Loads entry `index` of A exactly, whatever its type.
__device__ double load_wide(const ArrayView& view, int64_t index, double) {
  return load_element<double>(view.data, view.dtype, index);
}
__device__ Complex<double> load_wide(const ArrayView& view, int64_t index, Complex<double>) {
  return {load_wide(view, index, double()), load_wide(view, index + view.imag, double())};
}

/// Reduces a channel's matrix with one warp. Its lanes lie along the columns while rows are
/// combined, and along the rows while columns are combined.
template <class T>
__global__ void __launch_bounds__(kWarpSize)
    reduce_kernel(const __grid_constant__ MatrixForwardParams params, Workspace workspace) {
  using W = Wide<T>;
  extern __shared__ __align__(16) char shared[];
  const int order = static_cast<int>(params.dstate), pitch = pitch_of(order);
  W* A = reinterpret_cast<W*>(shared);
  W* Q = A + matrix_values(order);
  W* reflector = Q + matrix_values(order);
  const int64_t channel = blockIdx.x;
  const int lane = threadIdx.x;
  for (int i = 0; i < order; ++i) {
    for (int j = lane; j < order; j += kWarpSize) {
      const ArrayView& view = params.A;
      const int64_t index = channel * view.channel + i * view.state + j * params.A_column;
      A[i * pitch + j] = load_wide(view, index, W());
      Q[i * pitch + j] = i == j ? one<W>() : W{};
    }
  }
  __syncwarp();
  for (int k = 0; k + 2 < order; ++k) {
    double below = 0;
    for (int i = k + 2 + lane; i < order; i += kWarpSize) below += norm(A[i * pitch + k]);
    below = sum_over_lanes(below);
    if (below == 0) continue;
    const W head = A[(k + 1) * pitch + k];
    const double head_size = sqrt(norm(head));
    const double length = sqrt(norm(head) + below);
    const W direction = head_size == 0 ? one<W>() : (1 / head_size) * head;
    const W first = head + length * direction;
    const double scale = 2 / (norm(first) + below);
    for (int i = k + 1 + lane; i < order; i += kWarpSize) {
      reflector[i] = i == k + 1 ? first : A[i * pitch + k];
    }
    __syncwarp();
    for (int j = k + lane; j < order; j += kWarpSize) {
      W product{};
      for (int i = k + 1; i < order; ++i) product += conj(reflector[i]) * A[i * pitch + j];
      product = scale * product;
      for (int i = k + 1; i < order; ++i) {
        A[i * pitch + j] = A[i * pitch + j] - reflector[i] * product;
      }
    }
    __syncwarp();
    for (W* matrix : {A, Q}) {
      for (int i = lane; i < order; i += kWarpSize) {
        W* row = matrix + i * pitch;
        W product{};
        for (int j = k + 1; j < order; ++j) product += row[j] * reflector[j];
        product = scale * product;
        for (int j = k + 1; j < order; ++j) row[j] = row[j] - product * conj(reflector[j]);
      }
    }
    for (int i = k + 2 + lane; i < order; i += kWarpSize) A[i * pitch + k] = W{};
    __syncwarp();
  }
  T* H = static_cast<T*>(workspace.bases) + 3 * channel * order * order;
  for (int i = 0; i < order; ++i) {
    for (int j = lane; j < order; j += kWarpSize) {
      H[i * order + j] = narrowed(A[i * pitch + j], T());
      H[(order + i) * order + j] = narrowed(Q[i * pitch + j], T());
      H[(2 * order + i) * order + j] = narrowed(Q[j * pitch + i], T());
    }
  }
}

/// Computes dA = Q·(Σ dH over the batch)·Q^H, with one warp per channel.
template <class T>
__global__ void __launch_bounds__(kWarpSize)
    turn_back_kernel(const __grid_constant__ MatrixBackwardParams params, Workspace workspace) {
  extern __shared__ __align__(16) char shared[];
  const int order = static_cast<int>(params.dstate), pitch = pitch_of(order);
  const int64_t channel = blockIdx.x;
  const int lane = threadIdx.x;
  T* sum = reinterpret_cast<T*>(shared);
  T* product = sum + matrix_values(order);
  const T* Q = static_cast<const T*>(workspace.bases) + (3 * channel + 1) * order * order;
  const T* dH = static_cast<const T*>(workspace.dH);
  for (int i = 0; i < order; ++i) {
    for (int j = lane; j < order; j += kWarpSize) {
      T total{};
      for (int64_t batch = 0; batch < params.batch; ++batch) {
        total += dH[((batch * params.dim + channel) * order + i) * order + j];
      }
      sum[i * pitch + j] = total;
    }
  }
  __syncwarp();
  for (int i = 0; i < order; ++i) {
    for (int j = lane; j < order; j += kWarpSize) {
      T total{};
      for (int k = 0; k < order; ++k) {
        total = multiply_add(Q[i * order + k], sum[k * pitch + j], total);
      }
      product[i * pitch + j] = total;
    }
  }
  __syncwarp();
  for (int i = 0; i < order; ++i) {
    for (int j = lane; j < order; j += kWarpSize) {
      T total{};
      for (int k = 0; k < order; ++k) {
        total = multiply_add(product[i * pitch + k], conj(Q[j * order + k]), total);
      }
      const ArrayView& view = params.dA;
      store_component(view, channel * view.channel + i * view.state + j * params.dA_column, total);
    }
  }
}

LaunchShape warps(int64_t count, int64_t shared_bytes) {
  return {count, kWarpSize, static_cast<int>(shared_bytes)};
}

}  // namespace

cudaError_t reduce(const MatrixForwardParams& params, const Workspace& workspace,
                   cudaStream_t stream) {
  return with_types(params, [&]<class T>(T*, auto) {
    const int order = static_cast<int>(params.dstate);
    const int64_t values = 2 * matrix_values(order) + order;
    return launch_kernel(reduce_kernel<T>, warps(params.dim, values * sizeof(Wide<T>)), stream,
                         params, workspace);
  });
}

cudaError_t finish(const MatrixBackwardParams& params, const Workspace& workspace,
                   cudaStream_t stream) {
  return with_types(params, [&]<class T>(T*, auto) {
    const int64_t values = 2 * matrix_values(static_cast<int>(params.dstate));
    const cudaError_t error = launch_kernel(
        turn_back_kernel<T>, warps(params.dim, values * sizeof(T)), stream, params, workspace);
    if (error != cudaSuccess) return error;
    return add_gradients(params, workspace.sums,
                         {params.dim / params.groups, params.batch, workspace.padded_states},
                         stream);
  });
}

}  // namespace selective_scan::cuda::matrix
