// The relay's forward scan. Mapping: place.cuh.
//
// A warp's turn: the raw input of its chunk has arrived; Δ, the held input and B, C go to shared
// memory in fp32; copies of its next chunk start. First pass: abar of every step and state into
// registers, the chunk's offset and factor with them. Hand-over. Second pass: the states again with
// the abar kept, and y, so that an update takes one ex2 in all.
//
// Bound by: issue slots; with few warps a multiprocessor and short chunks by the hand-over.
#pragma once

#include "../kit/barriers.cuh"
#include "../kit/dependent_launch.cuh"
#include "../kit/launch_tools.h"
#include "../kit/states.cuh"
#include "../kit/step_math.cuh"
#include "copies.cuh"

namespace selective_scan::cuda::relay {

struct FirstPass {
  float abar[kSteps][kStates];
  Pack<float, kStates> offset{};  // the state that leaves when zero enters
  Pack<float, kStates> factor;    // product of abar

  __device__ __forceinline__ FirstPass(const float* delta_row, const float* input_row,
                                       const TileReader& projections,
                                       const Pole<float> (&poles)[kStates]) {
    float total = 0;
#pragma unroll
    for (int t = 0; t < kSteps; t += kBlockSteps) {
      const auto delta = load_pack<float, kBlockSteps>(delta_row + t);
      const auto input = load_pack<float, kBlockSteps>(input_row + t);
      float B[kBlockSteps][kStates];
      projections.load<false>(t, B);
#pragma unroll
      for (int j = 0; j < kBlockSteps; ++j) {
        total += delta.v[j];
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          const float a = coefficients<kCommonMethod>(delta.v[j], poles[s]).abar;
          abar[t + j][s] = a;
          offset.v[s] = a * offset.v[s] + input.v[j] * B[j][s];
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      factor.v[s] = DeviceMath::exp_of(total * poles[s].exponent);
    }
  }
};

/// What the warps of a block hand on: the state that enters a warp's chunk. There are two of
/// everything, for turns one after the other: a warp may be late by one.
struct alignas(16) Handover {
  BarrierState barriers[2][kMaxRelayWarps];
  Pack<float, kStates> states[2][kMaxRelayWarps][kWarpSize];
};

static_assert(sizeof(Handover) == kHandoverBytes);

/// Brings B and C of a warp's chunks to its shared memory, as they have been written in global
/// memory before.
class TileCopies {
 public:
  __device__ __forceinline__ TileCopies(const RelayForwardArgs& args, const Place& place,
                                        float* tiles)
      : tiles_(tiles),
        at_(place.lane * kAccess),
        source_(args.projections +
                (place.batch * args.params.groups + place.group) * args.sequence_bytes + at_) {}
  __device__ __forceinline__ void copy(const Chunk& chunk, int buffer) const {
    constexpr int kStepBytes = kTileFloats * 4 / kSteps;
    const char* const source = source_ + chunk.first_step * kStepBytes;
    char* const target = reinterpret_cast<char*>(tiles_ + buffer * kTileFloats) + at_;
#pragma unroll
    for (int at = 0; at < kTileFloats * 4; at += kWarpSize * kAccess) {
      __pipeline_memcpy_async(target + at, source + at, kAccess);
    }
  }
  __device__ __forceinline__ const float* tile(int buffer) const {
    return tiles_ + buffer * kTileFloats;
  }

 private:
  static constexpr int kAccess = 16;  // bytes
  float* tiles_;
  int at_;
  const char* source_;
};

template <int kSize>
__global__ void __launch_bounds__(kMaxRelayWarps* kWarpSize, 1)
    relay_forward_kernel(const __grid_constant__ RelayForwardArgs args) {
  if constexpr (!kHasAsyncCopies) return;
  using Items = relay::Items<kSize>;
  using Values = Pack<float, kItems>;
  using States = Pack<float, kStates>;
  const ForwardParams& params = args.params;
  char* const shared = shared_memory();
  const Place place(args.geometry);
  const int lane = place.lane;
  const int warps = args.geometry.warps;
  const bool has_output = params.wanted == ForwardWanted::kOutput;
  const bool has_gate = params.z.present();

  auto& handover = *reinterpret_cast<Handover*>(shared);
  float* const own = reinterpret_cast<float*>(&handover + 1) + place.warp * Layout::kSize;
  // Every warp two of them: the lanes of a warp would have to take turns.
  if (lane == 0) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      SharedBarrier(handover.barriers[which][place.warp]).initialize();
    }
  }
  __syncwarp();
  const int turn = warps * kSteps;  // steps from one of the warp's chunks to its next
  const bool is_first = place.warp == 0;
  const auto origin = [&](int array) {
    return reinterpret_cast<char**>(own + Layout::kOrigins) + array * kWarpSize + lane;
  };
  const auto items = [&](const ArrayView& view, int slots, int array) {
    return Items(view, place, reinterpret_cast<char*>(own + slots + lane * kItems), origin(array));
  };
  const Items u = items(params.u, Layout::kRawU, 0);
  const Items delta = items(params.delta, Layout::kRawDelta, 1);
  const Items z = items(params.z, Layout::kRawZ, 2);
  const Items out = items(params.out, Layout::kRawZ, 3);
  const TileCopies tiles(args, place, own + Layout::kTile);
  const auto chunk_at = [&](int64_t first_step) {
    const int64_t left = params.seqlen - first_step;
    return Chunk{first_step, static_cast<int>(left < kSteps ? left : kSteps)};
  };
  const auto has_items = [&](const Chunk& chunk) {
    return place.item_exists() && place.item_step() < chunk.steps;
  };
  const auto copy_rows = [&](const Chunk& chunk, int buffer) {
    const bool exists = has_items(chunk);
    u.copy(chunk, exists, buffer);
    delta.copy(chunk, exists);
  };

  const float* const delta_row = own + Layout::kDelta + place.role.channel * kRow;
  const float* const input_row = own + Layout::kInput + place.role.channel * kRow;
  const auto plane = [&](int channel, int part) {
    return own + Layout::kPlanes + (channel * kLanes + part) * kRow;
  };

  Chunk chunk = chunk_at(static_cast<int64_t>(place.warp) * kSteps);
  if (chunk.steps > 0) copy_rows(chunk, 0);
  // While these are on their way:
  const float D = place.item_component(params.D);
  const float bias = place.item_component(params.delta_bias);
  Pole<float> poles[kStates];
  load_poles<float>(params, place.channel(), place.exists(), place.first_state(), poles);
  wait_for_primary();
  if (chunk.steps > 0) tiles.copy(chunk, 0);
  __pipeline_commit();
  __syncthreads();  // barriers are ready
  for (int round = 0; chunk.steps > 0; ++round) {
    const int buffer = round & 1;
    const bool is_last = chunk.first_step + kSteps >= params.seqlen;
    __pipeline_wait_prior(0);
    __syncwarp();
    {
      Values u_values = u.read(buffer);
      Values delta_values = delta.read();
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        delta_values.v[i] += bias;
      }
      make_steps<kSize>(delta_values, params.delta_softplus);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        // A step that does not exist leaves the state as it is.
        if (place.item_step() + i >= chunk.steps) delta_values.v[i] = 0;
        u_values.v[i] *= delta_values.v[i];
      }
      const int at = place.item_channel() * kRow + place.item_step();
      store_pack(own + Layout::kDelta + at, delta_values);
      store_pack(own + Layout::kInput + at, u_values);
    }
    __syncwarp();
    const TileReader projections(tiles.tile(buffer), place.role.part);
    if (has_gate) z.copy(chunk, has_items(chunk));
    __pipeline_commit();
    const Chunk next_chunk = chunk_at(chunk.first_step + turn);
    if (next_chunk.steps > 0) {
      copy_rows(next_chunk, buffer ^ 1);
      tiles.copy(next_chunk, buffer ^ 1);
    }
    __pipeline_commit();

    FirstPass pass(delta_row, input_row, projections, poles);
    States h{};  // that enters the chunk
    if (round == 0 && is_first) {
      if (place.exists() && params.initial_state.present()) {
        h = load_states<float, kStates>(params.initial_state,
                                        place.state_base(params.initial_state), place.first_state(),
                                        params.dstate);
      }
    } else {
      const int wait = is_first ? round - 1 : round;  // how many went before
      SharedBarrier(handover.barriers[wait & 1][place.warp]).wait(wait >> 1 & 1);
      h = load_pack<float, kStates>(handover.states[wait & 1][place.warp][lane].v);
    }
    if (!is_last) {
      States leaving;
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        leaving.v[s] = apply_map(pass.factor.v[s], pass.offset.v[s], h.v[s]);
      }
      const int next = place.warp + 1 < warps ? place.warp + 1 : 0;
      store_pack(handover.states[buffer][next][lane].v, leaving);
      SharedBarrier(handover.barriers[buffer][next]).signal();
    }

#pragma unroll
    for (int t = 0; t < kSteps; t += kBlockSteps) {
      const auto input_steps = load_pack<float, kBlockSteps>(input_row + t);
      float B_steps[kBlockSteps][kStates];
      float C_steps[kBlockSteps][kStates];
      projections.load<false>(t, B_steps);
      projections.load<true>(t, C_steps);
      Pack<float, kBlockSteps> y;
#pragma unroll
      for (int j = 0; j < kBlockSteps; ++j) {
        float sum = 0;
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          h.v[s] = pass.abar[t + j][s] * h.v[s] + input_steps.v[j] * B_steps[j][s];
          sum += C_steps[j][s] * h.v[s];
        }
        y.v[j] = sum;
      }
      store_pack(plane(place.role.channel, place.role.part) + t, y);
      const int64_t steps = chunk.first_step + t + kBlockSteps;
      if ((t + kBlockSteps) % kChunk == 0 || (kSteps < kChunk && t + kBlockSteps == kSteps)) {
        if (params.states != nullptr && place.exists() && steps % kChunk == 0 &&
            steps < params.seqlen) {
          const int64_t saved =
              (place.batch * num_saved_states(params.seqlen) + steps / kChunk - 1) * params.dim +
              place.channel();
          store_states(static_cast<float*>(params.states) + saved * params.dstate,
                       place.first_state(), params.dstate, h);
        }
      }
    }
    if (is_last && place.exists() && params.last_state.present()) {
      store_states(params.last_state, place.state_base(params.last_state), place.first_state(),
                   params.dstate, h);
    }
    __syncwarp();
    if (has_output) {
      Values y{};
#pragma unroll
      for (int part = 0; part < kLanes; ++part) {
        const auto other =
            load_pack<float, kItems>(plane(place.item_channel(), part) + place.item_step());
#pragma unroll
        for (int i = 0; i < kItems; ++i) y.v[i] += other.v[i];
      }
      __pipeline_wait_prior(1);  // z is there
      const Values u_values = u.read(buffer);
#pragma unroll
      for (int i = 0; i < kItems; ++i) y.v[i] += D * u_values.v[i];
      if (has_gate) {
        const Values gate = z.read();
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          y.v[i] = gated<kSize>(y.v[i], gate.v[i]);
        }
      }
      out.write(chunk, has_items(chunk), y);
    }
    chunk = next_chunk;
  }
}

template <int kSize>
cudaError_t RelayForward<kSize>::launch(const RelayForwardArgs& args, const LaunchShape& shape,
                                        cudaStream_t stream) {
  return launch_kernel(relay_forward_kernel<kSize>, shape, stream, args);
}

}  // namespace selective_scan::cuda::relay
