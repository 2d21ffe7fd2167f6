// The forward scan with full state matrices on the GPU.
//
// A block has one channel of one batch entry and walks through its steps as a pipeline of three
// warps, each at another position. The factors of a step, and B and C in the basis, depend on no
// state and are ready when the state reaches the step. Bound by the chain of eliminations and
// substitutions that the state goes through.
#include "../launch.h"
#include "basis.h"
#include "row.cuh"

namespace selective_scan::cuda {
namespace matrix {

template <class T, int kOwn>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ MatrixForwardParams params, Workspace workspace) {
  using R = real_t<T>;
  using Vector = Entries<T, kOwn>;
  extern __shared__ __align__(16) char memory[];
  const int warp = warp_index();
  const Row<T, kOwn> row(params, workspace, blockIdx.x);
  const Shared<T> shared(memory, row.order);
  const System<T, kOwn> system(row.order, shared.H);
  row.copy_H(warp, shared.H);

  // Each of these functions runs on one warp.
  const auto project = [&](int64_t t) {
    const auto step_of = [&](int s) { return t + s; };
    row.store_group(shared.B, t, row.template B_in_basis<kGroup>(params, step_of));
    row.store_group(shared.C, t, row.template C_in_basis<kGroup>(params, step_of));
  };
  // For this lane's step in the warp's current chunk. In warp 0, u is multiplied by the input's
  // step.
  R delta = R(0), u = R(0), y = R(0);
  Vector h = row.load_state(params.initial_state);
  const auto advance = [&](int64_t t, int in_chunk) {
    const Vector B = row.load_values(row.at_position(shared.B, t, kRing));
    const Vector input = moved(Vector{}, shuffle(u, in_chunk), B);
    h = system.step(shuffle(delta, in_chunk), h, input, shared.factors_at(t)).after;
    row.store_values(row.at_position(shared.states, t, 2), h);
    if (params.states && in_chunk == kChunk - 1 && t + 1 < params.seqlen) {
      row.store_values(row.saved(params, t / kChunk), h);
    }
  };
  const auto output = [&](int64_t t, int in_chunk) {
    const R sum = real_product(row.load_values(row.at_position(shared.C, t, kRing)),
                               row.load_values(row.at_position(shared.states, t, 2)));
    if (lane_index() == in_chunk) y = sum;
    if (in_chunk < kChunk - 1 && t + 1 < params.seqlen) return;
    const int64_t first = t - in_chunk;
    R out = R(kOutputScale<T>) * y;
    out += load_real<R>(params.D, row.channel * params.D.channel) * u;
    if (params.z.present()) out *= silu<DeviceMath>(row.load_steps(params.z, first));
    row.store_steps(params.out, first, out);
  };

  const bool has_variable = params.variable_B || params.variable_C;
  const int lag = warp == 1 ? 0 : warp == 0 ? 1 : 2;
  __syncthreads();
  for (int64_t position = 0; position < params.seqlen + 2; ++position) {
    const bool is_needed = position < (has_variable ? params.seqlen : kRing);
    if (warp == 2 && position % kGroup == 0 && is_needed) project(position);
    const int64_t t = position - lag;
    if (t >= 0 && t < params.seqlen) {
      const int in_chunk = static_cast<int>(t % kChunk);
      if (in_chunk == 0) {
        delta = row.load_delta(params, t);
        u = row.load_steps(params.u, t);
        if (warp == 0) u *= row.load_input_delta(params, t, delta);
      }
      if (warp == 0) {
        advance(t, in_chunk);
      } else if (warp == 1) {
        system.factor(R(0.5) * shuffle(delta, in_chunk), shared.factors_at(t));
      } else if (params.wanted == ForwardWanted::kOutput) {
        output(t, in_chunk);
      }
    }
    __syncthreads();
  }
  if (warp == 0 && params.last_state.present()) row.store_state(params.last_state, h);
}

}  // namespace matrix

cudaError_t launch(const MatrixForwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream) {
  const matrix::WorkspaceLayout layout(params);
  const matrix::Workspace workspace = layout.in(memory(layout.bytes));
  const cudaError_t error = matrix::reduce(params, workspace, stream);
  if (error != cudaSuccess) return error;
  return matrix::with_types(params, [&]<class T>(T*, auto own) {
    return launch_kernel(matrix::forward_kernel<T, own>, matrix::shape_of_rows<T>(params), stream,
                         params, workspace);
  });
}

}  // namespace selective_scan::cuda
