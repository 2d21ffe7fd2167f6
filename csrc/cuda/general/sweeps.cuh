// The sweeps of the backward scan through one chunk, and what they leave behind. backward.cuh
// explains the whole.
#pragma once

#include "../kit/update_gradient.cuh"
#include "scan.cuh"

namespace selective_scan::cuda::general {

/// What a lane sums up over all steps.
template <class T, int kStates>
struct LaneGradients {
  Pack<T, kStates> dA{};
  Pack<T, kStates> dB{};  // of a constant B
  Pack<T, kStates> dC{};
  real_t<T> dD = 0;
  real_t<T> ddelta_bias = 0;
};

/// Shared memory of one warp, and what of it is a lane's own.
template <class T, int kStates>
struct BackwardRows {
  using R = real_t<T>;
  R* delta;  // rows of the lane's warp: [channel][step]
  R* u;
  R* dy;
  R* dz_factor;
  R* D;  // [channel]
  R* delta_bias;
  T* checkpoints;  // this lane's: blocks are kWarpSize · kStates apart
  T* products;
  T* sums;
  int row;       // of the lane's channel
  int part_row;  // the lane's slot among the products: [channel][part]

  __device__ __forceinline__ BackwardRows(char* shared, const SharedLayout& layout,
                                          const Geometry& geometry, const ThreadRole& role) {
    delta = reinterpret_cast<R*>(shared);
    u = delta + layout.row_set;
    dy = u + layout.row_set;
    dz_factor = dy + layout.row_set;
    D = reinterpret_cast<R*>(shared + layout.channels);
    delta_bias = D + geometry.warp_channels();
    checkpoints = reinterpret_cast<T*>(shared + layout.checkpoints) + role.lane * kStates;
    products = reinterpret_cast<T*>(shared + layout.products);
    sums = reinterpret_cast<T*>(shared + layout.sums);
    row = role.in_warp.channel * kRowStride;
    part_row = role.in_warp.channel * geometry.lanes() + role.in_warp.part;
  }
};

/// Runs the states through `blocks` blocks, keeping the state before each: block i's at
/// checkpoints[first_block + i], except that of the chunk's first block.
template <Method kMethod, class T, int kStates>
__device__ __forceinline__ void sweep_forward(const BackwardRows<T, kStates>& rows,
                                              ProjectionRows B_rows, int first_block, int blocks,
                                              const Pole<T> (&poles)[kStates],
                                              Pack<T, kStates>& h) {
  using R = real_t<T>;
  for (int block = first_block; block < first_block + blocks; ++block) {
    if (block > 0) store_pack(rows.checkpoints + (block - 1) * kWarpSize * kStates, h);
    const int t = rows.row + block * kBlockSteps;
    const auto delta = load_pack<R, kBlockSteps>(rows.delta + t);
    const auto u = load_pack<R, kBlockSteps>(rows.u + t);
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      const auto B = B_rows.load<T, kStates>(j);
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const auto value = coefficients<kMethod>(delta.v[j], poles[s]);
        h.v[s] = value.abar * h.v[s] + held_input<kMethod>(delta.v[j], u.v[j], value) * B.v[s];
      }
    }
    B_rows.advance(kBlockSteps);
  }
}

/// The gradient's way back through a segment without anything else, for its summary: `factor`
/// collects the product of conj(abar), `carry` starts from zero.
template <Method kMethod, class T, int kStates>
__device__ __forceinline__ void summarize_backward(const BackwardRows<T, kStates>& rows,
                                                   ProjectionRows C_rows, int first_block,
                                                   int blocks, const Pole<T> (&poles)[kStates],
                                                   Pack<T, kStates>& carry,
                                                   Pack<T, kStates>& factor) {
  using R = real_t<T>;
  C_rows.advance(blocks * kBlockSteps);
  for (int block = first_block + blocks - 1; block >= first_block; --block) {
    C_rows.advance(-kBlockSteps);
    const int t = rows.row + block * kBlockSteps;
    const auto delta = load_pack<R, kBlockSteps>(rows.delta + t);
    const auto dy = load_pack<R, kBlockSteps>(rows.dy + t);
#pragma unroll
    for (int j = kBlockSteps - 1; j >= 0; --j) {
      const auto C = C_rows.load<T, kStates>(j);
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const T abar = conj(coefficients<kMethod>(delta.v[j], poles[s]).abar);
        carry.v[s] = (carry.v[s] + (R(kOutputScale<T>) * dy.v[j]) * conj(C.v[s])) * abar;
        factor.v[s] = abar * factor.v[s];
      }
    }
  }
}

/// Sums du, dΔ and y of a block of steps over the lanes of each channel and puts du, ddelta and y +
/// D·u in place of dy, Δ and u. What has a term of its own beside the sum over states takes it from
/// the first warp of the channel.
template <int kHeld, class T, int kStates, class R = real_t<T>>
__device__ __forceinline__ void finish_block(const BackwardParams& params, const Geometry& geometry,
                                             const ThreadRole& role,
                                             const BackwardRows<T, kStates>& rows, int t,
                                             const Pack<R, kBlockSteps>& du_parts,
                                             const Pack<R, kBlockSteps>& ddelta_parts,
                                             const Pack<R, kBlockSteps>& y_parts, int steps,
                                             LaneGradients<T, kStates>& gradients) {
  const int part = role.in_warp.part;
  const int at = t + held_step<kHeld>(part);
  auto du = sum_over_parts<kHeld>(du_parts, part, geometry.lane_bits);
  auto ddelta = sum_over_parts<kHeld>(ddelta_parts, part, geometry.lane_bits);
  Pack<R, kHeld> y{};
  if (params.z.present()) y = sum_over_parts<kHeld>(y_parts, part, geometry.lane_bits);
  const bool first_warp = role.state_warp == 0;
  const R skip = first_warp ? rows.D[role.in_warp.channel] : R(0);
  const auto delta = load_pack<R, kHeld>(rows.delta + at);
  const auto u = load_pack<R, kHeld>(rows.u + at);
  const auto dy = load_pack<R, kHeld>(rows.dy + at);
  R dD = 0;
  R ddelta_bias = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    du.v[i] += skip * dy.v[i];
    if (params.delta_softplus) ddelta.v[i] *= softplus_slope_from(delta.v[i]);
    y.v[i] = R(kOutputScale<T>) * y.v[i] + skip * u.v[i];
    dD += dy.v[i] * u.v[i];
    if (at + i < rows.row + steps) ddelta_bias += ddelta.v[i];
  }
  __syncwarp();  // where more than four lanes share a channel, several read a
                 // step
  if (!holds_sums(part)) return;
  if (first_warp) gradients.dD += dD;
  gradients.ddelta_bias += ddelta_bias;
  store_pack(rows.dy + at, du);
  store_pack(rows.delta + at, ddelta);
  if (params.z.present()) store_pack(rows.u + at, y);
}

/// One block of steps: its states again, then backwards through them. `carry` is the gradient of
/// the state behind the block on entry and of the state before it on return.
template <Method kMethod, class T, int kStates>
__device__ __forceinline__ void sweep_block_backward(
    const BackwardParams& params, const Geometry& geometry, const ThreadRole& role,
    const BackwardRows<T, kStates>& rows, ProjectionRows B_rows, ProjectionRows C_rows, int block,
    int steps, const Pack<T, kStates>& h_before, const Pole<T> (&poles)[kStates],
    Pack<T, kStates>& carry, LaneGradients<T, kStates>& gradients) {
  using R = real_t<T>;
  const int t = rows.row + block * kBlockSteps;
  const auto delta = load_pack<R, kBlockSteps>(rows.delta + t);
  const auto u = load_pack<R, kBlockSteps>(rows.u + t);
  const auto dy = load_pack<R, kBlockSteps>(rows.dy + t);

  Pack<T, kStates> h[kBlockSteps + 1];
  h[0] = h_before;
  Coefficients<T> values[kBlockSteps][kStates];
#pragma unroll
  for (int j = 0; j < kBlockSteps; ++j) {
    const auto B = B_rows.load<T, kStates>(j);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const auto& value = values[j][s] = coefficients<kMethod>(delta.v[j], poles[s]);
      h[j + 1].v[s] =
          value.abar * h[j].v[s] + held_input<kMethod>(delta.v[j], u.v[j], value) * B.v[s];
    }
  }

  Pack<R, kBlockSteps> du, ddelta, y;
#pragma unroll
  for (int j = kBlockSteps - 1; j >= 0; --j) {
    const auto B = B_rows.load<T, kStates>(j);
    const auto C = C_rows.load<T, kStates>(j);
    const R scaled_dy = R(kOutputScale<T>) * dy.v[j];
    Pack<T, kStates> dB, dC;
    du.v[j] = ddelta.v[j] = y.v[j] = 0;
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const T g = carry.v[s] + scaled_dy * conj(C.v[s]);
      const auto update = backpropagate_update<kMethod>(delta.v[j], u.v[j], poles[s], values[j][s],
                                                        B.v[s], h[j].v[s], g);
      carry.v[s] = update.carry;
      gradients.dA.v[s] += update.dA;
      du.v[j] += update.du;
      ddelta.v[j] += update.ddelta;
      dB.v[s] = update.dB;
      dC.v[s] = scaled_dy * conj(h[j + 1].v[s]);
      y.v[j] += real_of_product(C.v[s], h[j + 1].v[s]);
    }
    if (params.variable_B || params.variable_C) {
      store_pack(rows.products + ((2 * j) * kProductRow + rows.part_row) * kStates, dB);
      store_pack(rows.products + ((2 * j + 1) * kProductRow + rows.part_row) * kStates, dC);
    }
    if (!params.variable_B || !params.variable_C) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        gradients.dB.v[s] += dB.v[s];
        gradients.dC.v[s] += dC.v[s];
      }
    }
  }
  __syncwarp();  // the products are there, and every lane has read the rows of
                 // these steps
  with_held_steps(geometry.lane_bits, [&]<int kHeld>() {
    finish_block<kHeld>(params, geometry, role, rows, t, du, ddelta, y, steps, gradients);
  });
}

/// Adds a block's products over the warp's channels: sums[step][dB | dC][part][state].
template <class T, int kStates>
__device__ __forceinline__ void sum_products(const Geometry& geometry,
                                             const BackwardRows<T, kStates>& rows, int lane,
                                             T* sums) {
  const int parts = geometry.lanes();
  const int channel_stride = parts * kStates;
  for (int i = lane; i < 2 * kBlockSteps * parts; i += kWarpSize) {
    const T* product =
        rows.products + ((i >> geometry.lane_bits) * kProductRow + (i & (parts - 1))) * kStates;
    Pack<T, kStates> sum{};
#pragma unroll 4
    for (int c = 0; c < geometry.warp_channels(); ++c) {
      const auto other = load_pack<T, kStates>(product);
      product += channel_stride;
#pragma unroll
      for (int s = 0; s < kStates; ++s) sum.v[s] += other.v[s];
    }
    store_pack(sums + i * kStates, sum);
  }
}

}  // namespace selective_scan::cuda::general
