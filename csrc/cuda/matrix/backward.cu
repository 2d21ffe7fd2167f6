// The backward scan with full state matrices on the GPU; csrc/cpu/matrix/backward.h has the
// formulas.
//
// As in the forward pass, a block has one channel of one batch entry, and its warps are a pipeline.
// From the state saved before a chunk, the block repeats the chunk's steps and keeps the states
// after and in the middle of each. On the way back it factors each step again and keeps λ and
// H^H·λ. When all of these are complete, all warps add the chunk's terms to the gradients. If
// several blocks contribute to one gradient, each stores its part separately, and basis.cu sums the
// parts.
#include "../launch.h"
#include "basis.h"
#include "row.cuh"

namespace selective_scan::cuda {
namespace matrix {

template <class R>
struct StepSums {
  R y[kChunk];
  R through_H[kChunk];
  R through_gain[kChunk];
};

template <class T, int kOwn>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const __grid_constant__ MatrixBackwardParams params, Workspace workspace) {
  using R = real_t<T>;
  using Vector = Entries<T, kOwn>;
  constexpr int kUpdate = sizeof(T) > 8 ? 4 : 8;  // steps that are added to dH at once
  using Group = typename Row<T, kOwn>::template Vectors<kGroup>;
  extern __shared__ __align__(16) char memory[];
  const int warp = warp_index();
  __shared__ StepSums<R> sums;
  const int64_t index = blockIdx.x;
  const Row<T, kOwn> row(params, workspace, index);
  const int order = row.order;
  const Shared<T> shared(memory, order);
  const System<T, kOwn> system(order, shared.H);
  row.copy_H(warp, shared.H);
  T* const kept = static_cast<T*>(workspace.kept) + kKept * index * (kChunk + 1) * order;
  const auto states = [&](int t) { return kept + kKept * t * order; };  // before step t
  const auto middles = [&](int t) { return states(t) + order; };
  const auto lambdas = [&](int t) { return states(t) + 2 * order; };
  const auto products = [&](int t) { return states(t) + 3 * order; };
  T* const dH = static_cast<T*>(workspace.dH) + index * order * order;
  const BackwardWorkspace& parts = workspace.sums;
  const int padded = workspace.padded_states;
  const bool has_variable = params.variable_B || params.variable_C;
  const int64_t part_row =
      (row.tile(params) * params.batch + row.batch) * params.groups + row.group;
  const R D = load_real<R>(params.D, row.channel * params.D.channel);
  for (int r = warp; r < order; r += kWarps) {
    for_own<kOwn>(order, [&](int, int n) { dH[r * order + n] = T{}; });
  }
  Vector carry = row.load_state(params.dlast_state);
  Vector dB{}, dC{};  // of constant B and C, in the basis, from this warp's steps
  R dD = R(0), ddelta_bias = R(0);

  const int64_t chunks = ceil_div(params.seqlen, int64_t{kChunk});
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t first = chunk * kChunk;
    const int64_t left = params.seqlen - first;
    const int steps = left < kChunk ? static_cast<int>(left) : kChunk;
    const R delta = row.load_delta(params, first);
    const R u = row.load_steps(params.u, first), z = row.load_steps(params.z, first);
    const R gain = u * row.load_input_delta(params, first, delta);
    const R dout = row.load_steps(params.dout, first);
    const R gate = params.z.present() ? sigmoid<DeviceMath>(z) : R(1);
    const R dy = params.z.present() ? dout * (z * gate) : dout;
    const auto delta_at = [&](int t) { return shuffle(delta, t); };
    const auto scaled_dy_at = [&](int t) { return R(kOutputScale<T>) * shuffle(dy, t); };

    // --- forward through the chunk
    Vector h{};
    if (warp == 0) {
      h = chunk > 0 ? row.load_values(row.saved(params, chunk - 1))
                    : row.load_state(params.initial_state);
      row.store_values(states(0), h);
    }
    __syncthreads();
    for (int t = 0; t < steps + 1; ++t) {
      if (warp == 0 && t > 0) {
        const int now = t - 1;
        const Vector B = row.load_values(row.at_position(shared.B, now, kRing));
        const Vector input = moved(Vector{}, shuffle(gain, now), B);
        const auto step = system.step(delta_at(now), h, input, shared.factors_at(now));
        h = step.after;
        row.store_values(states(t), h);
        row.store_values(middles(now), step.middle);
      } else if (warp == 1 && t < steps) {
        system.factor(R(0.5) * delta_at(t), shared.factors_at(t));
      } else if (warp == 2 && t % kGroup == 0 && t < steps) {
        row.store_group(shared.B, t, row.template B_in_basis<kGroup>(params, [&](int s) {
          return first + t + s;
        }));
      }
      __syncthreads();
    }

    // --- backward through the chunk; position 0 is the last step
    for (int position = 0; position < steps + 1; ++position) {
      const int t = steps - 1 - position;
      if (warp == 0 && position > 0) {
        const int now = t + 1;
        const Vector C = row.load_values(row.at_position(shared.C, position - 1, kRing));
        const Vector g = moved(carry, scaled_dy_at(now), conjugate(C));
        const auto step = system.adjoint_step(delta_at(now), g, shared.factors_at(now));
        carry = step.after;
        row.store_values(lambdas(now), step.middle);
        row.store_values(products(now), step.product);
      } else if (warp == 1 && t >= 0) {
        system.factor(R(0.5) * delta_at(t), shared.factors_at(t));
      } else if (warp == 2 && position % kGroup == 0 && t >= 0) {
        row.store_group(shared.C, position, row.template C_in_basis<kGroup>(params, [&](int s) {
          return t >= s ? first + t - s : -1;
        }));
      }
      __syncthreads();
    }

    // --- the chunk's terms of dB, dC, du and dΔ, by groups of steps
    for (int start = warp * kGroup; start < steps; start += kWarps * kGroup) {
      const auto step_of = [&](int s) { return start + s < steps ? first + start + s : -1; };
      const Group B = row.template B_in_basis<kGroup>(params, step_of);
      Group C{};
      if (params.z.present()) C = row.template C_in_basis<kGroup>(params, step_of);
      Group dB_now{}, dC_now{};
#pragma unroll
      for (int s = 0; s < kGroup; ++s) {
        const int t = start + s;
        if (t >= steps) break;
        const Vector lambda = row.load_values(lambdas(t)), after = row.load_values(states(t + 1));
        const R gain_now = shuffle(gain, t);
        const R through_gain = real_inner_product(lambda, B.v[s]);
        const R through_H =
            real_inner_product(row.load_values(products(t)), row.load_values(middles(t)));
        const R y = params.z.present() ? real_product(C.v[s], after) : R(0);
        if (lane_index() == 0) {
          sums.y[t] = y;
          sums.through_H[t] = through_H;
          sums.through_gain[t] = through_gain;
        }
        dB_now.v[s] = moved(Vector{}, gain_now, lambda);
        dC_now.v[s] = moved(Vector{}, scaled_dy_at(t), after);
        if (!params.variable_B) dB = moved(dB, R(1), dB_now.v[s]);
        if (!params.variable_C) dC = moved(dC, R(1), dC_now.v[s]);
      }
      if (params.variable_B) dB_now = row.by_Q(dB_now);
      if (params.variable_C) dC_now = row.by_Q(dC_now);
#pragma unroll
      for (int s = 0; s < kGroup; ++s) {
        const int64_t step = first + start + s;
        if (start + s >= steps) break;
        if (has_variable) {
          T* const target =
              static_cast<T*>(parts.dBC_partials) + (part_row * params.seqlen + step) * 2 * padded;
          row.store_padded(target, padded, params.variable_B ? dB_now.v[s] : Vector{});
          row.store_padded(target + padded, padded,
                           params.variable_C ? conjugate(dC_now.v[s]) : Vector{});
        }
      }
    }

    // --- the chunk's terms of dH: Σ Δ·λ[t]·m[t]^H with the middle m[t]
    for (int start = 0; start < steps; start += kUpdate) {
      Vector scaled[kUpdate];
#pragma unroll
      for (int s = 0; s < kUpdate; ++s) {
        const int t = start + s < steps ? start + s : steps - 1;
        const R delta_now = start + s < steps ? delta_at(t) : R(0);
        scaled[s] = moved(Vector{}, delta_now, conjugate(row.load_values(middles(t))));
      }
      for (int r = warp; r < order; r += kWarps) {
        T factors[kUpdate];
#pragma unroll
        for (int s = 0; s < kUpdate; ++s) {
          factors[s] = lambdas(start + s < steps ? start + s : steps - 1)[r];
        }
        for_own<kOwn>(order, [&](int i, int n) {
          T sum = dH[r * order + n];
#pragma unroll
          for (int s = 0; s < kUpdate; ++s) {
            sum = multiply_add(factors[s], scaled[s].v[i], sum);
          }
          dH[r * order + n] = sum;
        });
      }
    }
    __syncthreads();

    if (warp == 0) {
      const int lane = lane_index();
      const bool has_step = lane < steps;
      const R raw = row.load_raw_delta(params, first);
      const R through_gain = has_step ? sums.through_gain[lane] : R(0);
      R ddelta = has_step ? sums.through_H[lane] : R(0);
      if (params.input_delta.present()) {
        row.store_steps(params.dinput_delta, first, u * through_gain);
      } else {
        ddelta += u * through_gain;
      }
      if (params.delta_softplus && raw <= R(kSoftplusThreshold)) ddelta *= sigmoid<DeviceMath>(raw);
      dD += dy * u;
      ddelta_bias += ddelta;
      if (params.z.present() && has_step) {
        const R out = R(kOutputScale<T>) * sums.y[lane] + D * u;
        row.store_steps(params.dz, first, dout * out * silu_derivative(z, gate));
      }
      const R input_delta = row.load_input_delta(params, first, delta);
      row.store_steps(params.du, first, D * dy + input_delta * through_gain);
      row.store_steps(params.ddelta, first, ddelta);
    }
    __syncthreads();  // the next chunk overwrites what this one has kept
  }

  // --- sums over all steps
  if (!params.variable_B) row.store_values(row.at_position(shared.B, warp, kRing), dB);
  if (!params.variable_C) row.store_values(row.at_position(shared.C, warp, kRing), dC);
  __syncthreads();
  if (warp > 0) return;
  const auto sum_of_warps = [&](T* of_warps) {
    Vector sum{};
    for (int warp_number = 0; warp_number < kWarps; ++warp_number) {
      sum = moved(sum, R(1), row.load_values(row.at_position(of_warps, warp_number, kRing)));
    }
    return row.by_Q(sum);
  };
  if (!params.variable_B) {
    row.store_values(static_cast<T*>(parts.dB) + index * padded, sum_of_warps(shared.B));
  }
  if (!params.variable_C) {
    row.store_values(static_cast<T*>(parts.dC) + index * padded, conjugate(sum_of_warps(shared.C)));
  }
  dD = sum_over_warp(dD);
  ddelta_bias = sum_over_warp(ddelta_bias);
  if (lane_index() == 0) {
    if (parts.dD != nullptr) static_cast<R*>(parts.dD)[index] = dD;
    if (parts.ddelta_bias != nullptr) static_cast<R*>(parts.ddelta_bias)[index] = ddelta_bias;
  }
  if (params.initial_state.present()) row.store_state(params.dinitial_state, carry);
}

}  // namespace matrix

cudaError_t launch(const MatrixBackwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream) {
  const matrix::WorkspaceLayout layout(params);
  const matrix::Workspace workspace = layout.in(memory(layout.bytes));
  const MatrixForwardParams inputs(params, params.A_column);
  cudaError_t error = matrix::reduce(inputs, workspace, stream);
  if (error != cudaSuccess) return error;
  error = matrix::with_types(params, [&](auto* type, auto own) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch_kernel(matrix::backward_kernel<T, own>, matrix::shape_of_rows<T>(params), stream,
                         params, workspace);
  });
  return error == cudaSuccess ? matrix::finish(params, workspace, stream) : error;
}

}  // namespace selective_scan::cuda
