// The forward scan with full state matrices on the GPU.
//
// A warp has a channel of a batch entry and walks its steps; H and the factors of a step are in
// shared memory, vectors are spread over the lanes. A chunk's steps are read by the lanes, one
// each. Bound by the latency of elimination and substitution, a shuffle and a few operations per
// row.
#include "../launch.h"
#include "basis.h"
#include "system.cuh"

namespace selective_scan::cuda {
namespace matrix {

template <class T, int kOwn>
__global__ void __launch_bounds__(kWarpSize)
    forward_kernel(const __grid_constant__ MatrixForwardParams params, Workspace workspace) {
  using R = real_t<T>;
  using Vector = Entries<T, kOwn>;
  extern __shared__ __align__(16) char shared[];
  const Row<T, kOwn> row(params, workspace, blockIdx.x);
  T* matrices = reinterpret_cast<T*>(shared);
  System<T, kOwn> system(row.order, row.H, matrices, matrices + matrix_values(row.order));
  const R D = load_component<R>(params.D, row.channel * params.D.channel);
  const R bias = load_component<R>(params.delta_bias, row.channel * params.delta_bias.channel);
  Vector B = row.by_adjoint_Q(row.projection(params.B, params.variable_B, 0));
  Vector C = row.by_transposed_Q(row.projection(params.C, params.variable_C, 0));
  Vector h = row.load_state(params, params.initial_state);

  for (int64_t first = 0; first < params.seqlen; first += kChunk) {
    const auto load = [&](const ArrayView& view) {
      return load_step<R>(view, row.offset(view), first, params.seqlen);
    };
    const R raw = load(params.delta) + bias;
    const R delta = params.delta_softplus ? softplus<DeviceMath>(raw) : raw;
    const R u = load(params.u);
    const int64_t left = params.seqlen - first;
    const int steps = left < kChunk ? static_cast<int>(left) : kChunk;
    R y = R(0);
    for (int t = 0; t < steps; ++t) {
      if (params.variable_B) {
        B = row.by_adjoint_Q(row.projection(params.B, true, first + t));
      }
      if (params.variable_C) {
        C = row.by_transposed_Q(row.projection(params.C, true, first + t));
      }
      const R delta_now = shuffle<kWarpSize>(delta, t);
      const Vector input = System<T, kOwn>::moved(Vector{}, shuffle<kWarpSize>(u, t), B);
      h = System<T, kOwn>::moved(h, delta_now, system.slope(delta_now, h, input));
      const R sum = real_product(C, h);
      if (threadIdx.x == t) y = sum;
    }
    if (params.out.present()) {
      R out = R(kOutputScale<T>) * y + D * u;
      if (params.z.present()) out *= silu<DeviceMath>(load(params.z));
      store_step(params.out, row.offset(params.out), first, params.seqlen, out);
    }
    if (params.states && first + kChunk < params.seqlen) {
      row.store_values(row.saved(params, first / kChunk), h);
    }
  }
  if (params.last_state.present()) row.store_state(params, params.last_state, h);
}

}  // namespace matrix

cudaError_t scan_forward(const MatrixForwardParams& params, const ScratchMemory& memory,
                         cudaStream_t stream) {
  const auto bytes = matrix::WorkspaceLayout(params, false, nullptr).bytes;
  const auto workspace = matrix::WorkspaceLayout(params, false, memory(bytes)).workspace;
  const cudaError_t error = matrix::reduce(params, workspace, stream);
  if (error != cudaSuccess) return error;
  return matrix::with_types(params, [&](auto* type, auto own) {
    using T = std::remove_pointer_t<decltype(type)>;
    LaunchShape shape;
    shape.blocks = params.batch * params.dim;
    shape.threads = kWarpSize;
    shape.shared_bytes =
        static_cast<int>(2 * matrix::matrix_values(static_cast<int>(params.dstate)) * sizeof(T));
    return launch_kernel(matrix::forward_kernel<T, own>, shape, stream, params, workspace);
  });
}

}  // namespace selective_scan::cuda
