// Backward scan for dstate 1.
//
// A block owns a tile of channels of one group, and each of its warps the channels of a window,
// eight or one. A warp walks through time in windows of 32 or 256 steps, last to first; each of a
// channel's lanes holds kItems consecutive steps. Four warps may share a channel and take its
// windows in turns. For each window, a warp scans forward from the state saved before it, and then
// scans the state's gradient backward from the one that the later window left, all in registers.
// Shuffles add dB and dC over the warp's channels, and the first threads add them over the block's
// warps, in a fixed order. add_gradients() adds the tiles.
//
// Shared memory: the addresses of arrays; per warp, B and C of a window of several channels, a tile
// for rows that vectors cannot read, and the values that every lane keeps between windows; per
// block, two buffers of the warps' sums of dB and dC, so that one barrier per window suffices, and
// two of the maps of windows that warps share; then per warp whole rows, if they are dense, or two
// windows of them, one of which is being copied, if they are vectors. In these rows, gradients take
// the places of u, delta and z. Bound by instructions, about 100 per (channel, step), and nearly as
// much by memory, or by latency if windows have one channel.
#pragma once

#include "../kit/shuffle.cuh"
#include "../kit/update_gradient.cuh"
#include "scan.cuh"

namespace selective_scan::cuda::dstate1 {

/// Adds up the lanes that hold the same steps of different channels. A long window has one channel,
/// so its lanes only hand over their values.
__device__ __forceinline__ void sum_over_channels(const Items& dB, const Items& dC, int lane,
                                                  WarpSums<LongWindow>& sums) {
  Pack<float, 2 * kItems> pairs;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    pairs.v[2 * i] = dB[i];
    pairs.v[2 * i + 1] = dC[i];
  }
  store_pack(sums + lane * 2 * kItems, pairs);
}
__device__ __forceinline__ void sum_over_channels(const Items& dB, const Items& dC, int lane,
                                                  WarpSums<WideWindow>& sums) {
  constexpr int kChannelLanes = WideWindow::kChannelLanes;
  static_assert(kChannelLanes == 4, "channels are bits 2 to 4 of the lane");
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

/// A warp's view of shared memory.
template <class Shape>
struct BackwardMemory {
  const TileOrigins& origins;
  StepMap* maps;          // of all warps, twice, if they share windows
  WarpSums<Shape>* sums;  // of all warps, twice
  WindowRecord& record;
  WarpShared<Shape>& own;
  char* rows;  // dense or staged
};

template <class Storage, class Shape>
class BackwardTile {
  using Window = dstate1::Window<Shape>;
  using Access = RowAccess<Storage, Shape>;
  using Row = BackwardRows::Number;
  using Staged = StagedWindow<Storage, Shape>;
  static constexpr int kSteps = Shape::kSteps;
  static constexpr int kChannelLanes = Shape::kChannelLanes;
  static constexpr int kWarps = Shape::kWarps;
  /// True if the next window is copied to shared memory while one is scanned.
  static constexpr bool kHasStages = kIsStaged<Storage>;
  static constexpr bool kIsInShared = kIsDense<Storage> || kHasStages;

 public:
  __device__ BackwardTile(const BackwardArgs& args, const ChannelTile& tile,
                          const BackwardMemory<Shape>& memory)
      : args_(args),
        params_(args.params),
        tile_(tile),
        memory_(memory),
        dense_(args.strides, static_cast<int>(args.params.seqlen)),
        staged_(args.strides),
        lane_(threadIdx.x % kWarpSize),
        warp_(threadIdx.x / kWarpSize),
        seqlen_(static_cast<int>(args.params.seqlen)),
        lane_offset_(Access::lane_offset(staged_.lane_strides(), lane_)),
        saved_(static_cast<const float*>(args.params.states) +
               tile.batch * num_saved_states(seqlen_) * args.params.dim + channel()),
        B_(args.params.B, tile, last_number() * kSteps, -Shape::kRoundSteps),
        C_(args.params.C, tile, last_number() * kSteps, -Shape::kRoundSteps) {}

  __device__ void run() {
    const bool has_dense_rows = kIsDense<Storage> && first_channel() < tile_.channels;
    if (has_dense_rows) {
      for_rows(args_.inputs, [&](int row) {
        dense_.fetch(memory_.rows, row, memory_.origins.inputs[row] + window_offset(), lane_);
      });
      __pipeline_commit();
    }
    // The slowest loads are started first.
    if constexpr (kHasStages) stage(last_number(), staged_at_);
    const auto fetch_projections = [&](int number) {
      const int left = number >= 0 ? seqlen_ - number * kSteps : 0;
      return Projected{B_.fetch(left), C_.fetch(left)};
    };
    Projected projections = fetch_projections(last_number());
    float start = fetch_start(last_number());
    begin();
    if constexpr (kIsDense<Storage>) __pipeline_wait_prior(0);
    int buffer = 0;
#pragma unroll 1
    for (int number = last_number(); number >= 0; number -= kWarps) {
      const int next_number = number - kWarps;
      __syncwarp();
      if constexpr (kHasStages) stage(next_number, other_stage());
      const Projected own = projections;
      B_.put(own.B, memory_.own.B);
      C_.put(own.C, memory_.own.C);
      if constexpr (kHasStages) __pipeline_wait_prior(1);
      __syncwarp();
      const float next_start = fetch_start(next_number);
      projections = fetch_projections(next_number);
      Items dB, dC;
      scan(number, start, own, memory_.maps + buffer * args_.warps, dB, dC);
      if constexpr (kHasStages) store_staged(number);
      start = next_start;
      sum_over_channels(dB, dC, lane_, memory_.sums[buffer * args_.warps + warp_]);
      __syncthreads();
      add_warps(buffer, (number - rank()) * kSteps);
      buffer ^= 1;
    }
    end();
    if (has_dense_rows) {
      __syncwarp();
      for_rows(args_.gradients, [&](int row) {
        dense_.store(memory_.rows, row, memory_.origins.gradients[row] + window_offset(), lane_);
      });
    }
  }

 private:
  struct Projected {
    typename Projection<Storage, Shape>::Bits B, C;
  };

  static __device__ int rank() { return round_rank<Shape>(); }
  /// Returns the number of the warp's window in the last round, which may lie past the end of the
  /// sequence. Windows are numbered along time.
  __device__ int last_number() const {
    return (ceil_div(seqlen_, Shape::kRoundSteps) - 1) * kWarps + rank();
  }
  /// Returns the warp's first channel within the tile; channel() returns the lane's among all
  /// channels.
  __device__ int first_channel() const { return warp_ / kWarps * Shape::kChannels; }
  __device__ int64_t channel() const {
    return tile_.first_channel + first_channel() + lane_ / kChannelLanes;
  }
  __device__ bool exists() const {
    return first_channel() + lane_ / kChannelLanes < tile_.channels;
  }
  /// Returns the existing part of a window: nothing before the first one.
  __device__ Window window(int number) const {
    return {number >= 0 ? tile_.channels - first_channel() : 0, seqlen_ - number * kSteps, lane_};
  }

  /// Returns the bytes from the tile's first channel to the warp's.
  __device__ int window_offset() const {
    return first_channel() * static_cast<int>(args_.strides.channel);
  }
  __device__ int step_offset(int number) const { return number * kSteps * args_.strides.step; }
  /// Returns the address of the lane's part of a row of one of the arrays.
  __device__ char* address(char* const (&arrays)[BackwardRows::kAll], Row row, int number) const {
    if constexpr (kHasStages) {
      return staged_row(staged_at_, row) + (staged_.origin() + lane_offset_);
    } else if constexpr (kIsDense<Storage>) {
      return dense_.origin(memory_.rows, row) + (step_offset(number) + lane_offset_);
    } else {
      return arrays[row] + (window_offset() + step_offset(number) + lane_offset_);
    }
  }
  /// Calls move(row) for the arrays that are present.
  template <class Move>
  static __device__ __forceinline__ void for_rows(const Sequence (&arrays)[BackwardRows::kAll],
                                                  const Move& move) {
#pragma unroll
    for (int row = 0; row < BackwardRows::kAll; ++row) {
      if (arrays[row].present()) move(row);
    }
  }

  __device__ char* staged_row(int stage_at, int row) const {
    return memory_.rows + (stage_at + row * Staged::kBytes);
  }
  /// Returns the place of the window that is not being scanned.
  __device__ int other_stage() const {
    return BackwardRows::count(args_.inputs[Row::kZ].present()) * Staged::kBytes - staged_at_;
  }
  /// Starts to copy a window.
  __device__ void stage(int number, int stage_at) const {
    const auto pieces = staged_.pieces(window(number));
    const auto origins = load_pack<char*, BackwardRows::kAll>(memory_.origins.inputs);
    const int offset = window_offset() + step_offset(number);
    for_rows(args_.inputs, [&](int row) {
      Staged::fetch(pieces, staged_row(stage_at, row), origins.v[row] + offset);
    });
    __pipeline_commit();
  }
  /// Stores gradients from the places of their inputs, which the next window may then take.
  __device__ void store_staged(int number) {
    const auto pieces = staged_.pieces(window(number));
    const auto origins = load_pack<char*, BackwardRows::kAll>(memory_.origins.gradients);
    const int offset = window_offset() + step_offset(number);
    __syncwarp();
    for_rows(args_.gradients, [&](int row) {
      Staged::store(pieces, staged_row(staged_at_, row), origins.v[row] + offset);
    });
    staged_at_ = other_stage();
  }

  __device__ void begin() const {
    const ArrayView* const views[] = {&params_.dlast_state, &params_.A, &params_.D,
                                      &params_.delta_bias, &params_.initial_state};
    constexpr int kViews = sizeof(views) / sizeof(*views);
    float values[kViews];
    RawElement raw[kViews];
#pragma unroll
    for (int i = 0; i < kViews; ++i) {
      const ArrayView& view = *views[i];
      raw[i] = {view, tile_.batch * view.batch + channel() * view.channel, exists()};
    }
#pragma unroll
    for (int i = 0; i < kViews; ++i) values[i] = raw[i].value(views[i]->dtype);
    memory_.record.sums[lane_] = {values[0], 0.0f, 0.0f, 0.0f};
    memory_.record.channels[lane_] = {values[1], values[2], values[3], values[4]};
  }

  /// Returns the saved state before a window other than the first, else 0.
  __device__ float fetch_start(int number) const {
    const bool is_behind = kWarps > 1 && number * kSteps >= seqlen_;
    const bool has_start = number > 0 && !is_behind && exists();
    return has_start ? saved_[(number * Shape::kChunks - 1) * params_.dim] : 0.0f;
  }

  /// Computes the warp's part of dB and dC, and stores the window's other gradients.
  __device__ void scan(int number, float start_of_window, const Projected& projections,
                       StepMap* maps, Items& dB, Items& dC) const {
    const Window window = this->window(number);
    LaneSums sums = memory_.record.sums[lane_];
    const LaneChannel own = memory_.record.channels[lane_];
    const auto pole = make_pole<DeviceMath>(own.A);
    const auto fetch = [&](Row row) {
      const char* const source = address(memory_.origins.inputs, row, number) + opaque(0);
      return Access::fetch(staged_.lane_strides(), source, window);
    };
    const auto convert = [&](const typename Access::Raw& raw, Items& items) {
      Access::convert(staged_.lane_strides(), raw, window, memory_.own.tile, items);
    };
    const auto load = [&](Row row, Items& items) { convert(fetch(row), items); };
    const auto store = [&](Row row, const Items& items) {
      char* const target = address(memory_.origins.gradients, row, number);
      Access::store(staged_.lane_strides(), target, window, memory_.own.tile, items);
    };

    Items u, delta, slope;
    const auto raw_u = fetch(Row::kU), raw_delta = fetch(Row::kDelta);
    convert(raw_u, u);
    convert(raw_delta, delta);
    make_window_steps<Access::kSize>(window, own.delta_bias, params_.delta_softplus, delta, slope);

    Items B, C;
    const auto read_projections = [&](int first_step) {
      B_.read(projections.B, memory_.own.B, first_step, B);
      C_.read(projections.C, memory_.own.C, first_step, C);
    };
    read_projections(window.first_step());
    Coefficients<float> value[kItems];
    StepMap map = StepMap::identity();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      value[i] = coefficients<kCommonMethod>(delta[i], pole);
      map.offset =
          value[i].abar * map.offset + held_input<kCommonMethod>(delta[i], u[i], value[i]) * B[i];
      map.product *= value[i].abar;
    }
    float state = number > 0 ? start_of_window : own.initial_state;
    const float start = carry_through_lanes<Shape, false>(map, state).entered;
    Items h;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      h[i] = value[i].abar * (i == 0 ? start : h[i - 1]) +
             held_input<kCommonMethod>(delta[i], u[i], value[i]) * B[i];
    }

    Items dy = {};
    if (args_.inputs[Row::kDout].present()) load(Row::kDout, dy);
    if (args_.inputs[Row::kZ].present()) {
      Items z;
      load(Row::kZ, z);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const float s = device_sigmoid(z[i]);
        const float y = C[i] * h[i] + own.D * u[i];
        const float dout = dy[i];
        dy[i] = dout * (z[i] * s);
        z[i] = dout * y * silu_derivative(z[i], s);
      }
      store(Row::kZ, z);
    }

    StepMap back = StepMap::identity();
#pragma unroll
    for (int i = kItems - 1; i >= 0; --i) {
      back.offset = value[i].abar * (back.offset + dy[i] * C[i]);
      back.product *= value[i].abar;
    }
    float later = carry_through_lanes<Shape, true>(back, sums.state_gradient, maps).entered;
    float dA = 0.0f, dD = 0.0f, ddelta_bias = 0.0f;
    // Read or converted again, since as floats in registers these would crowd out the values kept
    // for the steps.
    read_projections(opaque(window.first_step()));
    if constexpr (kIsInShared) load(Row::kU, u);
#pragma unroll
    for (int i = kItems - 1; i >= 0; --i) {
      const float dh = later + dy[i] * C[i];
      const auto update = backpropagate_update<kCommonMethod>(delta[i], u[i], pole, value[i], B[i],
                                                              i == 0 ? start : h[i - 1], dh);
      later = update.carry;
      dA += update.dA;
      dB[i] = update.dB;
      dC[i] = dy[i] * h[i];
      dD += dy[i] * u[i];
      u[i] = update.du + own.D * dy[i];
      delta[i] = update.ddelta * slope[i];
      ddelta_bias += delta[i];
    }
    store(Row::kU, u);
    store(Row::kDelta, delta);
    sums.dA += dA;
    sums.dD += dD;
    sums.ddelta_bias += ddelta_bias;
    memory_.record.sums[lane_] = sums;
  }

  /// Adds the sums of the block's warps, in the order of the warps.
  __device__ void add_warps(int buffer, int first_step) const {
    for (int i = threadIdx.x; i < 2 * Shape::kRoundSteps; i += blockDim.x) {
      const int step = first_step + i / 2;
      if (step >= seqlen_) continue;
      const int rank = kWarps > 1 ? i / (2 * kSteps) : 0;
      float sum = 0.0f;
      for (int warp = rank; warp < args_.warps; warp += kWarps) {
        sum += memory_.sums[buffer * args_.warps + warp][i - rank * 2 * kSteps];
      }
      const int64_t row = (tile_.tile * params_.batch + tile_.batch) * params_.groups + tile_.group;
      static_cast<float*>(args_.workspace.dBC_partials)[(row * seqlen_ + step) * 2 + i % 2] = sum;
    }
  }

  __device__ void end() const {
    LaneSums own = memory_.record.sums[lane_];
    if constexpr (kWarps > 1) {
      __syncthreads();
      if (rank() > 0) return;
      for (int i = 1; i < kWarps; ++i) {
        const LaneSums& other = (&memory_.record)[i].sums[lane_];
        own.dA += other.dA;
        own.dD += other.dD;
        own.ddelta_bias += other.ddelta_bias;
      }
    }
    const bool writes = exists() && lane_ % kChannelLanes == 0;
    const auto store_sum = [&](void* sums, float value) {
      if (sums == nullptr) return;
      const float sum = sum_over_lanes<Shape>(value);
      if (writes) static_cast<float*>(sums)[tile_.batch * params_.dim + channel()] = sum;
    };
    store_sum(args_.workspace.dA, own.dA);
    store_sum(args_.workspace.dD, own.dD);
    store_sum(args_.workspace.ddelta_bias, own.ddelta_bias);
    if (writes && params_.dinitial_state.present()) {
      store_component(
          params_.dinitial_state,
          tile_.batch * params_.dinitial_state.batch + channel() * params_.dinitial_state.channel,
          own.state_gradient);
    }
  }

  const BackwardArgs& args_;
  const BackwardParams& params_;
  const ChannelTile& tile_;
  BackwardMemory<Shape> memory_;
  DenseWindow dense_;
  Staged staged_;
  int staged_at_ = 0;  // where the scanned window begins in the rows
  int lane_;
  int warp_;
  int seqlen_;
  int lane_offset_;
  const float* saved_;
  Projection<Storage, Shape> B_;
  Projection<Storage, Shape> C_;
};

template <class Storage, class Shape>
__global__ void __launch_bounds__(kMaxBackwardWarps<Shape>* kWarpSize,
                                  backward_blocks<Shape>(kHasVectors<Storage>))
    backward_kernel(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(16) char memory[];
  const int warp = threadIdx.x / kWarpSize;
  auto& origins = *reinterpret_cast<TileOrigins*>(memory);
  auto* records = reinterpret_cast<WindowRecord*>(&origins + 1);
  auto* maps = reinterpret_cast<StepMap*>(records + args.warps);
  auto* sums = reinterpret_cast<WarpSums<Shape>*>(maps + kMaps<Shape> * args.warps);
  auto* shared = reinterpret_cast<WarpShared<Shape>*>(sums + 2 * args.warps);
  const DenseWindow dense(args.strides, static_cast<int>(args.params.seqlen));
  constexpr int kSize = RowAccess<Storage, Shape>::kSize;
  const int row_bytes = kIsStaged<Storage> ? kStages * staged_bytes<Shape>(kSize) : dense.bytes();
  char* const rows =
      reinterpret_cast<char*>(shared + args.warps) +
      warp * BackwardRows::count(args.inputs[BackwardRows::kZ].present()) * row_bytes;
  const ChannelTile tile(args.params, blockIdx.x, args.tiles,
                         args.warps / Shape::kWarps * Shape::kChannels);
  if (threadIdx.x < BackwardRows::kAll) {
    const auto origin = [&](const Sequence& sequence) {
      return tile.origin(sequence) + tile.first_channel * args.strides.channel;
    };
    origins.inputs[threadIdx.x] = origin(args.inputs[threadIdx.x]);
    origins.gradients[threadIdx.x] = origin(args.gradients[threadIdx.x]);
  }
  __syncthreads();
  BackwardTile<Storage, Shape>(args, tile, {origins, maps, sums, records[warp], shared[warp], rows})
      .run();
}

template <class Storage, class Shape>
cudaError_t Kernels<Storage, Shape>::backward(const BackwardArgs& args, const LaunchShape& shape,
                                              cudaStream_t stream) {
  return launch_kernel(backward_kernel<Storage, Shape>, shape, stream, args);
}

}  // namespace selective_scan::cuda::dstate1
