#include "basis.h"

#include "row.cuh"

namespace selective_scan::cuda::matrix {
namespace {

template <class T>
struct WideOf {
  using type = double;
};
template <class R>
struct WideOf<Complex<R>> {
  using type = Complex<double>;
};
template <class T>
using Wide = typename WideOf<T>::type;

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

/// Entry `index` of A, exactly, whatever its type.
__device__ double load_wide(const ArrayView& view, int64_t index, double) {
  return load_element<double>(view.data, view.dtype, index);
}
__device__ Complex<double> load_wide(const ArrayView& view, int64_t index, Complex<double>) {
  return {load_wide(view, index, double()), load_wide(view, index + view.imag, double())};
}

/// A warp has a channel: its lanes go along the columns where rows are combined, along the rows
/// where columns are.
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
    below = sum_over_warp(below);
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

/// dA = Q·(Σ dH over the batch)·Q^H, a warp for each channel.
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

/// The gradient of a variable B or C: sums over the channels of a group.
template <class T>
__global__ void sum_channels_kernel(const __grid_constant__ ScanParams params,
                                    const __grid_constant__ ArrayView gradient, const T* parts) {
  const int64_t count = params.batch * params.groups * params.seqlen * params.dstate;
  const int64_t channels = params.dim / params.groups;
  for (int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; index < count;
       index += int64_t{gridDim.x} * blockDim.x) {
    const int64_t n = index % params.dstate;
    const int64_t step = index / params.dstate % params.seqlen;
    const int64_t group = index / params.dstate / params.seqlen % params.groups;
    const int64_t batch = index / params.dstate / params.seqlen / params.groups;
    const int64_t first = batch * params.dim + group * channels;
    T sum{};
    for (int64_t c = 0; c < channels; ++c) {
      sum += parts[((first + c) * params.seqlen + step) * params.dstate + n];
    }
    store_component(
        gradient,
        batch * gradient.batch + group * gradient.group + n * gradient.state + step * gradient.step,
        sum);
  }
}

/// A gradient (channel, state) from parts (batch, channel, state): sums over the batch.
template <class T>
__global__ void sum_batch_kernel(int64_t batches, int64_t dim, int64_t states,
                                 const __grid_constant__ ArrayView gradient, const T* parts) {
  const int64_t count = dim * states;
  for (int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; index < count;
       index += int64_t{gridDim.x} * blockDim.x) {
    T sum{};
    for (int64_t batch = 0; batch < batches; ++batch) sum += parts[batch * count + index];
    store_component(gradient, index / states * gradient.channel + index % states * gradient.state,
                    sum);
  }
}

constexpr int kSumThreads = 128;

template <class T>
cudaError_t launch_sums(const MatrixBackwardParams& params, const Workspace& workspace,
                        cudaStream_t stream) {
  using R = real_t<T>;
  const auto shape_of = [](int64_t count) {
    LaunchShape shape;
    shape.blocks = grid_blocks(ceil_div(count > 0 ? count : 1, kSumThreads));
    shape.threads = kSumThreads;
    return shape;
  };
  const auto sum_batch = [&](const ArrayView& gradient, int64_t states, auto* parts) {
    if (!gradient.present()) return cudaSuccess;
    using Part = std::remove_cv_t<std::remove_pointer_t<decltype(parts)>>;
    return launch_kernel(sum_batch_kernel<Part>, shape_of(params.dim * states), stream,
                         params.batch, params.dim, states, gradient, parts);
  };
  const auto sum_projection = [&](const ArrayView& gradient, bool is_variable, void* data) {
    const T* parts = static_cast<const T*>(data);
    if (!is_variable) return sum_batch(gradient, params.dstate, parts);
    const int64_t count = params.batch * params.groups * params.seqlen * params.dstate;
    return launch_kernel(sum_channels_kernel<T>, shape_of(count), stream,
                         static_cast<const ScanParams&>(params), gradient, parts);
  };
  cudaError_t error = sum_projection(params.dB, params.variable_B, workspace.dB_parts);
  if (error == cudaSuccess) {
    error = sum_projection(params.dC, params.variable_C, workspace.dC_parts);
  }
  if (error == cudaSuccess) {
    error = sum_batch(params.dD, 1, static_cast<const R*>(workspace.dD_parts));
  }
  if (error == cudaSuccess) {
    error = sum_batch(params.ddelta_bias, 1, static_cast<const R*>(workspace.ddelta_bias_parts));
  }
  return error;
}

LaunchShape warps(int64_t count, int64_t shared_bytes) {
  LaunchShape shape;
  shape.blocks = count;
  shape.threads = kWarpSize;
  shape.shared_bytes = static_cast<int>(shared_bytes);
  return shape;
}

}  // namespace

cudaError_t reduce(const MatrixForwardParams& params, const Workspace& workspace,
                   cudaStream_t stream) {
  return with_types(params, [&](auto* type, auto) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int order = static_cast<int>(params.dstate);
    const int64_t values = 2 * matrix_values(order) + order;
    return launch_kernel(reduce_kernel<T>, warps(params.dim, values * sizeof(Wide<T>)), stream,
                         params, workspace);
  });
}

cudaError_t finish(const MatrixBackwardParams& params, const Workspace& workspace,
                   cudaStream_t stream) {
  return with_types(params, [&](auto* type, auto) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t values = 2 * matrix_values(static_cast<int>(params.dstate));
    const cudaError_t error = launch_kernel(
        turn_back_kernel<T>, warps(params.dim, values * sizeof(T)), stream, params, workspace);
    return error == cudaSuccess ? launch_sums<T>(params, workspace, stream) : error;
  });
}

}  // namespace selective_scan::cuda::matrix
