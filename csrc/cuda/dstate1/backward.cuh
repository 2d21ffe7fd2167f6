// Backward scan for dstate 1.
//
// A block owns a tile of channels of one group and walks through time in chunks of kChunk steps,
// last to first. A warp takes `slots` windows of kWindowChannels channels in turns; kChannelLanes
// lanes share a channel and hold kItems consecutive steps each. For a window: scan forward from the
// state saved before the chunk, then scan the state's gradient backwards from what the later chunk
// left, all in registers. A lane adds up dB and dC over its windows; then shuffles add the warp's
// channels, and the first threads the block's warps, in a fixed order. add_gradients() adds
// the tiles.
//
// Shared memory: per warp a chunk of B and C, a tile for rows that vectors cannot read and, for
// every window and lane, what it keeps between chunks; per block two buffers of the warps' sums of
// dB and dC, so that one barrier a chunk suffices; then whole rows of every window, if they are
// dense, where gradients take the places of u, delta and z. Bound by instructions, about 100 per
// (channel, step), and by memory nearly as much.
#pragma once

#include "../kit/shuffle.cuh"
#include "../kit/update_gradient.cuh"
#include "scan.cuh"

namespace selective_scan::cuda::dstate1 {

/// Adds the lanes that hold the same steps of different channels.
__device__ __forceinline__ void sum_over_channels(const Items& dB, const Items& dC, int lane,
                                                  WarpSums& sums) {
  static_assert(kWindowChannels == 8 && kChannelLanes == 4, "channels are bits 2 to 4 of the lane");
  float values[2 * kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    values[i] = dB[i];
    values[kItems + i] = dC[i];
  }
  add_halves<kItems>(values, lane, 16);
  add_halves<kItems / 2>(values, lane, 8);
  add_halves<kItems / 4>(values, lane, 4);
  const bool is_C = lane & 16;
  const int step = lane % kChannelLanes * kItems + (lane & 8 ? kItems / 2 : 0) + (lane & 4 ? 2 : 0);
  sums[2 * step + is_C] = values[0];
  sums[2 * (step + 1) + is_C] = values[1];
}

/// The inputs of a window on their way.
template <class Storage>
struct BackwardWindow {
  typename RowAccess<Storage>::Raw u, delta, z, dout;
};

template <class Storage>
class BackwardTile {
  using Access = RowAccess<Storage>;
  /// The next window is read while one is scanned, where registers suffice.
  static constexpr bool kFetchesAhead =
      !kIsDense<Storage> && kHasVectors<Storage> && sizeof(typename Access::Raw) <= 16;
  using Row = BackwardRows::Number;

  /// A window of a chunk.
  struct Place {
    int slot;
    int chunk;
    Window window;
    int64_t offset;  // of the lane's steps, from the beginning of the batch or of dense rows
  };

 public:
  __device__ BackwardTile(const BackwardArgs& args, const ChannelTile& tile, WarpShared& shared,
                          WindowRecord* records, WarpSums* sums, char* rows)
      : args_(args),
        params_(args.params),
        tile_(tile),
        shared_(shared),
        records_(records),
        sums_(sums),
        dense_(args.strides, static_cast<int>(args.params.seqlen)),
        rows_(rows),
        lane_(threadIdx.x % kWarpSize),
        warp_(threadIdx.x / kWarpSize),
        seqlen_(static_cast<int>(args.params.seqlen)),
        lane_offset_(Access::lane_offset(args.strides, lane_) +
                     (kIsDense<Storage> ? 0 : tile.first_channel * args.strides.channel)),
        saved_(static_cast<const float*>(args.params.states) +
               tile.batch * num_saved_states(seqlen_) * args.params.dim + tile.first_channel +
               lane_ / kChannelLanes),
        B_(args.params.B, tile, last_chunk() * kChunk + lane_, -kChunk),
        C_(args.params.C, tile, last_chunk() * kChunk + lane_, -kChunk) {}

  __device__ void run() {
    const int left = tile_.channels - first_channel(0);
    const int slots = left > 0 ? min(args_.slots, (left - 1) / slot_channels() + 1) : 0;
    if constexpr (kIsDense<Storage>) {
      for (int slot = 0; slot < slots; ++slot) fetch_dense(slot);
      __pipeline_commit();
    }
    for (int slot = 0; slot < args_.slots; ++slot) begin(slot);
    BackwardWindow<Storage> next{};
    float next_start = 0.0f;
    if (slots > 0) {
      const Place first = place(0, last_chunk());
      next_start = fetch_start(first);
      if constexpr (kFetchesAhead) next = fetch(first);
    }
    const auto fetch_projections = [&](int chunk) {
      const int step = chunk * kChunk + lane_;
      const bool exists = step >= 0 && step < seqlen_;
      return Pack<uint32_t, 2>{B_.fetch(exists), C_.fetch(exists)};
    };
    auto projections = fetch_projections(last_chunk());
    if constexpr (kIsDense<Storage>) __pipeline_wait_prior(0);
    int buffer = 0;
    for (int chunk = last_chunk(); chunk >= 0; --chunk) {
      __syncwarp();
      B_.put(projections.v[0], lane_, shared_.B);
      C_.put(projections.v[1], lane_, shared_.C);
      __syncwarp();
      Items dB = {}, dC = {};
#pragma unroll 1
      for (int slot = 0; slot < slots; ++slot) {
        const bool is_last = slot + 1 == slots;
        const Place here = place(slot, chunk);
        const Place then = place(is_last ? 0 : slot + 1, is_last ? chunk - 1 : chunk);
        const auto inputs = kFetchesAhead ? next : fetch(here);
        const float start = next_start;
        if constexpr (kFetchesAhead) next = fetch(then);
        next_start = fetch_start(then);
        scan(here, inputs, start, dB, dC);
      }
      projections = fetch_projections(chunk - 1);
      sum_over_channels(dB, dC, lane_, sums_[buffer * args_.warps + warp_]);
      __syncthreads();
      add_warps(buffer, chunk * kChunk);
      buffer ^= 1;
    }
    for (int slot = 0; slot < args_.slots; ++slot) end(slot);
    if constexpr (kIsDense<Storage>) {
      __syncwarp();
      for (int slot = 0; slot < slots; ++slot) store_dense(slot);
    }
  }

 private:
  /// Neighbouring warps take neighbouring channels: where these are neighbours in memory they share
  /// sectors.
  __device__ int slot_channels() const { return args_.warps * kWindowChannels; }
  __device__ int first_channel(int slot) const {
    return slot * slot_channels() + warp_ * kWindowChannels;
  }
  __device__ int last_chunk() const { return ceil_div(seqlen_, kChunk) - 1; }
  __device__ int own_channel(int slot) const { return first_channel(slot) + lane_ / kChannelLanes; }
  __device__ bool exists(int slot) const { return own_channel(slot) < tile_.channels; }
  __device__ LaneSums& sums(int slot) const { return records_[slot].sums[lane_]; }
  __device__ LaneChannel& channel(int slot) const { return records_[slot].channels[lane_]; }

  /// Before the first chunk nothing exists.
  __device__ Place place(int slot, int chunk) const {
    const int channel =
        kIsDense<Storage> ? 0 : first_channel(slot) * static_cast<int>(args_.strides.channel);
    return {slot, chunk,
            Window{chunk >= 0 ? tile_.channels - first_channel(slot) : 0, seqlen_ - chunk * kChunk,
                   lane_},
            lane_offset_ + (channel + chunk * kChunk * args_.strides.step)};
  }
  /// The lane's part of a row.
  __device__ char* address(const Sequence& sequence, Row row, const Place& place) const {
    char* const origin =
        kIsDense<Storage> ? dense_.origin(dense_rows(place.slot), row) : tile_.origin(sequence);
    return origin + place.offset;
  }
  __device__ char* dense_rows(int slot) const {
    return rows_ + slot * BackwardRows::count(args_.z.present()) * dense_.bytes();
  }
  __device__ int64_t window_offset(int slot) const {
    return (tile_.first_channel + first_channel(slot)) * args_.strides.channel;
  }
  /// Calls move(rows, row, address, lane) for the window's rows of an array, if it is there.
  template <class Move>
  __device__ __forceinline__ void move_rows(int slot, const Sequence& sequence, Row row,
                                            const Move& move) const {
    if (!sequence.present()) return;
    move(dense_rows(slot), row, tile_.origin(sequence) + window_offset(slot), lane_);
  }
  __device__ void fetch_dense(int slot) const {
    const auto fetch = [&](auto... rows) { dense_.fetch(rows...); };
    move_rows(slot, args_.u, Row::kU, fetch);
    move_rows(slot, args_.delta, Row::kDelta, fetch);
    move_rows(slot, args_.dout, Row::kDout, fetch);
    move_rows(slot, args_.z, Row::kZ, fetch);
  }
  __device__ void store_dense(int slot) const {
    const auto store = [&](auto... rows) { dense_.store(rows...); };
    move_rows(slot, args_.du, Row::kU, store);
    move_rows(slot, args_.ddelta, Row::kDelta, store);
    move_rows(slot, args_.dz, Row::kZ, store);
  }

  __device__ void begin(int slot) {
    LaneSums sums{};
    LaneChannel own{};
    if (exists(slot)) {
      const int64_t channel = tile_.first_channel + own_channel(slot);
      const auto load = [&](const ArrayView& view) {
        return load_component<float>(view, tile_.batch * view.batch + channel * view.channel);
      };
      sums.state_gradient = load(params_.dlast_state);
      own = {load(params_.A), load(params_.D), load(params_.delta_bias),
             load(params_.initial_state)};
    }
    this->sums(slot) = sums;
    this->channel(slot) = own;
  }

  __device__ BackwardWindow<Storage> fetch(const Place& place) const {
    const auto fetch_rows = [&](const Sequence& sequence, Row row) {
      return Access::fetch(args_.strides, address(sequence, row, place), place.window);
    };
    BackwardWindow<Storage> raw{};
    raw.u = fetch_rows(args_.u, Row::kU);
    raw.delta = fetch_rows(args_.delta, Row::kDelta);
    if (args_.dout.present()) raw.dout = fetch_rows(args_.dout, Row::kDout);
    if (args_.z.present()) raw.z = fetch_rows(args_.z, Row::kZ);
    return raw;
  }
  /// The state before a window of another chunk than the first.
  __device__ float fetch_start(const Place& place) const {
    if (place.chunk <= 0 || !exists(place.slot)) return 0.0f;
    return saved_[(place.chunk - 1) * params_.dim + first_channel(place.slot)];
  }

  /// Adds to dB and dC, and stores what else there is of gradients.
  __device__ void scan(const Place& here, const BackwardWindow<Storage>& raw, float start_of_chunk,
                       Items& dB, Items& dC) {
    const Window& window = here.window;
    LaneSums sums = this->sums(here.slot);
    const LaneChannel own = this->channel(here.slot);
    const auto pole = make_pole<DeviceMath>(own.A);
    const auto store = [&](const Sequence& sequence, Row row, const Items& items) {
      Access::store(args_.strides, address(sequence, row, here), window, shared_.tile, items);
    };

    Items u, delta, slope;
    Access::convert(args_.strides, raw.u, window, shared_.tile, u);
    Access::convert(args_.strides, raw.delta, window, shared_.tile, delta);
#pragma unroll
    for (int i = 0; i < kItems; ++i) delta[i] += own.delta_bias;
    make_steps<Access::kSize>(delta, params_.delta_softplus, slope);
    if (window.steps < kChunk) {
      // A step that does not exist leaves the state as it is.
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (window.first_step() + i >= window.steps) delta[i] = slope[i] = 0.0f;
      }
    }

    Items B, C;
    read_shared(shared_.B + window.first_step(), B);
    read_shared(shared_.C + window.first_step(), C);
    Coefficients<float> value[kItems];
    StepMap map = StepMap::identity();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      value[i] = coefficients<kCommonMethod>(delta[i], pole);
      map.offset =
          value[i].abar * map.offset + held_input<kCommonMethod>(delta[i], u[i], value[i]) * B[i];
      map.product *= value[i].abar;
    }
    float state = here.chunk > 0 ? start_of_chunk : own.initial_state;
    const float start = carry_through_lanes<false>(map, state);
    Items h;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      h[i] = value[i].abar * (i == 0 ? start : h[i - 1]) +
             held_input<kCommonMethod>(delta[i], u[i], value[i]) * B[i];
    }

    Items dy = {};
    if (args_.dout.present()) Access::convert(args_.strides, raw.dout, window, shared_.tile, dy);
    if (args_.z.present()) {
      Items z;
      Access::convert(args_.strides, raw.z, window, shared_.tile, z);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const float s = device_sigmoid(z[i]);
        const float y = C[i] * h[i] + own.D * u[i];
        const float dout = dy[i];
        dy[i] = dout * (z[i] * s);
        z[i] = dout * y * silu_derivative(z[i], s);
      }
      store(args_.dz, Row::kZ, z);
    }

    StepMap back = StepMap::identity();
#pragma unroll
    for (int i = kItems - 1; i >= 0; --i) {
      back.offset = value[i].abar * (back.offset + dy[i] * C[i]);
      back.product *= value[i].abar;
    }
    float later = carry_through_lanes<true>(back, sums.state_gradient);
    float dA = 0.0f, dD = 0.0f, ddelta_bias = 0.0f;
#pragma unroll
    for (int i = kItems - 1; i >= 0; --i) {
      const float dh = later + dy[i] * C[i];
      const auto update = backpropagate_update<kCommonMethod>(delta[i], u[i], pole, value[i], B[i],
                                                              i == 0 ? start : h[i - 1], dh);
      later = update.carry;
      dA += update.dA;
      dB[i] += update.dB;
      dC[i] += dy[i] * h[i];
      dD += dy[i] * u[i];
      u[i] = update.du + own.D * dy[i];
      delta[i] = update.ddelta * slope[i];
      ddelta_bias += delta[i];
    }
    store(args_.du, Row::kU, u);
    store(args_.ddelta, Row::kDelta, delta);
    sums.dA += dA;
    sums.dD += dD;
    sums.ddelta_bias += ddelta_bias;
    this->sums(here.slot) = sums;
  }

  /// Adds the sums of the block's warps, in their order.
  __device__ void add_warps(int buffer, int first_step) const {
    for (int i = threadIdx.x; i < 2 * kChunk; i += blockDim.x) {
      const int step = first_step + i / 2;
      if (step >= seqlen_) continue;
      float sum = 0.0f;
      for (int warp = 0; warp < args_.warps; ++warp) sum += sums_[buffer * args_.warps + warp][i];
      const int64_t row = (tile_.tile * params_.batch + tile_.batch) * params_.groups + tile_.group;
      static_cast<float*>(args_.workspace.dBC_partials)[(row * seqlen_ + step) * 2 + i % 2] = sum;
    }
  }

  __device__ void end(int slot) {
    const LaneSums& own = sums(slot);
    const int64_t channel = tile_.first_channel + own_channel(slot);
    const bool writes = exists(slot) && lane_ % kChannelLanes == 0;
    const auto store_sum = [&](void* sums, float value) {
      if (sums == nullptr) return;
      const float sum = sum_over_lanes(value);
      if (writes) static_cast<float*>(sums)[tile_.batch * params_.dim + channel] = sum;
    };
    store_sum(args_.workspace.dA, own.dA);
    store_sum(args_.workspace.dD, own.dD);
    store_sum(args_.workspace.ddelta_bias, own.ddelta_bias);
    if (writes && params_.dinitial_state.present()) {
      store_component(
          params_.dinitial_state,
          tile_.batch * params_.dinitial_state.batch + channel * params_.dinitial_state.channel,
          own.state_gradient);
    }
  }

  const BackwardArgs& args_;
  const BackwardParams& params_;
  const ChannelTile& tile_;
  WarpShared& shared_;
  WindowRecord* records_;
  WarpSums* sums_;
  DenseWindow dense_;
  char* rows_;  // dense ones of the warp's windows
  int lane_;
  int warp_;
  int seqlen_;
  int64_t lane_offset_;
  const float* saved_;
  Projection<Storage> B_;
  Projection<Storage> C_;
};

template <class Storage>
__global__ void __launch_bounds__(kMaxBackwardWarps* kWarpSize, kBackwardBlocks)
    backward_kernel(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(16) char memory[];
  const int warp = threadIdx.x / kWarpSize;
  auto* records = reinterpret_cast<WindowRecord*>(memory);
  auto* sums = reinterpret_cast<WarpSums*>(records + args.warps * args.slots);
  auto* shared = reinterpret_cast<WarpShared*>(sums + 2 * args.warps);
  const DenseWindow dense(args.strides, static_cast<int>(args.params.seqlen));
  char* const rows = reinterpret_cast<char*>(shared + args.warps) +
                     warp * args.slots * BackwardRows::count(args.z.present()) * dense.bytes();
  const ChannelTile tile(args.params, blockIdx.x, args.tiles, args.tile_channels());
  BackwardTile<Storage>(args, tile, shared[warp], records + warp * args.slots, sums, rows).run();
}

template <class Storage>
cudaError_t Kernels<Storage>::backward(const BackwardArgs& args, const LaunchShape& shape,
                                       cudaStream_t stream) {
  return launch_kernel(backward_kernel<Storage>, shape, stream, args);
}

}  // namespace selective_scan::cuda::dstate1
