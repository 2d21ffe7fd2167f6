// The relay's backward scan, for problems that are short too: chunks from the last to the first.
// Mapping: place.cuh.
//
// A chunk of kChunk steps begins with a saved state, so all that warps have to hand on is the
// gradient of the state that leaves the chunk before. A warp's turn: the states of all steps and
// their abar into registers; what the chunk does to the gradient that enters from behind it, x →
// factor·x + offset; hand-over; then back through the steps with everything at hand. Sums over the
// lanes of a channel are shuffles of four steps at a time; dB and dC are summed over the tile's two
// channels by one more and leave as a partial sum of the tile; add_gradients() adds the tiles in
// fixed order.
//
// Bound by: latency, with one or two chunks a warp.
#pragma once

#include "../kit/barriers.cuh"
#include "../kit/update_gradient.cuh"
#include "copies.cuh"

namespace selective_scan::cuda::relay {

template <class Storage>
__global__ void __launch_bounds__(kMaxRelayWarps* kWarpSize, 1)
    relay_backward_kernel(const __grid_constant__ RelayBackwardArgs args) {
  if constexpr (!kHasAsyncCopies) return;
  using S = Shape<1, kChunk>;
  using Layout = BackwardLayout<S, Storage::kMathSize>;
  using Items = typename Storage::template Items<S>;
  using Projection = typename Storage::template Projection<S>;
  constexpr int kItems = S::kItems;
  using Values = Pack<float, kItems>;
  const BackwardParams& params = args.params;
  char* const shared = shared_memory();
  const Place<S> place(args.geometry);
  const int lane = place.lane;
  const int warps = args.geometry.warps;
  const bool has_gate = params.z.present() && params.dout.present();

  BarrierState* const barriers = reinterpret_cast<BarrierState*>(shared);
  float* const handed = reinterpret_cast<float*>(shared + kMaxRelayWarps * sizeof(BarrierState));
  BlockSums& sums = *reinterpret_cast<BlockSums*>(handed + kMaxRelayWarps * kWarpSize);
  float* const own = reinterpret_cast<float*>(&sums + 1) + place.warp * Layout::kSize;
  if (lane == 0) SharedBarrier(barriers[place.warp]).initialize();

  const int64_t chunks = ceil_div(params.seqlen, kChunk);
  const auto origin = [&](int array) {
    return reinterpret_cast<char**>(own + Layout::kOrigins) + array * kWarpSize + lane;
  };
  const auto items = [&](const ArrayView& view, int slots, int array) {
    return Items(view, place, reinterpret_cast<char*>(own + slots + lane * kItems), origin(array));
  };
  const Items u = items(params.u, Layout::kRawU, 0);
  const Items delta = items(params.delta, Layout::kRawDelta, 1);
  const Items z = items(params.z, Layout::kRawZ, 2);
  const Items dout = items(params.dout, Layout::kRawDout, 3);
  const Items du = items(params.du, Layout::kRawU, 4);
  const Items ddelta = items(params.ddelta, Layout::kRawU, 5);
  const Items dz = items(params.dz, Layout::kRawU, 6);
  const Projection B(params.B, place, params.dstate, reinterpret_cast<char*>(own + Layout::kRawB),
                     origin(7));
  const Projection C(params.C, place, params.dstate, reinterpret_cast<char*>(own + Layout::kRawC),
                     origin(8));
  const auto chunk_at = [&](int64_t first_step) {
    const int64_t left = params.seqlen - first_step;
    return Chunk{first_step, static_cast<int>(left < kChunk ? left : kChunk)};
  };
  const auto has_items = [&](const Chunk& chunk) {
    return place.item_exists() && place.item_step() < chunk.steps;
  };
  const auto copy = [&](const Chunk& chunk) {
    const bool exists = has_items(chunk);
    u.copy(chunk, exists);
    delta.copy(chunk, exists);
    if (has_gate) z.copy(chunk, exists);
    if (params.dout.present()) dout.copy(chunk, exists);
    B.copy(chunk);
    C.copy(chunk);
    __pipeline_commit();
  };

  float dA = 0;
  float dD = 0;
  float ddelta_bias = 0;
  Chunk chunk = chunk_at((chunks - 1 - place.warp) * kChunk);
  if (chunk.first_step >= 0) copy(chunk);

  // While this is on its way:
  const float D = place.item_component(params.D);
  const float bias = place.item_component(params.delta_bias);
  Pole<float> poles[1];
  load_poles<float>(params, place.channel(), place.exists(), place.first_state(), poles);
  const Pole<float>& pole = poles[0];
  const int row = place.role.channel * S::kRow;
  const int item_at = place.item_channel() * S::kRow + place.item_step();
  const int part = place.role.part;
  const bool has_state = place.exists() && part < params.dstate;
  const float* const delta_row = own + Layout::kDelta + row;
  const float* const u_row = own + Layout::kInput + row;
  const float* const dy_row = own + Layout::kDy + row;
  const float* const B_row = own + Layout::kTile + part * S::kRow;
  const float* const C_row = B_row + kPaddedStates * S::kRow;
  __syncthreads();  // barriers are ready
  int parity = 0;
  while (chunk.first_step >= 0) {
    float state = 0;  // that enters the chunk
    if (has_state) {
      if (chunk.first_step > 0) {
        const int64_t saved =
            (place.batch * num_saved_states(params.seqlen) + chunk.first_step / kChunk - 1) *
                params.dim +
            place.channel();
        state = static_cast<const float*>(params.states)[saved * params.dstate + part];
      } else {
        state = load_component<float>(params.initial_state, place.state_base(params.initial_state) +
                                                                part * params.initial_state.state);
      }
    }
    __pipeline_wait_prior(0);
    __syncwarp();
    Values u_items = u.read();
    Values dy_items{};
    if (params.dout.present()) dy_items = dout.read();
    Values slope;        // of softplus
    Values dz_factor{};  // dz = dz_factor · (y + D·u)
    {
      Values delta_items = delta.read();
      Values z_items{};
      if (has_gate) z_items = z.read();
#pragma unroll
      for (float& value : delta_items.v) value += bias;
      make_steps<Storage::kMathSize>(delta_items.v, params.delta_softplus, slope.v);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        // A step that does not exist leaves the state as it is.
        if (place.item_step() + i >= chunk.steps) delta_items.v[i] = 0.0f;
        if (has_gate) {
          const float s = device_sigmoid(z_items.v[i]);
          dz_factor.v[i] = dy_items.v[i] * silu_derivative(z_items.v[i], s);
          dy_items.v[i] *= z_items.v[i] * s;
        }
      }
      store_pack(own + Layout::kDelta + item_at, delta_items);
      store_pack(own + Layout::kInput + item_at, u_items);
      store_pack(own + Layout::kDy + item_at, dy_items);
    }
    convert_projections<S, Storage>(B, C, lane, own + Layout::kTile);
    __syncwarp();
    const Chunk next_chunk = chunk_at(chunk.first_step - warps * kChunk);
    if (next_chunk.first_step >= 0) copy(next_chunk);

    float abar[kChunk];
    float h[kChunk];
    float total = 0;
    {
      float running = state;
#pragma unroll
      for (int t = 0; t < kChunk; t += kBlockSteps) {
        const auto delta_steps = load_pack<float, kBlockSteps>(delta_row + t);
        const auto u_steps = load_pack<float, kBlockSteps>(u_row + t);
        const auto B = load_pack<float, kBlockSteps>(B_row + t);
#pragma unroll
        for (int j = 0; j < kBlockSteps; ++j) {
          abar[t + j] = coefficients<kCommonMethod>(delta_steps.v[j], pole).abar;
          running = abar[t + j] * running + delta_steps.v[j] * u_steps.v[j] * B.v[j];
          h[t + j] = running;
          total += delta_steps.v[j];
        }
      }
    }

    float offset = 0;
#pragma unroll
    for (int t = kChunk - kBlockSteps; t >= 0; t -= kBlockSteps) {
      const auto dy_steps = load_pack<float, kBlockSteps>(dy_row + t);
      const auto C = load_pack<float, kBlockSteps>(C_row + t);
#pragma unroll
      for (int j = kBlockSteps - 1; j >= 0; --j) {
        offset = (dy_steps.v[j] * C.v[j] + offset) * abar[t + j];
      }
    }
    const float factor = DeviceMath::exp_of(total * pole.exponent);

    float carry = 0;
    if (chunk.first_step + kChunk >= params.seqlen) {
      if (has_state) {
        carry = load_component<float>(params.dlast_state, place.state_base(params.dlast_state) +
                                                              part * params.dlast_state.state);
      }
    } else {
      SharedBarrier(barriers[place.warp]).wait(parity);
      parity ^= 1;
      carry = handed[place.warp * kWarpSize + lane];
    }
    if (chunk.first_step > 0) {
      const int next = place.warp + 1 < warps ? place.warp + 1 : 0;
      handed[next * kWarpSize + lane] = apply_map(factor, offset, carry);
      SharedBarrier(barriers[next]).signal();
    }

    constexpr int kChannelMask = 2;  // lanes that differ in nothing but their channel: lane_role()
    // Lanes of the tile's first channel keep dB of both, those of the second dC.
    const bool keeps_dC = place.role.channel == 1;
    constexpr int kStepFloats = 2 * kPaddedStates;
    float* const partial =
        static_cast<float*>(args.workspace.dBC_partials) +
        (((place.tile * params.batch + place.batch) * params.groups + place.group) * params.seqlen +
         chunk.first_step) *
            kStepFloats +
        (keeps_dC ? kPaddedStates : 0) + part;
#pragma unroll
    for (int t = kChunk - kBlockSteps; t >= 0; t -= kBlockSteps) {
      const auto delta_steps = load_pack<float, kBlockSteps>(delta_row + t);
      const auto u_steps = load_pack<float, kBlockSteps>(u_row + t);
      const auto dy_steps = load_pack<float, kBlockSteps>(dy_row + t);
      const auto B = load_pack<float, kBlockSteps>(B_row + t);
      const auto C = load_pack<float, kBlockSteps>(C_row + t);
      Pack<float, kBlockSteps> du_parts, ddelta_parts, y_parts;
#pragma unroll
      for (int j = kBlockSteps - 1; j >= 0; --j) {
        const int at = t + j;
        const Coefficients<float> value{abar[at], delta_steps.v[j]};
        const float before = at > 0 ? h[at > 0 ? at - 1 : 0] : state;
        const auto update =
            backpropagate_update<kCommonMethod>(delta_steps.v[j], u_steps.v[j], pole, value, B.v[j],
                                                before, carry + dy_steps.v[j] * C.v[j]);
        carry = update.carry;
        dA += update.dA;
        du_parts.v[j] = update.du;
        ddelta_parts.v[j] = update.ddelta;
        y_parts.v[j] = C.v[j] * h[at];
        const float dC = dy_steps.v[j] * h[at];
        const float give = keeps_dC ? update.dB : dC;
        const float keep = keeps_dC ? dC : update.dB;
        const float sum = keep + __shfl_xor_sync(kFullMask, give, kChannelMask);
        if (at < chunk.steps) partial[at * kStepFloats] = sum;
      }
      const auto du_sum = sum_over_parts<1>(du_parts, part, S::kLaneBits);
      const auto ddelta_sum = sum_over_parts<1>(ddelta_parts, part, S::kLaneBits);
      const auto y_sum = sum_over_parts<1>(y_parts, part, S::kLaneBits);
      if (part < kBlockSteps) {
        const int at = row + t + held_step<1>(part);
        own[Layout::kDu + at] = du_sum.v[0];
        own[Layout::kDdelta + at] = ddelta_sum.v[0];
        own[Layout::kY + at] = y_sum.v[0];
      }
    }
    if (chunk.first_step == 0 && has_state && params.dinitial_state.present()) {
      store_component(params.dinitial_state,
                      place.state_base(params.dinitial_state) + part * params.dinitial_state.state,
                      carry);
    }
    __syncwarp();

    auto du_items = load_pack<float, kItems>(own + Layout::kDu + item_at);
    auto ddelta_items = load_pack<float, kItems>(own + Layout::kDdelta + item_at);
    auto dz_items = load_pack<float, kItems>(own + Layout::kY + item_at);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      du_items.v[i] += D * dy_items.v[i];
      ddelta_items.v[i] *= slope.v[i];
      dz_items.v[i] = dz_factor.v[i] * (dz_items.v[i] + D * u_items.v[i]);
      dD += dy_items.v[i] * u_items.v[i];
      if (place.item_step() + i < chunk.steps) ddelta_bias += ddelta_items.v[i];
    }
    const bool exists = has_items(chunk);
    du.write(chunk, exists, du_items);
    ddelta.write(chunk, exists, ddelta_items);
    if (params.dz.present()) dz.write(chunk, exists, dz_items);
    chunk = next_chunk;
  }

  // Sums over the warps, in their order.
#pragma unroll
  for (int mask = S::kLanes / 2; mask > 0; mask /= 2) {
    dD += __shfl_xor_sync(kFullMask, dD, mask);
    ddelta_bias += __shfl_xor_sync(kFullMask, ddelta_bias, mask);
  }
  sums.dA[place.warp][lane] = dA;
  if (lane % S::kLanes == 0) {
    sums.dD[place.warp][place.item_channel()] = dD;
    sums.ddelta_bias[place.warp][place.item_channel()] = ddelta_bias;
  }
  __syncthreads();
  if (place.warp > 0) return;
  float total_dA = 0;
  for (int w = 0; w < warps; ++w) total_dA += sums.dA[w][lane];
  const int64_t first_row = place.batch * params.dim + place.first_channel;
  if (place.exists()) {
    static_cast<float*>(
        args.workspace.dA)[(first_row + place.role.channel) * kPaddedStates + part] = total_dA;
  }
  const auto add_up = [&](void* target, const float (&partial)[kMaxRelayWarps][S::kChannels]) {
    if (target == nullptr || lane >= place.channels) return;
    float total = 0;
    for (int w = 0; w < warps; ++w) total += partial[w][lane];
    static_cast<float*>(target)[first_row + lane] = total;
  };
  add_up(args.workspace.dD, sums.dD);
  add_up(args.workspace.ddelta_bias, sums.ddelta_bias);
}

template <class Storage>
cudaError_t RelayBackward<Storage>::launch(const RelayBackwardArgs& args, const LaunchShape& shape,
                                           cudaStream_t stream) {
  return launch_kernel(relay_backward_kernel<Storage>, shape, stream, args);
}

}  // namespace selective_scan::cuda::relay
