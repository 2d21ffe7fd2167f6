// Backward scan for few states of few short rows, as one image or one time series has.
//
// Mapping. A block owns a tile of channels of one group. Each of its warps owns two states of one
// channel, so all states of a channel are scanned at the same time, and walks through time in
// windows of 256 steps, last to first; a lane holds kItems consecutive steps. As in the scan of one
// state, the warp scans forward from the saved state, and then scans the state's gradient backward.
// Through shared memory, the channel's first warp adds what all states contribute to du, ddelta and
// y, and the block's threads add dB and dC over the tile's channels, in a fixed order.
// add_gradients() adds the tiles.
//
// Shared memory of a warp: a tile in which elements change lanes, and its contributions to dB and
// dC of its states and to the rows of its channel. Bound by latency.
#pragma once

#include "../kit/update_gradient.cuh"
#include "scan.cuh"

namespace selective_scan::cuda::dstate1 {

/// Carries the states through the lanes as carry_through_lanes() does, all at a time.
template <bool kBackwards>
__device__ __forceinline__ void carry_states(StepMap (&own)[kWarpStates],
                                             float (&states)[kWarpStates],
                                             float (&entered)[kWarpStates]) {
  compose_lanes<LongWindow, kBackwards>(own);
#pragma unroll
  for (int n = 0; n < kWarpStates; ++n) {
    const LaneStates of_lane = states_of_lane<LongWindow, kBackwards>(own[n], states[n]);
    entered[n] = of_lane.entered;
    states[n] = of_last_lane<LongWindow, kBackwards>(of_lane.left);
  }
}

template <int kBytes>
class StatesTile {
  using Access = RowAccess<Scattered<kBytes>, LongWindow>;
  using Raw = typename Access::Raw;
  using Row = BackwardRows::Number;
  static constexpr int kSteps = LongWindow::kSteps;

 public:
  __device__ StatesTile(const StatesArgs& args, const ChannelTile& tile, StatesShared* shared)
      : args_(args),
        params_(args.params),
        tile_(tile),
        shared_(shared),
        warps_(channel_warps(static_cast<int>(args.params.dstate))),
        lane_(threadIdx.x % kWarpSize),
        warp_(threadIdx.x / kWarpSize),
        rank_(warp_ % warps_),
        first_state_(rank_ * kWarpStates),
        channel_(tile.first_channel + warp_ / warps_),
        exists_(warp_ / warps_ < tile.channels),
        seqlen_(static_cast<int>(args.params.seqlen)),
        B_(args.params.B, tile, last_window() * kSteps, -kSteps),
        C_(args.params.C, tile, last_window() * kSteps, -kSteps) {}

  __device__ void run() {
    // Everything that the kernel loads before its first result is asked for before anything waits.
    const auto of_channel = [&](const ArrayView& view) {
      return RawElement(view, channel_ * view.channel, exists_);
    };
    const ArrayView& A = params_.A;
    const ArrayView& last = params_.dlast_state;
    const RawElement D = of_channel(params_.D), delta_bias = of_channel(params_.delta_bias);
    const RawElement poles[] = {element(A, 0, 0), element(A, 0, 1)};
    const RawElement gradients[] = {element(last, tile_.batch, 0), element(last, tile_.batch, 1)};
    static_assert(kWarpStates == 2);
    float gradient[kWarpStates];
#pragma unroll 1
    for (int number = last_window(); number >= 0; --number) {
      const Inputs inputs = fetch(number);
      if (number == last_window()) {
        D_ = D.value(params_.D.dtype);
        delta_bias_ = delta_bias.value(params_.delta_bias.dtype);
#pragma unroll
        for (int n = 0; n < kWarpStates; ++n) {
          poles_[n] = make_pole<DeviceMath>(poles[n].value(A.dtype));
          gradient[n] = gradients[n].value(last.dtype);
        }
      }
      scan(number, inputs, gradient);
      B_.advance();
      C_.advance();
    }
    end(gradient);
  }

 private:
  __device__ int last_window() const { return ceil_div(seqlen_, kSteps) - 1; }
  __device__ bool has(int n) const { return exists_ && first_state_ + n < params_.dstate; }
  /// Returns the element of an array of states for one of the warp's states.
  __device__ RawElement element(const ArrayView& view, int64_t batch, int n) const {
    return {view, batch * view.batch + channel_ * view.channel + (first_state_ + n) * view.state,
            has(n)};
  }
  /// Returns the address of the lane's part of a window.
  __device__ char* address(const StridedSequence& sequence, int number) const {
    const SequenceStrides& strides = sequence.strides;
    return tile_.origin(sequence) + channel_ * strides.channel +
           (Access::lane_offset(strides, lane_) + number * kSteps * strides.step);
  }

  /// A window's input as it is in memory, and the states that enter it.
  struct Inputs {
    Raw u, delta, dout, z;
    typename AnyProjection<LongWindow>::Bits B[kWarpStates], C[kWarpStates];
    float states[kWarpStates];
  };
  __device__ Window<LongWindow> window_at(int number) const {
    return {exists_, seqlen_ - number * kSteps, lane_};
  }
  __device__ Inputs fetch(int number) const {
    const auto window = window_at(number);
    const auto fetch_row = [&](Row row) {
      const StridedSequence& sequence = args_.inputs[row];
      return sequence.present() ? Access::fetch(sequence.strides, address(sequence, number), window)
                                : Raw{};
    };
    Inputs inputs{fetch_row(Row::kU), fetch_row(Row::kDelta), fetch_row(Row::kDout),
                  fetch_row(Row::kZ)};
#pragma unroll
    for (int n = 0; n < kWarpStates; ++n) {
      const int left = has(n) ? window.steps : 0;
      inputs.B[n] = B_.fetch_state(left, first_state_ + n);
      inputs.C[n] = C_.fetch_state(left, first_state_ + n);
      inputs.states[n] = has(n) ? fetch_start(number, n) : 0.0f;
    }
    return inputs;
  }

  __device__ void scan(int number, const Inputs& inputs, float (&gradient)[kWarpStates]) {
    const auto window = window_at(number);
    const auto convert = [&](const Raw& raw, Items& items) {
      // All inputs have one type, and a window of one channel has one order, whatever the strides.
      Access::convert(args_.inputs[Row::kU].strides, raw, window, shared_[warp_].tile, items);
    };
    const auto store = [&](Row row, const Items& items) {
      const StridedSequence& sequence = args_.gradients[row];
      Access::store(sequence.strides, address(sequence, number), window, shared_[warp_].tile,
                    items);
    };

    Items u, delta, slope, dy;
    convert(inputs.u, u);
    convert(inputs.delta, delta);
    convert(inputs.dout, dy);
    make_window_steps<kBytes>(window, delta_bias_, params_.delta_softplus, delta, slope);
    const bool has_gate = args_.inputs[Row::kZ].present();
    if (has_gate) {
      Items z;
      convert(inputs.z, z);
#pragma unroll
      for (int i = 0; i < kItems; ++i) dy[i] *= z[i] * device_sigmoid(z[i]);
    }

    Items B[kWarpStates], C[kWarpStates], h[kWarpStates];
    Coefficients<float> value[kWarpStates][kItems];
    StepMap map[kWarpStates], back[kWarpStates];
#pragma unroll
    for (int n = 0; n < kWarpStates; ++n) {
      B_.convert(inputs.B[n], B[n]);
      C_.convert(inputs.C[n], C[n]);
      map[n] = back[n] = StepMap::identity();
    }
    const auto input = [&](int n, int i) {
      return held_input<kCommonMethod>(delta[i], u[i], value[n][i]) * B[n][i];
    };
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int n = 0; n < kWarpStates; ++n) {
        value[n][i] = coefficients<kCommonMethod>(delta[i], poles_[n]);
        map[n].offset = value[n][i].abar * map[n].offset + input(n, i);
        map[n].product *= value[n][i].abar;
      }
    }
    float state[] = {inputs.states[0], inputs.states[1]};
    float start[kWarpStates], later[kWarpStates];
    carry_states<false>(map, state, start);
    Items y = {}, du = {}, ddelta = {};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int n = 0; n < kWarpStates; ++n) {
        h[n][i] = value[n][i].abar * (i == 0 ? start[n] : h[n][i - 1]) + input(n, i);
        y[i] += C[n][i] * h[n][i];
      }
    }
#pragma unroll
    for (int i = kItems - 1; i >= 0; --i) {
#pragma unroll
      for (int n = 0; n < kWarpStates; ++n) {
        back[n].offset = value[n][i].abar * (back[n].offset + dy[i] * C[n][i]);
        back[n].product *= value[n][i].abar;
      }
    }
    carry_states<true>(back, gradient, later);
    StatesShared& own = shared_[warp_];
#pragma unroll
    for (int i = kItems - 1; i >= 0; --i) {
      Pack<float, 2 * kWarpStates> sums;
#pragma unroll
      for (int n = 0; n < kWarpStates; ++n) {
        const float dh = later[n] + dy[i] * C[n][i];
        const auto update = backpropagate_update<kCommonMethod>(
            delta[i], u[i], poles_[n], value[n][i], B[n][i], i == 0 ? start[n] : h[n][i - 1], dh);
        later[n] = update.carry;
        dA_[n] += update.dA;
        sums.v[n] = update.dB;
        sums.v[kWarpStates + n] = dy[i] * h[n][i];
        du[i] += update.du;
        ddelta[i] += update.ddelta;
      }
      store_pack(own.projections[place(window.first_step() + i)], sums);
    }
    if (rank_ > 0) {
      put(own.rows[0], du);
      put(own.rows[1], ddelta);
      if (has_gate) put(own.rows[2], y);
    }
    __syncthreads();
    add_projections(number * kSteps, min(window.steps, kSteps));
    if (rank_ == 0) {
      for (int other = 1; other < warps_; ++other) {
        const StatesShared& theirs = shared_[warp_ + other];
        add(theirs.rows[0], du);
        add(theirs.rows[1], ddelta);
        if (has_gate) add(theirs.rows[2], y);
      }
      if (has_gate) {
        Items z, dz;
        convert(inputs.z, z);
        convert(inputs.dout, dz);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          dz[i] *= (y[i] + D_ * u[i]) * silu_derivative(z[i], device_sigmoid(z[i]));
        }
        store(Row::kZ, dz);
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        du[i] += D_ * dy[i];
        ddelta[i] *= slope[i];
        dD_ += dy[i] * u[i];
        ddelta_bias_ += ddelta[i];
      }
      store(Row::kU, du);
      store(Row::kDelta, ddelta);
    }
    __syncthreads();  // before the next window's contributions take these places
  }

  __device__ float fetch_start(int number, int n) const {
    if (number == 0) {
      const ArrayView& view = params_.initial_state;
      return element(view, tile_.batch, n).value(view.dtype);
    }
    const int64_t saved =
        tile_.batch * num_saved_states(seqlen_) + number * LongWindow::kChunks - 1;
    return static_cast<const float*>(
        params_.states)[(saved * params_.dim + channel_) * params_.dstate + first_state_ + n];
  }

  /// Returns the place of a step's contributions, such that the lanes' steps fill all banks.
  static __device__ int place(int step) {
    const int lane = step / kItems;
    return lane * kItems + (step + lane) % kItems;
  }
  using SharedItems = float[kItems][kWarpSize];
  __device__ void put(SharedItems& shared, const Items& items) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) shared[i][lane_] = items[i];
  }
  __device__ void add(const SharedItems& shared, Items& items) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) items[i] += shared[i][lane_];
  }

  /// Adds dB and dC of a window over the tile's channels.
  __device__ void add_projections(int first_step, int steps) const {
    const int64_t row = (tile_.tile * params_.batch + tile_.batch) * params_.groups + tile_.group;
    for (int i = threadIdx.x; i < args_.padded_states / kWarpStates * kSteps; i += blockDim.x) {
      const int rank = i / kSteps, step = i % kSteps;
      if (step >= steps) continue;
      const int warps = rank < warps_ ? tile_.channels * warps_ : 0;  // padding has none
      Pack<float, 2 * kWarpStates> sum{};
      for (int warp = rank; warp < warps; warp += warps_) {
        const auto other =
            load_pack<float, 2 * kWarpStates>(shared_[warp].projections[place(step)]);
#pragma unroll
        for (int k = 0; k < 2 * kWarpStates; ++k) sum.v[k] += other.v[k];
      }
      float* const target = static_cast<float*>(args_.workspace.dBC_partials) +
                            (row * seqlen_ + first_step + step) * 2 * args_.padded_states +
                            rank * kWarpStates;
#pragma unroll
      for (int kind = 0; kind < 2; ++kind) {
        Pack<float, kWarpStates> of_kind;
#pragma unroll
        for (int n = 0; n < kWarpStates; ++n) of_kind.v[n] = sum.v[kind * kWarpStates + n];
        store_pack(target + kind * args_.padded_states, of_kind);
      }
    }
  }

  __device__ void end(const float (&gradient)[kWarpStates]) const {
    const int64_t row = tile_.batch * params_.dim + channel_;
    const auto store_sum = [&](void* sums, bool exists, int64_t at, float value) {
      const float sum = sum_over_lanes<LongWindow>(value);
      if (exists && sums != nullptr && lane_ == 0) static_cast<float*>(sums)[at] = sum;
    };
#pragma unroll
    for (int n = 0; n < kWarpStates; ++n) {
      store_sum(args_.workspace.dA, has(n), row * args_.padded_states + first_state_ + n, dA_[n]);
      const ArrayView& view = params_.dinitial_state;
      if (view.present() && has(n) && lane_ == 0) {
        store_component(
            view,
            tile_.batch * view.batch + channel_ * view.channel + (first_state_ + n) * view.state,
            gradient[n]);
      }
    }
    const bool is_first = exists_ && rank_ == 0;
    store_sum(args_.workspace.dD, is_first, row, dD_);
    store_sum(args_.workspace.ddelta_bias, is_first, row, ddelta_bias_);
  }

  const StatesArgs& args_;
  const BackwardParams& params_;
  const ChannelTile& tile_;
  StatesShared* shared_;  // of all warps
  int warps_;             // of a channel
  int lane_;
  int warp_;
  int rank_;  // among the channel's warps
  int first_state_;
  int64_t channel_;
  bool exists_;
  int seqlen_;
  AnyProjection<LongWindow> B_;
  AnyProjection<LongWindow> C_;
  Pole<float> poles_[kWarpStates];
  float D_, delta_bias_;
  float dA_[kWarpStates] = {}, dD_ = 0, ddelta_bias_ = 0;
};

template <int kBytes>
__global__ void __launch_bounds__(kMostStatesWarps* kWarpSize)
    states_kernel(const __grid_constant__ StatesArgs args) {
  extern __shared__ __align__(16) char memory[];
  const ChannelTile tile(args.params, blockIdx.x, args.tiles, args.tile_channels);
  StatesTile<kBytes>(args, tile, reinterpret_cast<StatesShared*>(memory)).run();
}

template <int kBytes>
cudaError_t States<kBytes>::backward(const StatesArgs& args, const LaunchShape& shape,
                                     cudaStream_t stream) {
  return launch_kernel(states_kernel<kBytes>, shape, stream, args);
}

}  // namespace selective_scan::cuda::dstate1
