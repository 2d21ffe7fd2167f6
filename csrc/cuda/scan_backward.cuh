// The backward scan.
//
// Mapping: geometry.cuh. A block walks its tile of channels backwards through time, chunk by chunk.
// From the state saved before a chunk every lane sweeps forward, keeping the state before each
// block of kBlockSteps steps; then, last block first, it computes the block's states again in
// registers and sweeps backwards through them with the gradient g of the state:
//
//   g[t] = conj(abar[t+1])·g[t+1] + conj(C[t])·dy[t]            dC[t] = conj(h[t])·dy[t]
//   and from w = g·conj(B): du, dΔ, dA; from g: dB and, through h[t-1], dΔ and dA again.
//
// Shared memory: shared_layout.h. du, dΔ and y are summed over the lanes of a channel with
// shuffles. dB and dC are sums over channels: each lane leaves its products of a block of steps in
// shared memory, the warp adds those of its channels, every sum_steps steps the block adds those of
// its warps and writes one partial sum per tile. reduce_gradients() adds the tiles, and for the
// gradients without steps the batches. Every sum has a fixed order.
//
// Bound by: issue slots (about two thirds of the instructions) and shared-memory bandwidth.
#pragma once

#include "scan.h"
#include "scan_common.cuh"

namespace selective_scan::cuda {

struct BackwardArgs {
  BackwardParams params;
  Geometry geometry;
  SharedLayout layout;
  BackwardWorkspace workspace;
};

/// What a lane sums up over all steps.
template <class T, int kStates>
struct LaneGradients {
  Pack<T, kStates> dA{};
  Pack<T, kStates> dB{};  // of a constant B
  Pack<T, kStates> dC{};
  real_t<T> dD = 0;
  real_t<T> ddelta_bias = 0;
};

/// Gradients of one update h = abar·h_before + bbar·B·u, given the gradient g of h.
template <class T>
struct UpdateGradient {
  T carry;  // of h_before
  T dA;
  T dB;
  real_t<T> ddelta;
  real_t<T> du;
};

template <Method kMethod, class T>
__device__ __forceinline__ UpdateGradient<T> backpropagate_update(
    real_t<T> delta, real_t<T> u, const Pole<T>& pole, const Coefficients<T>& value, T B,
    T h_before, T g) {
  using F = Formula<kMethod>;
  UpdateGradient<T> result;
  const T w = g * conj(B);  // dbbar = w·u
  result.carry = g * conj(value.abar);
  if constexpr (F::kAbarIsExponential) {
    // dabar/dΔ = A·abar and dabar/dA = Δ·abar share the factor that the carry has already.
    const T q = result.carry * conj(h_before);
    result.ddelta = real_of_product_conj(q, pole.A);
    result.dA = delta * q;
    if constexpr (F::kBbarDependsOnA) {
      const auto d = F::template derivatives<DeviceMath>(delta, pole, value);
      result.ddelta += u * real_of_product_conj(w, d.bbar_delta);
      result.dA += u * (w * conj(d.bbar_A));
    } else {
      result.ddelta += u * real(w);
    }
  } else {
    const auto d =
        backpropagate<kMethod, DeviceMath>(delta, pole, value, g * conj(h_before), u * w);
    result.ddelta = d.delta;
    result.dA = d.A;
  }
  if constexpr (F::kBbarDependsOnA) {
    result.du = real_of_product_conj(w, value.bbar);
    result.dB = u * (g * conj(value.bbar));
  } else {
    result.du = delta * real(w);
    result.dB = (delta * u) * g;
  }
  return result;
}

/// Adds values[j] over the lanes that share a channel and leaves the sum in row[j]. Halving the
/// values while doubling the lanes takes 3 shuffles for 4 values over 4 lanes.
template <class R>
__device__ __forceinline__ void sum_over_parts(const Pack<R, kBlockSteps>& values, int part,
                                               int lane_bits, R* row) {
  static_assert(kBlockSteps == 4);
  if (lane_bits == 0) {
    store_pack(row, values);
    return;
  }
  const bool upper = part & 1;
  Pack<R, 2> half;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const R keep = upper ? values.v[2 + j] : values.v[j];
    const R give = upper ? values.v[j] : values.v[2 + j];
    half.v[j] = keep + __shfl_xor_sync(kFullMask, give, part_bit_mask(0, lane_bits));
  }
  if (lane_bits == 1) {
    store_pack(row + 2 * (part & 1), half);
    return;
  }
  const bool odd = part & 2;
  const R give = odd ? half.v[0] : half.v[1];
  R sum = odd ? half.v[1] : half.v[0];
  sum += __shfl_xor_sync(kFullMask, give, part_bit_mask(1, lane_bits));
  for (int bit = 2; bit < lane_bits; ++bit) {
    sum += __shfl_xor_sync(kFullMask, sum, part_bit_mask(bit, lane_bits));
  }
  if (part < 4) row[2 * (part & 1) + (part >> 1)] = sum;
}

/// Shared memory of one warp, and what of it is a lane's own.
template <class T, int kStates>
struct BackwardRows {
  using R = real_t<T>;
  R* delta;  // rows of the lane's warp: [channel][step]
  R* u;
  R* dy;
  R* dz_factor;
  R* du;
  R* ddelta;
  R* y;
  T* checkpoints;  // this lane's: blocks are kWarpSize · kStates apart
  T* products;
  T* sums;
  int row;       // of the lane's channel
  int part_row;  // the lane's slot among the products: [channel][part]

  __device__ BackwardRows(char* shared, const SharedLayout& layout, const Geometry& geometry,
                          const ThreadRole& role) {
    delta = reinterpret_cast<R*>(shared);
    u = delta + layout.row_set;
    dy = u + layout.row_set;
    dz_factor = dy + layout.row_set;
    du = dz_factor + layout.row_set;
    ddelta = du + layout.row_set;
    y = ddelta + layout.row_set;
    checkpoints = reinterpret_cast<T*>(shared + layout.checkpoints) + role.lane * kStates;
    products = reinterpret_cast<T*>(shared + layout.products);
    sums = reinterpret_cast<T*>(shared + layout.sums);
    row = role.in_warp.channel * kRowStride;
    part_row = role.in_warp.channel * geometry.lanes() + role.in_warp.part;
  }
};

/// Loads Δ, u, and from dout and z what multiplies: dy = dout·silu(z), dz = (y + D·u)·dz_factor.
template <class T, int kStates>
__device__ void stage_chunk(const BackwardParams& params, const WorkItem& item,
                            const WarpTile& tile, const BackwardRows<T, kStates>& rows) {
  using R = real_t<T>;
  stage_inputs(params, item, tile, rows.delta, rows.u);
  const auto at = [](WarpTile::Element e) { return e.channel * kRowStride + e.step; };
  if (!params.dout.present()) {
    for (int i = 0; i < tile.visits(); ++i) {
      rows.dy[at(tile.element(i))] = 0;
      rows.dz_factor[at(tile.element(i))] = 0;
    }
    return;
  }
  if (params.z.present()) {
    load_rows<R>(Window(params.z, item), tile,
                 [&](WarpTile::Element e, R z) { rows.dz_factor[at(e)] = z; });
  }
  load_rows<R>(Window(params.dout, item), tile, [&](WarpTile::Element e, R dout) {
    if (params.z.present()) {
      const R z = rows.dz_factor[at(e)];
      const R s = sigmoid<DeviceMath>(z);
      rows.dz_factor[at(e)] = dout * silu_derivative(z, s);
      dout *= z * s;
    }
    rows.dy[at(e)] = dout;
  });
}

/// Keeps the state before each block of steps, the first block's being h itself.
template <Method kMethod, class T, int kStates>
__device__ void sweep_forward(const BackwardRows<T, kStates>& rows, const ProjectionRows<T>& B_rows,
                              int blocks, const Pole<T> (&poles)[kStates], Pack<T, kStates> h) {
  using R = real_t<T>;
  store_pack(rows.checkpoints, h);
  const T* B_row = B_rows.first;
  for (int block = 0; block + 1 < blocks; ++block) {
    const int t = rows.row + block * kBlockSteps;
    const auto delta = load_pack<R, kBlockSteps>(rows.delta + t);
    const auto u = load_pack<R, kBlockSteps>(rows.u + t);
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      const auto B = load_pack<T, kStates>(B_row);
      B_row += B_rows.stride;
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const auto value = coefficients<kMethod>(delta.v[j], poles[s]);
        h.v[s] = value.abar * h.v[s] + held_input<kMethod>(delta.v[j], u.v[j], value) * B.v[s];
      }
    }
    store_pack(rows.checkpoints + (block + 1) * kWarpSize * kStates, h);
  }
}

/// One block of steps: its states again, then backwards through them. `carry` is the gradient of
/// the state behind the block on entry and of the state before it on return.
template <Method kMethod, class T, int kStates>
__device__ __forceinline__ void sweep_block_backward(
    const BackwardParams& params, const Geometry& geometry, const ThreadRole& role,
    const BackwardRows<T, kStates>& rows, const ProjectionRows<T>& B_rows,
    const ProjectionRows<T>& C_rows, int block, const Pole<T> (&poles)[kStates],
    Pack<T, kStates>& carry, LaneGradients<T, kStates>& gradients) {
  using R = real_t<T>;
  constexpr bool kKeepBbar = Formula<kMethod>::kBbarDependsOnA;
  const int t = rows.row + block * kBlockSteps;
  const auto delta = load_pack<R, kBlockSteps>(rows.delta + t);
  const auto u = load_pack<R, kBlockSteps>(rows.u + t);
  const auto dy = load_pack<R, kBlockSteps>(rows.dy + t);
  const T* B_block = B_rows.first + block * kBlockSteps * B_rows.stride;
  const T* C_block = C_rows.first + block * kBlockSteps * C_rows.stride;

  Pack<T, kStates> h[kBlockSteps + 1];
  Coefficients<T> values[kBlockSteps][kStates];
  h[0] = load_pack<T, kStates>(rows.checkpoints + block * kWarpSize * kStates);
#pragma unroll
  for (int j = 0; j < kBlockSteps; ++j) {
    const auto B = load_pack<T, kStates>(B_block + j * B_rows.stride);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const auto value = coefficients<kMethod>(delta.v[j], poles[s]);
      h[j + 1].v[s] =
          value.abar * h[j].v[s] + held_input<kMethod>(delta.v[j], u.v[j], value) * B.v[s];
      values[j][s].abar = value.abar;
      if constexpr (kKeepBbar) values[j][s].bbar = value.bbar;
    }
  }

  Pack<R, kBlockSteps> du, ddelta, y;
#pragma unroll
  for (int j = kBlockSteps - 1; j >= 0; --j) {
    const auto B = load_pack<T, kStates>(B_block + j * B_rows.stride);
    const auto C = load_pack<T, kStates>(C_block + j * C_rows.stride);
    const R scaled_dy = R(kOutputScale<T>)*dy.v[j];
    Pack<T, kStates> dB, dC;
    du.v[j] = ddelta.v[j] = y.v[j] = 0;
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const T g = carry.v[s] + scaled_dy * conj(C.v[s]);
      const auto update = backpropagate_update<kMethod>(delta.v[j], u.v[j], poles[s],
                                                        values[j][s], B.v[s], h[j].v[s], g);
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
  sum_over_parts(du, role.in_warp.part, geometry.lane_bits, rows.du + t);
  sum_over_parts(ddelta, role.in_warp.part, geometry.lane_bits, rows.ddelta + t);
  if (params.z.present()) {
    sum_over_parts(y, role.in_warp.part, geometry.lane_bits, rows.y + t);
  }
}

/// Adds a block's products over the warp's channels: sums[step][dB | dC][part][state].
template <class T, int kStates>
__device__ void sum_products(const Geometry& geometry, const BackwardRows<T, kStates>& rows,
                             int lane, T* sums) {
  const int parts = geometry.lanes();
  for (int i = lane; i < 2 * kBlockSteps * parts; i += kWarpSize) {
    const T* first = rows.products + ((i >> geometry.lane_bits) * kProductRow +
                                      (i & (parts - 1))) * kStates;
    auto sum = load_pack<T, kStates>(first);
#pragma unroll 4
    for (int c = 1; c < geometry.warp_channels(); ++c) {
      const auto other = load_pack<T, kStates>(first + c * parts * kStates);
#pragma unroll
      for (int s = 0; s < kStates; ++s) sum.v[s] += other.v[s];
    }
    store_pack(sums + i * kStates, sum);
  }
}

/// Adds sums[step][dB | dC][state of the warp] over the block's warps, in their order, and writes
/// the steps from `first_step` on of the tile's partial sums.
template <class T, int kStates>
__device__ void write_sums(const BackwardArgs& args, const WorkItem& item, const char* shared,
                           int64_t first_step, int steps) {
  const Geometry& geometry = args.geometry;
  const ScanParams& params = args.params;
  const int parts = geometry.lanes();
  const int padded_states = geometry.padded_states<kStates>();
  const int64_t row =
      ((item.tile * params.batch + item.batch) * params.groups + item.group) * params.seqlen +
      first_step;
  T* target = static_cast<T*>(args.workspace.projections) + row * 2 * padded_states;
  const int all_parts = geometry.state_warps * parts;
  for (int i = threadIdx.x; i < steps * 2 * all_parts; i += blockDim.x) {
    const int part = i % all_parts;
    const int step_and_kind = i / all_parts;
    const int offset = (step_and_kind * parts + part % parts) * kStates;
    Pack<T, kStates> sum{};
    for (int w = 0; w < geometry.channel_warps; ++w) {
      const int warp = w * geometry.state_warps + part / parts;
      const T* sums = reinterpret_cast<const T*>(shared + args.layout.warps +
                                                 warp * args.layout.warp_bytes + args.layout.sums);
      const auto other = load_pack<T, kStates>(sums + offset);
#pragma unroll
      for (int s = 0; s < kStates; ++s) sum.v[s] += other.v[s];
    }
    store_pack(target + static_cast<int64_t>(i) * kStates, sum);
  }
}

/// du, ddelta and dz of one warp's channels. Adds the chunk to this lane's share of dD and
/// ddelta_bias.
template <class T, int kStates>
__device__ void finish_chunk(const BackwardArgs& args, const WorkItem& item, const WarpTile& tile,
                             const ThreadRole& role, const BackwardRows<T, kStates>& rows,
                             LaneGradients<T, kStates>& gradients) {
  using R = real_t<T>;
  const BackwardParams& params = args.params;
  const int state_warps = args.geometry.state_warps;
  const int next_warp = args.layout.warp_bytes / static_cast<int>(sizeof(R));
  const int64_t first_channel = item.first_channel + tile.first_channel;
  const auto at = [](WarpTile::Element e) { return e.channel * kRowStride + e.step; };
  const auto sum_of = [&](const R* row, WarpTile::Element e) {
    R sum = row[at(e)];
    for (int w = 1; w < state_warps; ++w) sum += row[at(e) + w * next_warp];
    return sum;
  };
  const auto D_of = [&](WarpTile::Element e) {
    if (!params.D.present()) return R(0);
    return load_component<R>(params.D, (first_channel + e.channel) * params.D.channel);
  };

  store_rows<R>(Window(params.du, item), tile, [&](WarpTile::Element e) {
    return sum_of(rows.du, e) + D_of(e) * rows.dy[at(e)];
  });
  if (params.z.present()) {
    store_rows<R>(Window(params.dz, item), tile, [&](WarpTile::Element e) {
      const R y = kOutputScale<T> * sum_of(rows.y, e) + D_of(e) * rows.u[at(e)];
      return rows.dz_factor[at(e)] * y;
    });
  }
  store_rows<R>(Window(params.ddelta, item), tile, [&](WarpTile::Element e) {
    R ddelta = sum_of(rows.ddelta, e);
    if (params.delta_softplus) {
      // The derivative of softplus at x is 1 − exp(−softplus(x)).
      const R delta = rows.delta[at(e)];
      if (!(delta > R(kSoftplusThreshold))) ddelta *= -DeviceMath::expm1(-delta);
    }
    rows.ddelta[at(e)] = ddelta;
    return ddelta;
  });
  __syncwarp();
  const int share = kChunk / args.geometry.lanes();
  const int begin = role.in_warp.part * share;
  const int end = begin + share < tile.steps ? begin + share : tile.steps;
  if (role.in_warp.channel < tile.channels) {
    for (int t = begin; t < end; ++t) {
      gradients.dD += rows.dy[rows.row + t] * rows.u[rows.row + t];
      gradients.ddelta_bias += rows.ddelta[rows.row + t];
    }
  }
}

/// Writes what a lane has summed up over the steps of one (batch, channel).
template <class T, int kStates>
__device__ void write_lane_gradients(const BackwardArgs& args, const WorkItem& item,
                                     const ThreadRole& role, int64_t channel, bool exists,
                                     LaneGradients<T, kStates> gradients) {
  using R = real_t<T>;
  const BackwardParams& params = args.params;
  const BackwardWorkspace& workspace = args.workspace;
  for (int bit = 0; bit < args.geometry.lane_bits; ++bit) {
    const int mask = part_bit_mask(bit, args.geometry.lane_bits);
    gradients.dD += __shfl_xor_sync(kFullMask, gradients.dD, mask);
    gradients.ddelta_bias += __shfl_xor_sync(kFullMask, gradients.ddelta_bias, mask);
  }
  if (!exists) return;
  const int64_t row = item.batch * params.dim + channel;
  const int64_t at = row * args.geometry.padded_states<kStates>() + role.first_state;
  const auto store = [&](void* array, const Pack<T, kStates>& states) {
    if (array != nullptr) store_pack(static_cast<T*>(array) + at, states);
  };
  store(workspace.dA, gradients.dA);
  store(workspace.dB, gradients.dB);
  store(workspace.dC, gradients.dC);
  if (role.first_state == 0) {
    if (workspace.dD != nullptr) static_cast<R*>(workspace.dD)[row] = gradients.dD;
    if (workspace.ddelta_bias != nullptr) {
      static_cast<R*>(workspace.ddelta_bias)[row] = gradients.ddelta_bias;
    }
  }
}

template <class T, int kStates, Method kMethod>
__global__ void __launch_bounds__(kMaxThreads, 1)
    scan_backward_kernel(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(16) char shared[];
  const BackwardParams& params = args.params;
  const Geometry& geometry = args.geometry;
  const SharedLayout& layout = args.layout;
  const int padded_states = geometry.padded_states<kStates>();
  const ThreadRole role = thread_role<kStates>(geometry);
  const BackwardRows<T, kStates> rows(shared + layout.warps + role.warp * layout.warp_bytes,
                                      layout, geometry, role);
  const bool any_variable = params.variable_B || params.variable_C;

  for (int64_t index = blockIdx.x; index < geometry.work_items; index += gridDim.x) {
    const WorkItem item = work_item(params, geometry, index);
    const int64_t channel = item.first_channel + role.channel_in_tile;
    const bool exists = role.channel_in_tile < item.channels;
    const auto load_from = [&](const ArrayView& view) {
      if (!exists) return Pack<T, kStates>{};
      return load_states<T, kStates>(view, item.batch * view.batch + channel * view.channel,
                                     role.first_state, params.dstate);
    };
    Pole<T> poles[kStates];
    load_poles<T>(params, channel, exists, role.first_state, poles);
    const auto B_rows = projection_rows<T, kStates>(params, layout, shared, role, 0, channel,
                                                    exists, padded_states);
    const auto C_rows = projection_rows<T, kStates>(params, layout, shared, role, 1, channel,
                                                    exists, padded_states);
    LaneGradients<T, kStates> gradients;
    Pack<T, kStates> carry = load_from(params.dlast_state);

    const int64_t chunks = (item.steps + kChunk - 1) / kChunk;
    for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
      const int64_t first = chunk * kChunk;
      const WarpTile tile = warp_tile(params, geometry, item, role, first);
      const int blocks = (tile.steps + kBlockSteps - 1) / kBlockSteps;
      stage_projections<T>(params, item, layout, shared, first, tile.steps, padded_states);
      stage_chunk(params, item, tile, rows);
      Pack<T, kStates> h{};
      if (chunk == 0) {
        h = load_from(params.initial_state);
      } else if (exists) {
        const int64_t saved =
            (item.batch * num_saved_states(params.seqlen) + chunk - 1) * params.dim + channel;
        h = load_states<T, kStates>(static_cast<const T*>(params.states) + saved * params.dstate,
                                    role.first_state, params.dstate);
      }
      __syncthreads();
      sweep_forward<kMethod>(rows, B_rows, blocks, poles, h);
      for (int block = blocks - 1; block >= 0; --block) {
        sweep_block_backward<kMethod>(params, geometry, role, rows, B_rows, C_rows, block, poles,
                                      carry, gradients);
        if (!any_variable) continue;
        const int sum_step = block * kBlockSteps % layout.sum_steps;
        __syncwarp();
        sum_products(geometry, rows, role.lane,
                     rows.sums + sum_step * 2 * geometry.lanes() * kStates);
        __syncwarp();
        if (sum_step == 0) {
          __syncthreads();
          const int left = tile.steps - block * kBlockSteps;
          write_sums<T, kStates>(args, item, shared, first + block * kBlockSteps,
                                 left < layout.sum_steps ? left : layout.sum_steps);
          __syncthreads();
        }
      }
      sync_channel_warps(geometry);
      if (role.state_warp == 0) finish_chunk(args, item, tile, role, rows, gradients);
      __syncthreads();
    }

    if (exists && params.dinitial_state.present()) {
      const ArrayView& view = params.dinitial_state;
      store_states(view, item.batch * view.batch + channel * view.channel, role.first_state,
                   params.dstate, carry);
    }
    write_lane_gradients(args, item, role, channel, exists, gradients);
  }
}

template <class T, int kStates, Method kMethod>
cudaError_t Scan<T, kStates, kMethod>::backward(const BackwardParams& params,
                                                const Geometry& geometry,
                                                const BackwardWorkspace& workspace,
                                                cudaStream_t stream) {
  const auto kernel = scan_backward_kernel<T, kStates, kMethod>;
  const BackwardArgs args{
      params, geometry,
      backward_layout(params, geometry, kStates, sizeof(T), sizeof(real_t<T>)), workspace};
  const cudaError_t error = allow_shared_bytes(kernel, args.layout.bytes);
  if (error != cudaSuccess) return error;
  kernel<<<grid_blocks(geometry.work_items), geometry.threads(), args.layout.bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace selective_scan::cuda
