// The work of teams of warps per (channel, step), outside the sweeps: rows in shared memory, filled
// for all warps of a team, and gradients, computed from the sums of all warps. See
// team_backward.cuh.
#pragma once

#include "backward_rows.cuh"
#include "group_finish.cuh"

namespace selective_scan::cuda::streamed {

/// Returns the offset of the sums over a warp's lanes of a step group's parts: those of steps 2·p
/// and 2·p + 1 of a channel are adjacent, and those of all channels for one p begin at 64·p bytes.
/// For the later steps, the order of the channels differs, which spreads the reads of a task over
/// the banks.
template <class Shape>
__device__ __forceinline__ int group_part(int channel, int step) {
  const int pair = step / 2 % (kSweepSteps / 2);
  return pair * Shape::kPartPair + (channel ^ (pair & 2) << 1) * 8 + step % 2 * 4;
}

/// Sums a step group's parts over the lanes of each channel of a warp. A lane takes two steps.
template <class Shape>
class GroupSums {
  static_assert(kSweepSteps == 2 * Shape::kParts);
  using Pair = Pack<float, 2>;

 public:
  __device__ __forceinline__ GroupSums(int warp_at, int lane, bool has_y) : has_y_(has_y) {
    const int channel = lane & (Shape::kChannels - 1);
    const int step = (lane >> Shape::kChannelBits) * 2;
    const int quad = step / kBlockSteps;
    const int within = step % kBlockSteps * 4;
    const int planes = warp_at + Shape::kPlanes;
    from_ = opaque(GroupPlanes<Shape>::quad_slot(planes, channel, quad) + within);
    from_swizzled_ = opaque(GroupPlanes<Shape>::quad_slot(planes, channel, quad ^ 1) + within);
    to_ = opaque(planes + group_part<Shape>(channel, step));
  }

  /// To be called when all lanes have stored their parts. Afterwards they may store those of the
  /// next group.
  __device__ __forceinline__ void run(int group) const {
    Pair sums[3];
    sum_parts<Shape>(from_, from_swizzled_, has_y_, sums);
    __syncwarp();
    const int to = to_ - group * Shape::kGroupParts;
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      if (k == 2 && !has_y_) break;
      shared_store(to + k * Shape::kPart, sums[k]);
    }
  }

 private:
  bool has_y_;
  int from_;
  int from_swizzled_;
  int to_;  // for group 0; the other groups lie before it
};

/// The rows that a warp moves: those of a part of its team's channels.
template <class Shape, int kSize, Method kMethod, LaneMap kMap>
class TeamRows {
  static constexpr int kItems = Shape::kRowChannels;
  static constexpr float kFromInput = static_cast<float>(Formula<kMethod>::kInputScale);
  static constexpr float kFromPoles =
      static_cast<float>(Formula<kMethod>::kXScale) / pole_scale<kMethod, float>;
  static constexpr bool kAlongSteps = kMap == LaneMap::kSteps;
  using Cursor = RowCursor<kItems, kSize>;
  using Values = Slice<kItems>;
  using Raw = RawSlice<kItems>;

 public:
  /// Starts at chunk `chunk` of the sequence. `channels` and `first_channel` are those of the team.
  __device__ __forceinline__ TeamRows(const BackwardArgs& args, const TeamLayout<Shape>& layout,
                                      int team, int slice, int lane, int channels, int64_t batch,
                                      int64_t first_channel, int64_t chunk)
      : args_(args),
        team_(layout.team(team)),
        first_warp_(layout.warp(team, 0)),
        own_(layout.warp(team, slice)),
        lane_(lane),
        first_row_(slice * kItems),
        slice_(LaneSlice::make<kItems>(kMap, args.row(Row::kU), lane, channels - first_row_)) {
    if (lane < kRowArrays) {
      const RowArray& array = args.rows[lane];
      // A chunk's gradients are stored after the preceding chunk has been fetched.
      const int64_t first_chunk = chunk + (lane >= static_cast<int>(Row::kDu) ? 1 : 0);
      addresses()[lane] = array.data + batch * array.batch +
                          (first_channel + first_row_) * array.channel +
                          first_chunk * (kChunk * array.step);
    } else if (lane == kRowArrays) {
      const int64_t row =
          (batch * num_saved_states(args.params.seqlen) + chunk - 1) * args.params.dim +
          first_channel;
      addresses()[lane] = static_cast<char*>(args.params.states) + row * state_bytes();
    }
    if (lane < kItems) {
      const auto load = [&](const ArrayView& view, int at) {
        const int64_t channel = first_channel + first_row_ + lane;
        const float value = lane < slice_.channels_left && view.present()
                                ? load_component<float>(view, channel * view.channel)
                                : 0.0f;
        *reinterpret_cast<float*>(shared_memory() + own_ + Shape::kChannelValues + at + lane * 4) =
            value;
      };
      load(args.params.D, 0);
      load(args.params.delta_bias, kItems * 4);
    }
    __syncwarp();
  }

  /// Moves on to the preceding chunk. A __syncwarp() must separate this from reads of addresses.
  __device__ __forceinline__ void step_back() const {
    if (lane_ <= kRowArrays) {
      addresses()[lane_] -=
          lane_ < kRowArrays ? kChunk * args_.rows[lane_].step : args_.params.dim * state_bytes();
    }
  }

  /// Returns the saved states of the team's first channel before the chunk that fetch() takes next.
  __device__ __forceinline__ const char* saved_states() const { return address(kRowArrays); }

  /// Starts loading the chunk.
  __device__ __forceinline__ void fetch(int steps) {
    const auto load = [&](Row which) {
      return cursor(which).fetch(args_.row(which), slice_, steps);
    };
    raw_delta_ = load(Row::kDelta);
    raw_dout_ = load(Row::kDout);
    if (has_z()) raw_z_ = load(Row::kZ);
    raw_u_ = load(Row::kU);
  }

  /// Prefetches the chunk that fetch() takes next into the L2 cache.
  __device__ __forceinline__ void prefetch() const {
    const auto bring = [&](Row which) {
      if constexpr (kAlongSteps) {
        if (slice_.channel < slice_.channels_left) cursor(which).prefetch_here();
      } else {
        cursor(which).prefetch(args_.row(which), slice_);
      }
    };
    bring(Row::kDelta);
    bring(Row::kDout);
    if (has_z()) bring(Row::kZ);
    bring(Row::kU);
  }

  /// Computes the rows from the values that fetch() has loaded.
  __device__ __forceinline__ void convert(int steps) {
    delta_ = values_of(Row::kDelta, raw_delta_);
#pragma unroll
    for (int i = 0; i < kItems; ++i) delta_.v[i] += channel_value(i, kItems * 4);
    make_steps_by_series<kSize>(delta_, args_.params.delta_softplus, kept_.slope);
    if (steps < kChunk || slice_.channels_left < kItems) {
      really_branch();
      if (!slice_.exists(steps)) {
        // A missing step leaves the state unchanged and contributes nothing.
        delta_ = {};
        kept_.slope = {};
      }
    }
    kept_.u = values_of(Row::kU, raw_u_);
    dy_ = values_of(Row::kDout, raw_dout_);
    if (has_z()) {
      const Values z = values_of(Row::kZ, raw_z_);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        kept_.gate.v[i] = pass_gate<kSize>(z.v[i], dy_.v[i]);
      }
    }
  }

  /// Stores the rows to shared memory.
  __device__ __forceinline__ void put() const {
    Values input = kept_.u;
    if constexpr (!kGoesByIncrements<kMethod>) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) input.v[i] = delta_.v[i] * kept_.u.v[i];
    }
    to_row(delta_, Shape::kDelta);
    to_row(input, kInputRow<Shape, kMethod>);
    to_row(dy_, Shape::kDy);
    keep(kept_.u, Shape::kKeptU);
    keep(kept_.slope, Shape::kKeptSlope);
    if (has_z()) keep(kept_.gate, Shape::kKeptGate);
  }

  /// Computes the gradients of the chunk whose rows are filled. To be called when all warps have
  /// swept it.
  __device__ __forceinline__ void finish() {
    const Values w_b = sum_over_warps(0);
    const Values x_A = sum_over_warps(1);
    const Values delta = from_row(Shape::kDelta);
    const Values dy = from_row(Shape::kDy);
    const Values u = kept(Shape::kKeptU);
    const Values slope = kept(Shape::kKeptSlope);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const float of_input = kFromInput * w_b.v[i];
      if constexpr (kGoesByIncrements<kMethod>) {
        du_.v[i] = of_input + channel_value(i, 0) * dy.v[i];
        ddelta_.v[i] = x_A.v[i] * slope.v[i];
      } else {
        du_.v[i] = delta.v[i] * of_input + channel_value(i, 0) * dy.v[i];
        ddelta_.v[i] = (u.v[i] * of_input + kFromPoles * x_A.v[i]) * slope.v[i];
      }
      dD_[i % kOwn] += dy.v[i] * u.v[i];
      ddelta_bias_[i % kOwn] += ddelta_.v[i];
    }
    if (has_z()) {
      const Values y = sum_over_warps(2);
      const Values gate = kept(Shape::kKeptGate);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        dz_.v[i] = (y.v[i] + channel_value(i, 0) * u.v[i]) * gate.v[i];
      }
    }
  }

  /// Stores the gradients, which are those of the chunk after the one that was fetched last.
  __device__ __forceinline__ void store(int steps) const {
    const auto move = [&](Row which, Values values) {
      if (against_memory()) {
        really_branch();
        values = reversed(values);
      }
      cursor(which).store(args_.row(which), slice_, steps, values);
    };
    move(Row::kDu, du_);
    move(Row::kDdelta, ddelta_);
    if (has_z()) move(Row::kDz, dz_);
  }

  /// Calls function(channel of the team, dD, ddelta_bias) from one lane for each channel.
  template <class Function>
  __device__ __forceinline__ void each_channel(const Function& function) {
    constexpr int kLanes = kAlongSteps ? kWarpSize / kItems : kWarpSize;  // of a channel
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int mask = 1; mask < kLanes; mask *= 2) {
        dD_[i] += __shfl_xor_sync(kFullMask, dD_[i], mask);
        ddelta_bias_[i] += __shfl_xor_sync(kFullMask, ddelta_bias_[i], mask);
      }
      if (lane_ % kLanes == 0 && channel_of(i) < slice_.channels_left) {
        function(first_row_ + channel_of(i), dD_[i], ddelta_bias_[i]);
      }
    }
  }

 private:
  /// The channels of which a lane holds values: one channel, or one value of each.
  static constexpr int kOwn = kAlongSteps ? 1 : kItems;

  __device__ __forceinline__ bool has_z() const { return args_.row(Row::kZ).present(); }
  __device__ __forceinline__ bool against_memory() const {
    return kAlongSteps && slice_.is_backward;
  }
  __device__ __forceinline__ int64_t state_bytes() const {
    return args_.params.dstate * static_cast<int64_t>(sizeof(float));
  }
  /// Returns the number of the warp's row that a lane's i-th value belongs to.
  __device__ __forceinline__ int channel_of(int i) const {
    return kAlongSteps ? slice_.channel : i;
  }
  /// Returns the addresses of the warp's first row at the first step of a chunk, as WarpRows does.
  __device__ __forceinline__ char** addresses() const {
    return reinterpret_cast<char**>(shared_memory() + own_ + Shape::kAddresses);
  }
  __device__ __forceinline__ char* address(int array) const {
    char* const result = addresses()[array];
    __builtin_assume(__isGlobal(result));
    return result;
  }
  __device__ __forceinline__ Cursor cursor(Row which) const {
    const RowArray& array = args_.row(which);
    int offset;
    if constexpr (kAlongSteps) {
      offset = slice_.channel * static_cast<int>(array.channel) +
               (slice_.is_backward ? -(slice_.step + kItems - 1) : slice_.step) * kSize;
    } else {
      offset = slice_.step * static_cast<int>(array.step);
    }
    return Cursor(address(static_cast<int>(which)) + offset);
  }
  /// Returns the values in the order of the scan.
  __device__ __forceinline__ Values values_of(Row which, const Raw& raw) const {
    Values values = Cursor::to_values(args_.row(which), slice_, raw);
    if (against_memory()) {
      really_branch();
      values = reversed(values);
    }
    return values;
  }
  __device__ __forceinline__ float channel_value(int i, int at) const {
    return *reinterpret_cast<const float*>(shared_memory() + own_ + Shape::kChannelValues + at +
                                           channel_of(i) * 4);
  }
  __device__ __forceinline__ float* row(int i, int at) const {
    return reinterpret_cast<float*>(shared_memory() + team_ + at) +
           (first_row_ + channel_of(i)) * kRowStride + slice_.step;
  }
  __device__ __forceinline__ void to_row(const Values& values, int at) const {
    if constexpr (kAlongSteps) {
      store_pack(row(0, at), bit_cast<Pack<float, kItems>>(values));
    } else {
#pragma unroll
      for (int i = 0; i < kItems; ++i) *row(i, at) = values.v[i];
    }
  }
  __device__ __forceinline__ Values from_row(int at) const {
    Values values;
    if constexpr (kAlongSteps) {
      values = bit_cast<Values>(load_pack<float, kItems>(row(0, at)));
    } else {
#pragma unroll
      for (int i = 0; i < kItems; ++i) values.v[i] = *row(i, at);
    }
    return values;
  }
  __device__ __forceinline__ void keep(const Values& values, int at) const {
    shared_store(own_ + Shape::kKept + at + lane_ * kItems * 4,
                 bit_cast<Pack<float, kItems>>(values));
  }
  __device__ __forceinline__ Values kept(int at) const {
    return bit_cast<Values>(
        shared_load<float, kItems>(own_ + Shape::kKept + at + lane_ * kItems * 4));
  }
  /// Sums the warps' parts of du (kind 0), ddelta (1) or y (2).
  __device__ __forceinline__ Values sum_over_warps(int kind) const {
    constexpr int kHeld = kAlongSteps ? 2 : 1;  // contiguous values
    Values sum{};
#pragma unroll
    for (int i = 0; i < kItems; i += kHeld) {
      const int step = slice_.step + (kAlongSteps ? i : 0);
      const int at = first_warp_ + Shape::kPlanes + kind * Shape::kPart -
                     step / kSweepSteps * Shape::kGroupParts +
                     group_part<Shape>(first_row_ + channel_of(i), step);
#pragma unroll
      for (int w = 0; w < Shape::kWarps; ++w) {
        const auto values = shared_load<float, kHeld>(at + w * Shape::kWarpBytes);
#pragma unroll
        for (int j = 0; j < kHeld; ++j) sum.v[i + j] += values.v[j];
      }
    }
    return sum;
  }

  const BackwardArgs& args_;
  int team_;        // the team's part of shared memory
  int first_warp_;  // that of its first warp
  int own_;         // this warp's part
  int lane_;
  int first_row_;  // the first of this warp among the team's channels
  LaneSlice slice_;
  Raw raw_u_, raw_delta_, raw_z_, raw_dout_;
  Values delta_, dy_;
  struct {
    Values u, slope, gate;
  } kept_;
  Values du_, ddelta_, dz_;
  // The lane's sums over all of its steps.
  float dD_[kOwn] = {};
  float ddelta_bias_[kOwn] = {};
};

}  // namespace selective_scan::cuda::streamed
