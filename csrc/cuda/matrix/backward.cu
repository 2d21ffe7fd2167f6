// The backward scan with full state matrices on the GPU; csrc/cpu/matrix/backward.h has the
// formulas.
//
// As forward, a warp has a channel of a batch entry. From the state saved before a chunk it takes
// the steps again, and keeps states and slopes in memory; on the way back it factors each step
// anew. dH is in shared memory beside H and the factors. What several warps contribute to one
// gradient they leave apart; basis.cu adds it up.
#include "../launch.h"
#include "basis.h"
#include "system.cuh"

namespace selective_scan::cuda {
namespace matrix {

template <class T, int kOwn>
__global__ void __launch_bounds__(kWarpSize)
    backward_kernel(const __grid_constant__ MatrixBackwardParams params, Workspace workspace) {
  using R = real_t<T>;
  using Vector = Entries<T, kOwn>;
  using LaneSystem = System<T, kOwn>;
  extern __shared__ __align__(16) char shared[];
  const int64_t index = blockIdx.x;
  const Row<T, kOwn> row(params, workspace, index);
  const int order = row.order, pitch = pitch_of(order);
  T* matrices = reinterpret_cast<T*>(shared);
  T* dH = matrices + 2 * matrix_values(order);
  LaneSystem system(order, row.H, matrices, matrices + matrix_values(order));
  for (int i = 0; i < order; ++i) {
    for_own<kOwn>(order, [&](int, int n) { dH[i * pitch + n] = T{}; });
  }
  T* const states = static_cast<T*>(workspace.kept) + 2 * index * (kChunk + 1) * order;
  T* const slopes = states + (kChunk + 1) * order;
  const auto parts_at = [&](void* parts, int64_t steps, int64_t step) {
    return static_cast<T*>(parts) + (index * steps + step) * order;
  };
  const R D = load_component<R>(params.D, row.channel * params.D.channel);
  const R bias = load_component<R>(params.delta_bias, row.channel * params.delta_bias.channel);
  Vector B = row.by_adjoint_Q(row.projection(params.B, params.variable_B, 0));
  Vector C = row.by_transposed_Q(row.projection(params.C, params.variable_C, 0));
  Vector carry = row.load_state(params, params.dlast_state);
  Vector dB{}, dC{};  // of constant B and C, in the basis
  R dD = R(0), ddelta_bias = R(0);

  const int64_t chunks = ceil_div(params.seqlen, int64_t{kChunk});
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t first = chunk * kChunk;
    const int64_t left = params.seqlen - first;
    const int steps = left < kChunk ? static_cast<int>(left) : kChunk;
    const auto load = [&](const ArrayView& view) {
      return load_step<R>(view, row.offset(view), first, params.seqlen);
    };
    const auto store = [&](const ArrayView& view, R value) {
      store_step(view, row.offset(view), first, params.seqlen, value);
    };
    const R raw = load(params.delta) + bias;
    const R delta = params.delta_softplus ? softplus<DeviceMath>(raw) : raw;
    const R u = load(params.u), z = load(params.z), dout = load(params.dout);
    const R gate = params.z.present() ? sigmoid<DeviceMath>(z) : R(1);
    const R dy = params.z.present() ? dout * (z * gate) : dout;

    // --- forward through the chunk
    Vector h = chunk > 0 ? row.load_values(row.saved(params, chunk - 1))
                         : row.load_state(params, params.initial_state);
    row.store_values(states, h);
    R y = R(0);
    for (int t = 0; t < steps; ++t) {
      if (params.variable_B) {
        B = row.by_adjoint_Q(row.projection(params.B, true, first + t));
      }
      const R delta_now = shuffle<kWarpSize>(delta, t);
      const Vector input = LaneSystem::moved(Vector{}, shuffle<kWarpSize>(u, t), B);
      const Vector slope = system.slope(delta_now, h, input);
      h = LaneSystem::moved(h, delta_now, slope);
      row.store_values(slopes + t * order, slope);
      row.store_values(states + (t + 1) * order, h);
    }

    // --- and back
    R du = D * dy, ddelta = R(0);
    for (int t = steps - 1; t >= 0; --t) {
      if (params.variable_B) {
        B = row.by_adjoint_Q(row.projection(params.B, true, first + t));
      }
      if (params.variable_C) {
        C = row.by_transposed_Q(row.projection(params.C, true, first + t));
      }
      const R delta_now = shuffle<kWarpSize>(delta, t);
      const R u_now = shuffle<kWarpSize>(u, t);
      const R dy_now = R(kOutputScale<T>) * shuffle<kWarpSize>(dy, t);
      const Vector after = row.load_values(states + (t + 1) * order);
      const Vector before = row.load_values(states + t * order);
      const Vector slope = row.load_values(slopes + t * order);
      const R output = real_product(C, after);
      Vector g;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) g.v[i] = carry.v[i] + dy_now * conj(C.v[i]);
      const Vector back = system.adjoint_slope(delta_now, g);
      const Vector lambda = LaneSystem::moved(g, R(0.5) * delta_now, back);
      carry = LaneSystem::moved(g, delta_now, back);

      const R through_delta = real_inner_product(lambda, slope);
      const R through_u = delta_now * real_inner_product(lambda, B);
      if (threadIdx.x == t) {
        y = output;
        du += through_u;
        ddelta = through_delta;
      }
      Vector middle;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        middle.v[i] = (R(0.5) * delta_now) * conj(after.v[i] + before.v[i]);
      }
      for (int r = 0; r < order; ++r) {
        const T value = lambda.at(r);
        for_own<kOwn>(order, [&](int i, int n) {
          dH[r * pitch + n] = multiply_add(value, middle.v[i], dH[r * pitch + n]);
        });
      }
      const Vector dB_now = LaneSystem::moved(Vector{}, delta_now * u_now, lambda);
      if (params.variable_B) {
        row.store_values(parts_at(workspace.dB_parts, params.seqlen, first + t), row.by_Q(dB_now));
      } else {
        dB = LaneSystem::moved(dB, R(1), dB_now);
      }
      const Vector dC_now = LaneSystem::moved(Vector{}, dy_now, after);
      if (params.variable_C) {
        row.store_values(parts_at(workspace.dC_parts, params.seqlen, first + t),
                         conjugate(row.by_Q(dC_now)));
      } else {
        dC = LaneSystem::moved(dC, R(1), dC_now);
      }
    }

    if (params.delta_softplus && raw <= R(kSoftplusThreshold)) ddelta *= sigmoid<DeviceMath>(raw);
    dD += dy * u;
    if (static_cast<int>(threadIdx.x) < steps) ddelta_bias += ddelta;
    if (params.z.present()) {
      const R sum = R(kOutputScale<T>) * y + D * u;
      store(params.dz, dout * sum * silu_derivative(z, gate));
    }
    store(params.du, du);
    store(params.ddelta, ddelta);
    __syncwarp();  // the next chunk writes over the kept states
  }

  for (int i = 0; i < order; ++i) {
    for_own<kOwn>(order, [&](int, int n) {
      static_cast<T*>(workspace.dH)[(index * order + i) * order + n] = dH[i * pitch + n];
    });
  }
  if (!params.variable_B) row.store_values(parts_at(workspace.dB_parts, 1, 0), row.by_Q(dB));
  if (!params.variable_C) {
    row.store_values(parts_at(workspace.dC_parts, 1, 0), conjugate(row.by_Q(dC)));
  }
  dD = sum_over_warp(dD);
  ddelta_bias = sum_over_warp(ddelta_bias);
  if (threadIdx.x == 0) {
    static_cast<R*>(workspace.dD_parts)[index] = dD;
    static_cast<R*>(workspace.ddelta_bias_parts)[index] = ddelta_bias;
  }
  if (params.initial_state.present()) row.store_state(params, params.dinitial_state, carry);
}

}  // namespace matrix

cudaError_t scan_backward(const MatrixBackwardParams& params, const ScratchMemory& memory,
                          cudaStream_t stream) {
  const auto bytes = matrix::WorkspaceLayout(params, true, nullptr).bytes;
  const auto workspace = matrix::WorkspaceLayout(params, true, memory(bytes)).workspace;
  MatrixForwardParams inputs(params);
  inputs.A_column = params.A_column;
  cudaError_t error = matrix::reduce(inputs, workspace, stream);
  if (error != cudaSuccess) return error;
  error = matrix::with_types(params, [&](auto* type, auto own) {
    using T = std::remove_pointer_t<decltype(type)>;
    LaunchShape shape;
    shape.blocks = params.batch * params.dim;
    shape.threads = kWarpSize;
    shape.shared_bytes =
        static_cast<int>(3 * matrix::matrix_values(static_cast<int>(params.dstate)) * sizeof(T));
    return launch_kernel(matrix::backward_kernel<T, own>, shape, stream, params, workspace);
  });
  return error == cudaSuccess ? matrix::finish(params, workspace, stream) : error;
}

}  // namespace selective_scan::cuda
