// The relay's forward scan with one state a lane, for few channels whose arrays are vectors.
//
// All warps go through time in rounds, a chunk each. First pass: abar and the held input of every
// step into registers, and with them what the chunk does to the state that enters it, x → factor·x
// + offset. These maps are composed over bands of four warps, and every warp applies those of all
// bands to the state that enters the round. Second pass: the states again, and y. So nothing is
// handed from warp to warp, and a round waits twice, whatever the number of its chunks.
//
// A warp has two channels. The two blocks of a cluster divide the chunks of a round and have two
// pairs of channels each: B and C of a chunk serve two warps, and only half the blocks read them.
// Reading the same lines of the L2 cache at the same time is what takes blocks longest.
//
// Bound by: latency; then exponentials, and shared memory for the parts of y.
#pragma once

#include <algorithm>

#include "../kit/launch_tools.h"
#include "../kit/states.cuh"
#include "../kit/step_math.cuh"
#include "cluster.cuh"
#include "copies.cuh"

namespace selective_scan::cuda::relay {

/// x → factor·x + offset for every lane.
using LaneMaps = Pack<float, 2>[kWarpSize];

/// Maps of a round, two of each for rounds in turn: a warp may be late by one.
struct alignas(16) RoundMaps {
  LaneMaps chunks[2][kMaxRelayWarps];         // of the block
  LaneMaps bands[2][kMostPairs][kMostBands];  // of the cluster
  BarrierState bands_arrived[2];
  BarrierState chunks_arrived[kMostBands];  // of a band; where blocks form clusters
};

static_assert(sizeof(RoundMaps) == kRoundMapBytes);

/// The map that applies `first` and then `second`.
__device__ __forceinline__ Pack<float, 2> compose(const Pack<float, 2>& first,
                                                  const Pack<float, 2>& second) {
  return {second.v[0] * first.v[0], apply_map(second.v[0], second.v[1], first.v[1])};
}

/// The first of a block's barriers for some of its warps: those of one slot, or, with one pair of
/// channels, those of one band.
constexpr int kFirstBarrier = 1;

/// kCount elements to fp32.
template <DType kType, int kCount>
__device__ __forceinline__ Pack<float, kCount> load_converted(const char* address) {
  return convert_elements<element_size(kType), kCount>(address, kType == DType::kBFloat16);
}

/// Kept out of line: what this reads is nearly always fp32.
__device__ __noinline__ static float load_other(const void* data, DType dtype, int64_t index) {
  return load_element<float>(data, dtype, index);
}
__device__ __forceinline__ float load_once(const RoundsForwardArgs::Once& array, int64_t index) {
  if (array.data == nullptr) return 0;
  if (array.dtype == DType::kFloat32) return static_cast<const float*>(array.data)[index];
  return load_other(array.data, array.dtype, index);
}

template <DType kType, Method kMethod>
__global__ void __launch_bounds__(kMaxRelayWarps* kWarpSize, 1)
    rounds_forward_kernel(const __grid_constant__ RoundsForwardArgs args) {
  using S = Shape<1, kChunk>;
  using Args = RoundsForwardArgs;
  constexpr int kSize = element_size(kType);
  using Layout = RoundsLayout<S, kSize>;
  using Values = Pack<float, S::kItems>;
  constexpr int kSteps = S::kSteps;
  constexpr int kItemBytes = S::kItems * kSize;
  constexpr bool kExponential = Formula<kMethod>::kAbarIsExponential;
  constexpr bool kHeldInput = !Formula<kMethod>::kBbarDependsOnA;  // Δ·u
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  // The warp stands at its pair of channels, its chunk within the block and within a round.
  const int pairs = args.pairs;
  const int shift = pairs - 1;
  const int pair = warp & shift;
  const int slot = warp >> shift;
  const int rank = blockIdx.x & shift;
  const int place = rank * args.slots + slot;
  const int round_chunks = args.slots << shift;
  const int group = blockIdx.y;
  const int batch = blockIdx.z;
  const int tile_channel = ((blockIdx.x >> shift) * pairs + pair) * S::kChannels;
  const int first_channel = group * args.group_channels + tile_channel;
  const int channels = min(S::kChannels, args.group_channels - tile_channel);
  // The items that the lane moves, and the state that it holds.
  const int item_step = lane % S::kLanes * S::kItems;
  const int item_channel = lane / S::kLanes;
  const bool item_exists = item_channel < channels;
  const LaneRole role = lane_role(lane, S::kLaneBits);
  const int part = role.part;
  const bool has_state = role.channel < channels && part < args.dstate;
  RoundMaps& maps = *reinterpret_cast<RoundMaps*>(shared_memory());
  char* const slots = shared_memory() + sizeof(RoundMaps);
  const int buffers = args.rounds > 1 ? 2 : 1;
  char* const projections = slots + slot * Layout::slot_bytes(buffers);
  char* const own =
      slots + args.slots * Layout::slot_bytes(buffers) + warp * Layout::warp_bytes(buffers);
  if (pairs > 1) {
    // A warp each, of which there are eight at least: one after the other they would take long.
    if (lane == 0 && warp < 2 + kMostBands) {
      if (warp < 2) {
        SharedBarrier(maps.bands_arrived[warp]).initialize(1);
      } else {
        SharedBarrier(maps.chunks_arrived[warp - 2]).initialize(kBandWarps * kWarpSize);
      }
      SharedBarrier::publish_in_cluster();
    }
    __syncwarp();
    arrive_at_cluster();
  }

  // --- copies of a chunk's input ---

  constexpr int kVectors = kSteps * kSize / 16;  // of a row of B or C
  constexpr int kRowsAtATime = kWarpSize / kVectors;
  const auto item_address = [&](const Args::Rows& rows, int first_step) {
    const int at = (first_step + item_step) * kSize;
    return rows.data + (batch * rows.batch + (first_channel + item_channel) * rows.channel +
                        (args.is_reversed ? -at : at));
  };
  /// The warps that share B and C divide them.
  const auto is_mine = [&](int projection) { return pairs == 1 || projection == pair; };
  const auto start_copies = [&](int first_step, int steps, int buffer) {
    const int vector_row = lane / kVectors;
    const int vector_at = lane % kVectors * 16;
    const int vector_step =
        args.is_reversed ? kSteps - (vector_at + 16) / kSize : vector_at / kSize;
    const bool has_vector = vector_step < steps;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!is_mine(i)) continue;
      const Args::Projection& view = i == 0 ? args.B : args.C;
      const int at = first_step * kSize;
      const char* source =
          view.data + (batch * view.batch + group * view.group + vector_row * view.state +
                       vector_at + (args.is_reversed ? -at : at));
      char* target = projections + buffer * Layout::kProjections + i * Layout::kProjectionBytes +
                     vector_row * Layout::kRowBytes + vector_at;
#pragma unroll
      for (int row = 0; row < kPaddedStates; row += kRowsAtATime) {
        const bool exists = has_vector && row + vector_row < args.dstate;
        __pipeline_memcpy_async(target, source, 16, exists ? 0 : 16);
        target += kRowsAtATime * Layout::kRowBytes;
        source += kRowsAtATime * view.state;
      }
    }
    const bool has_items = item_exists && item_step < steps;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const Args::Rows& rows = i == 0 ? args.u : i == 1 ? args.delta : args.z;
      if (i == 2 && rows.data == nullptr) continue;
      __pipeline_memcpy_async(own + Layout::kRawItems + buffer * Layout::kItems +
                                  i * Layout::kItemsBytes + lane * kItemBytes,
                              item_address(rows, first_step), kItemBytes,
                              has_items ? 0 : kItemBytes);
    }
    __pipeline_commit();
  };

  int first_step = place * kSteps;  // of the warp's chunk
  if (first_step < args.seqlen) start_copies(first_step, args.seqlen - first_step, 0);

  // While these are on their way:
  float bias = 0;
  float D = 0;
  if (item_exists) {
    const int channel = first_channel + item_channel;
    bias = load_once(args.delta_bias, channel * args.delta_bias.channel);
    D = load_once(args.D, channel * args.D.channel);
  }
  float A = 0;
  float entering = 0;  // the round
  const auto state_at = [&](const Args::Once& array) {
    return batch * array.batch + (first_channel + role.channel) * array.channel +
           part * array.state;
  };
  if (has_state) {
    A = load_once(args.A, state_at(args.A));
    entering = load_once(args.initial_state, state_at(args.initial_state));
  }
  const Pole<float> pole = make_pole<DeviceMath>(A, args.method);

  const auto row = [&](int rows) {
    return reinterpret_cast<float*>(own + rows) + role.channel * S::kRow;
  };
  const int item_at = item_channel * S::kRow + item_step;
  constexpr int kAtOnce = 8;  // steps whose B or C are loaded together
  for (int round = 0; round < args.rounds; ++round) {
    const int buffer = round & 1;
    const char* const raw_items =
        own + Layout::kRawItems + buffer * Layout::kItems + lane * kItemBytes;
    char* const raw_B = projections + buffer * Layout::kProjections;
    const int steps = args.seqlen - first_step;
    const int next_step = first_step + round_chunks * kSteps;
    const bool has_chunk = steps > 0;
    Values u{};
    float abar[kSteps];
    float held[kSteps];
    Pack<float, 2> map{1, 0};  // of the chunk
    if (has_chunk) {
      __pipeline_wait_prior(0);
      if (args.is_reversed) {
        __syncwarp();
        // Each lane turns its row of B or C round.
        const int projection = lane / kPaddedStates;
        if (is_mine(projection)) {
          using Element = std::conditional_t<kSize == 2, uint16_t, uint32_t>;
          using Word = Pack<Element, 16 / kSize>;
          Word* const row = reinterpret_cast<Word*>(raw_B + projection * Layout::kProjectionBytes +
                                                    lane % kPaddedStates * Layout::kRowBytes);
#pragma unroll 1
          for (int i = 0; i < kVectors / 2; ++i) {
            const Word kept = reversed(row[i]);
            row[i] = reversed(row[kVectors - 1 - i]);
            row[kVectors - 1 - i] = kept;
          }
        }
      }
      if (pairs == 1) {
        __syncwarp();
      } else {
        meet(kFirstBarrier + slot, kMostPairs);
      }
      if (next_step < args.seqlen) {
        start_copies(next_step, args.seqlen - next_step, buffer ^ 1);
      }
      u = load_converted<kType, S::kItems>(raw_items);
      Values delta = load_converted<kType, S::kItems>(raw_items + Layout::kItemsBytes);
      if (args.is_reversed) {
        u = reversed(u);
        delta = reversed(delta);
      }
#pragma unroll
      for (int i = 0; i < S::kItems; ++i) delta.v[i] += bias;
      make_steps<kSize>(delta, args.delta_softplus);
      Values input = u;
      float total = 0;
#pragma unroll
      for (int i = 0; i < S::kItems; ++i) {
        // A step that does not exist leaves the state as it is.
        if (item_step + i >= steps) delta.v[i] = 0;
        if constexpr (kHeldInput) input.v[i] *= delta.v[i];
        total += delta.v[i];
      }
      store_pack(reinterpret_cast<float*>(own + Layout::kDeltaRows) + item_at, delta);
      store_pack(reinterpret_cast<float*>(own + Layout::kInputRows) + item_at, input);
      __syncwarp();

      const char* const B_row = raw_B + part * Layout::kRowBytes;
      const float* const delta_row = row(Layout::kDeltaRows);
      const float* const input_row = row(Layout::kInputRows);
#pragma unroll
      for (int t = 0; t < kSteps; t += kAtOnce) {
        const auto delta_steps = load_pack<float, kAtOnce>(delta_row + t);
        const auto input_steps = load_pack<float, kAtOnce>(input_row + t);
        const auto B = load_converted<kType, kAtOnce>(B_row + t * kSize);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const auto value = coefficients<kMethod>(delta_steps.v[j], pole);
          abar[t + j] = value.abar;
          held[t + j] = (kHeldInput ? input_steps.v[j] : input_steps.v[j] * value.bbar) * B.v[j];
          map.v[1] = value.abar * map.v[1] + held[t + j];
          if constexpr (!kExponential) map.v[0] *= value.abar;
        }
      }
      if constexpr (kExponential) {
#pragma unroll
        for (int mask = S::kLanes / 2; mask > 0; mask /= 2) {
          total += __shfl_xor_sync(kFullMask, total, mask);
        }
        total = __shfl_sync(kFullMask, total, role.channel * S::kLanes);
        map.v[0] = DeviceMath::exp_of(total * pole.exponent);
      }
    }

    if (round == 0 && pairs > 1) wait_for_cluster();  // its blocks have begun, barriers are ready
    // What the chunks before this one in its band do; the last one leaves what the band does.
    store_pack(maps.chunks[buffer][warp][lane].v, map);
    const int member = slot % kBandWarps;
    if (pairs == 1) {
      meet(kFirstBarrier + slot / kBandWarps, kBandWarps);
    } else {
      const SharedBarrier arrived(maps.chunks_arrived[slot / kBandWarps * pairs + pair]);
      arrived.signal();
      arrived.wait(round & 1);
    }
    Pack<float, 2> before{1, 0};
#pragma unroll
    for (int k = 0; k < kBandWarps - 1; ++k) {
      if (k < member) {
        before = compose(
            before, load_pack<float, 2>(maps.chunks[buffer][warp - (member - k) * pairs][lane].v));
      }
    }
    if (pairs > 1 && threadIdx.x == 0) {
      SharedBarrier(maps.bands_arrived[buffer])
          .expect(pairs * round_chunks / kBandWarps * sizeof(LaneMaps));
    }
    if (member == kBandWarps - 1) {
      auto& target = maps.bands[buffer][pair][place / kBandWarps][lane];
      const Pack<float, 2> whole = compose(before, map);
      if (pairs == 1) {
        store_pack(target.v, whole);
      } else {
#pragma unroll
        for (int block = 0; block < kMostPairs; ++block) {
          send_in_cluster(address_in_cluster(shared_address(&target), block), whole,
                          address_in_cluster(shared_address(&maps.bands_arrived[buffer]), block));
        }
      }
    }
    if (pairs == 1) {
      __syncthreads();
    } else {
      SharedBarrier(maps.bands_arrived[buffer]).wait(round >> 1 & 1);
    }
    float h = 0;  // that enters the band, then the chunk
#pragma unroll
    for (int k = 0; k < kMostBands; ++k) {
      if (k * kBandWarps < round_chunks) {
        if (k == place / kBandWarps) h = entering;
        const auto whole = load_pack<float, 2>(maps.bands[buffer][pair][k][lane].v);
        entering = apply_map(whole.v[0], whole.v[1], entering);
      }
    }
    h = apply_map(before.v[0], before.v[1], h);

    if (has_chunk) {
      const char* const C_row = raw_B + Layout::kProjectionBytes + part * Layout::kRowBytes;
      const auto plane = [&](int channel, int part) {
        return reinterpret_cast<float*>(own + channel * Layout::kChannelPlanes +
                                        part * Layout::kPlaneBytes);
      };
      float* const y_row = plane(role.channel, part);
#pragma unroll
      for (int t = 0; t < kSteps; t += kAtOnce) {
        const auto C = load_converted<kType, kAtOnce>(C_row + t * kSize);
        Pack<float, kAtOnce> y;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          h = abar[t + j] * h + held[t + j];
          y.v[j] = C.v[j] * h;
        }
        store_pack(y_row + t, y);
      }
      __syncwarp();
      if (args.has_output) {
        Values y{};
#pragma unroll
        for (int other = 0; other < S::kLanes; ++other) {
          const auto summand = load_pack<float, S::kItems>(plane(item_channel, other) + item_step);
#pragma unroll
          for (int i = 0; i < S::kItems; ++i) y.v[i] += summand.v[i];
        }
#pragma unroll
        for (int i = 0; i < S::kItems; ++i) y.v[i] += D * u.v[i];
        if (args.z.data != nullptr) {
          Values z = load_converted<kType, S::kItems>(raw_items + 2 * Layout::kItemsBytes);
          if (args.is_reversed) z = reversed(z);
#pragma unroll
          for (int i = 0; i < S::kItems; ++i) y.v[i] = gated<kSize>(y.v[i], z.v[i]);
        }
        if (args.is_reversed) y = reversed(y);
        if (item_exists && item_step < steps) {
          store_elements(item_address(args.out, first_step), kType, y);
        }
      }
      if (has_state) {
        if (steps > kSteps) {
          if (args.states != nullptr) {
            const int64_t chunk =
                static_cast<int64_t>(batch) * ((args.seqlen - 1) / kChunk) + first_step / kChunk;
            const int64_t channel = chunk * args.dim + first_channel + role.channel;
            args.states[channel * args.dstate + part] = h;
          }
        } else if (args.last_state.data != nullptr) {
          store_element(args.last_state.data, args.last_state.dtype, state_at(args.last_state), h);
        }
      }
      __syncwarp();
    }
    first_step = next_step;
  }
}

template <DType kType, Method kMethod>
cudaError_t RoundsForward<kType, kMethod>::launch(const RoundsForwardArgs& args,
                                                  const LaunchShape& shape, cudaStream_t stream) {
  return launch_kernel(rounds_forward_kernel<kType, kMethod>, shape, stream, args);
}

}  // namespace selective_scan::cuda::relay
