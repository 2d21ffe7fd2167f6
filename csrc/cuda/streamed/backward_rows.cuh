// What the streamed backward scan does per (channel, step), outside the sweeps: from global memory
// to rows in shared memory, and from the sweeps' sums to the gradients.
#pragma once

#include "backward_kernels.h"
#include "backward_sweeps.cuh"

namespace selective_scan::cuda::streamed {

/// softplus(x), and its derivative sigmoid(x).
template <int kSize>
__device__ __forceinline__ float softplus_and_slope(float x, float& slope) {
  const float v = exp_for<kSize>(-fabsf(x));
  slope = (x < 0.0f ? v : 1.0f) * reciprocal(1.0f + v);
  return softplus_of(x, v);
}

/// Of the values of all lanes, which become softplus of themselves: see softplus_in_place().
template <int kSize, class Values>
__device__ __forceinline__ void softplus_and_slope_in_place(Values& values, Values& slope) {
  constexpr int kCount = sizeof(values.v) / sizeof(float);
  if (all_are_small(values)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float v = exp_for<kSize>(values.v[i]);
      slope.v[i] = v * reciprocal(1.0f + v);
      values.v[i] = small_log1p(v);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values.v[i] = softplus_and_slope<kSize>(values.v[i], slope.v[i]);
    }
  }
}

/// Takes a gradient back through the gate z·sigmoid(z): dout becomes dy. Returns what y is
/// multiplied with for dz, dout·s·(1 + z·(1 - s)).
template <int kSize>
__device__ __forceinline__ float pass_gate(float z, float& gradient) {
  const float s = reciprocal(1.0f + exp_for<kSize>(-z));
  const float part = gradient * s;
  gradient = part * z;
  return part + gradient * (1.0f - s);
}

/// A warp's rows of one chunk.
template <class Shape, int kSize, LaneMap kMap>
class WarpRows {
  using Cursor = RowCursor<Shape::kChannels, kSize>;
  using Values = Slice<Shape::kChannels>;
  using Raw = RawSlice<Shape::kChannels>;

 public:
  /// Begins with chunk `chunk` of the sequence. `shared` is the warp's part of shared memory.
  __device__ __forceinline__ WarpRows(const BackwardArgs& args, int shared, int lane, int channels,
                                      int64_t batch, int64_t first_channel, int64_t chunk)
      : args_(args),
        shared_(shared),
        lane_(lane),
        slice_(LaneSlice::make<Shape::kChannels>(kMap, args.row(Row::kU), lane, channels)) {
    if (lane < kRowArrays) {
      // In place of an array that is absent u: which ones are needed is asked last.
      const RowArray& array = args.rows[args.rows[lane].present() ? lane : 0];
      // Gradients of a chunk are stored after the one before it was fetched.
      const int64_t first_chunk = chunk + (lane >= static_cast<int>(Row::kDu) ? 1 : 0);
      addresses()[lane] = array.data + batch * array.batch + first_channel * array.channel +
                          first_chunk * (kChunk * array.step);
    } else if (lane == kRowArrays) {
      const int64_t row =
          (batch * num_saved_states(args.params.seqlen) + chunk - 1) * args.params.dim +
          first_channel;
      addresses()[lane] = static_cast<char*>(args.params.states) + row * state_bytes();
    }
    if (lane < Shape::kChannels) {
      const auto load = [&](const ArrayView& view, int at) {
        const float value = lane < channels && view.present()
                                ? load_component<float>(view, (first_channel + lane) * view.channel)
                                : 0.0f;
        *reinterpret_cast<float*>(shared_memory() + shared_ + Shape::kChannelValues + at +
                                  lane * 4) = value;
      };
      load(args.params.D, 0);
      load(args.params.delta_bias, Shape::kChannels * 4);
    }
    __syncwarp();
  }

  __device__ __forceinline__ float D(int channel) const { return channel_value(channel, 0); }

  /// Moves on to the chunk before. Reads of addresses and this must be apart by a __syncwarp().
  __device__ __forceinline__ void step_back() {
    if constexpr (kMap == LaneMap::kSteps) {
      steps_back_ += kChunk;
    } else if (lane_ <= kRowArrays) {
      addresses()[lane_] -=
          lane_ < kRowArrays ? kChunk * args_.rows[lane_].step : args_.params.dim * state_bytes();
    }
  }

  /// The saved states before the chunk that fetch() takes next: those of the warp's first channel.
  __device__ __forceinline__ const char* saved_states() const {
    return address(kRowArrays) - steps_back_ / kChunk * (args_.params.dim * state_bytes());
  }

  /// Starts loading the chunk; `kGradients` as in to_shared().
  template <bool kGradients>
  __device__ __forceinline__ void fetch(int steps) {
    if constexpr (kMap == LaneMap::kSteps && kSize == 2) {  // fp32 has no registers for that
      const Cursor cursors[] = {cursor(Row::kDelta), cursor(Row::kDout), cursor(Row::kZ),
                                cursor(Row::kU)};
      raw_delta_ = raw_dout_ = raw_z_ = raw_u_ = {};
      if (!slice_.exists(steps)) return;
      const auto load = [&](int i, Raw& raw) { cursors[i].load(raw); };
      load(0, raw_delta_);
      load(1, raw_dout_);
      if (has_z()) load(2, raw_z_);
      if constexpr (kGradients) load(3, raw_u_);
      return;
    }
    const auto load = [&](Row which, Raw& raw) {
      raw = cursor(which).fetch(args_.row(which), slice_, steps);
    };
    load(Row::kDelta, raw_delta_);
    load(Row::kDout, raw_dout_);
    if (has_z()) load(Row::kZ, raw_z_);
    if constexpr (kGradients) load(Row::kU, raw_u_);
  }

  /// Brings the chunk that fetch() takes next to the L2 cache.
  __device__ __forceinline__ void prefetch() const {
    if constexpr (kMap == LaneMap::kSteps) {
      const Cursor cursors[] = {cursor(Row::kDelta), cursor(Row::kDout), cursor(Row::kU),
                                cursor(Row::kZ)};
      if (slice_.channel < slice_.channels_left) {
#pragma unroll
        for (const Cursor& cursor : cursors) cursor.prefetch_here();
      }
      return;
    }
    const int64_t step = args_.row(Row::kU).step;
    if (step == kSize || step == -kSize) {
      prefetch_rows();
    } else if (slice_.channels_left > 0) {
      cursor(Row::kDelta).prefetch_here();
      cursor(Row::kDout).prefetch_here();
      cursor(Row::kU).prefetch_here();
      if (has_z()) cursor(Row::kZ).prefetch_here();
    }
  }

  /// Fills the rows from what fetch() has loaded; without kGradients, only those of Δ and dy.
  template <bool kGradients>
  __device__ __forceinline__ void to_shared(int steps) {
    if (against_memory()) {
      really_branch();
      reverse(raw_delta_.words);
      reverse(raw_dout_.words);
      if (has_z()) reverse(raw_z_.words);
      if constexpr (kGradients) reverse(raw_u_.words);
    }
    Values delta, dy, u, z, slope;
    constexpr bool kTogether = kMap == LaneMap::kSteps;  // else that takes too many registers
    if constexpr (kTogether) {
      with_element_type([&](const LaneSlice& slice) {
        delta = Cursor::to_values(args_.row(Row::kDelta), slice, raw_delta_);
        if constexpr (kGradients) u = Cursor::to_values(args_.row(Row::kU), slice, raw_u_);
        dy = Cursor::to_values(args_.row(Row::kDout), slice, raw_dout_);
        z = Cursor::to_values(args_.row(Row::kZ), slice, raw_z_);
      });
    } else {
      delta = Cursor::to_values(args_.row(Row::kDelta), slice_, raw_delta_);
    }
#pragma unroll
    for (int i = 0; i < Shape::kChannels; ++i) {
      delta.v[i] +=
          channel_value(kMap == LaneMap::kSteps ? slice_.channel : i, Shape::kChannels * 4);
    }
    if (args_.params.delta_softplus) {
      softplus_and_slope_in_place<kSize>(delta, slope);
    } else {
      really_branch();
#pragma unroll
      for (int i = 0; i < Shape::kChannels; ++i) slope.v[i] = 1;
    }
    if (steps < kChunk || slice_.channels_left < Shape::kChannels) {
      really_branch();
      if (!slice_.exists(steps)) {
        // Such a step leaves the state as it is, and nothing of it counts.
        delta = {};
        slope = {};
      }
    }
    to_row(delta, Shape::kDelta);
    if constexpr (kGradients) {
      to_row(slope, Shape::kSlope);
      if constexpr (!kTogether) u = Cursor::to_values(args_.row(Row::kU), slice_, raw_u_);
      to_row(u, Shape::kU);
#pragma unroll
      for (int i = 0; i < Shape::kChannels; ++i) u.v[i] *= delta.v[i];
      to_row(u, Shape::kDeltaU);
    }
    if constexpr (!kTogether) dy = Cursor::to_values(args_.row(Row::kDout), slice_, raw_dout_);
    if (has_z()) {
      if constexpr (!kTogether) z = Cursor::to_values(args_.row(Row::kZ), slice_, raw_z_);
      Values gate;
#pragma unroll
      for (int i = 0; i < Shape::kChannels; ++i) {
        gate.v[i] = pass_gate<kSize>(z.v[i], dy.v[i]);
      }
      if constexpr (kGradients) keep_gate(gate);
    }
    to_row(dy, Shape::kDy);
  }

  /// Stores the gradients of the chunk behind the one that was fetched last. They lie in place of
  /// Δ·u, Δ and dy.
  __device__ __forceinline__ void store(int steps) const {
    if constexpr (kMap == LaneMap::kSteps && kSize == 2) {
      // All arrays together: one branch for the element type, and no array waits for another.
      const Cursor cursors[3] = {cursor(Row::kDu), cursor(Row::kDdelta), cursor(Row::kDz)};
      Values values[3] = {from_row(Shape::kDeltaU), from_row(Shape::kDelta)};
      if (has_z()) {
        values[2] = from_row(Shape::kDy);
        apply_gate(values[2]);
      }
      typename Cursor::Words words[3];
      with_element_type([&](const LaneSlice& slice) {
#pragma unroll
        for (int i = 0; i < 3; ++i) words[i] = Cursor::to_words(slice, values[i]);
      });
      if (against_memory()) {
        really_branch();
#pragma unroll
        for (int i = 0; i < 3; ++i) reverse(words[i].v);
      }
      if (!slice_.exists(steps)) return;
      cursors[0].store_words(words[0]);
      cursors[1].store_words(words[1]);
      if (has_z()) cursors[2].store_words(words[2]);
      return;
    }
    const auto move = [&](Row which, int at, bool gated) {
      Values values = from_row(at);
      if (gated) apply_gate(values);
      if constexpr (kMap == LaneMap::kSteps) {
        auto words = Cursor::to_words(slice_, values);
        if (against_memory()) {
          really_branch();
          reverse(words.v);
        }
        if (slice_.exists(steps)) cursor(which).store_words(words);
      } else {
        cursor(which).store(args_.row(which), slice_, steps, values);
      }
    };
    move(Row::kDu, Shape::kDeltaU, false);
    move(Row::kDdelta, Shape::kDelta, false);
    if (has_z()) move(Row::kDz, Shape::kDy, true);
  }

 private:
  __device__ __forceinline__ bool has_z() const { return args_.row(Row::kZ).present(); }
  /// Where channels are not neighbours but steps are, lanes that lie along steps would all ask for
  /// the same lines. Here a lane takes one row of one array.
  __device__ __forceinline__ void prefetch_rows() const {
    constexpr int kLoaded = 4;  // the first ones
    constexpr int kSector = 32;
    const int which = lane_ / Shape::kChannels;
    const int channel = lane_ % Shape::kChannels;
    if (which >= kLoaded || channel >= slice_.channels_left) return;
    const RowArray& array = args_.rows[which];
    char* const row = address(which) + channel * static_cast<int>(array.channel);
    const int step = static_cast<int>(array.step);
#pragma unroll
    for (int i = 0; i < kChunk; i += kSector / kSize) Cursor(row + i * step).prefetch_here();
    Cursor(row + (kChunk - 1) * step).prefetch_here();
  }
  /// Calls `work` with the lane's slice, whose element type the compiler then knows: one branch for
  /// several arrays.
  template <class Work>
  __device__ __forceinline__ void with_element_type(const Work& work) const {
    if constexpr (kSize == 2) {
      LaneSlice slice = slice_;
      if (slice_.is_bfloat16) {
        slice.is_bfloat16 = true;
        work(slice);
      } else {
        slice.is_bfloat16 = false;
        work(slice);
      }
    } else {
      work(slice_);
    }
  }
  /// Of a channel's saved states.
  __device__ __forceinline__ int64_t state_bytes() const {
    return args_.params.dstate * (16 / Shape::kStates);
  }
  /// Whether a slice lies in memory against the order of the scan. Rows are in that order, and
  /// slices are turned round as packed words on their way from and to memory.
  __device__ __forceinline__ bool against_memory() const {
    return kMap == LaneMap::kSteps && slice_.is_backward;
  }
  /// Keeps the compiler from executing the instructions of a rare case always, under a predicate.
  /// To be called by all lanes of a warp together.
  static __device__ __forceinline__ void really_branch() { __syncwarp(); }
  template <int kWords>
  static __device__ __forceinline__ void reverse(uint32_t (&words)[kWords]) {
    constexpr int kUsed = Shape::kChannels * kSize / 4;
#pragma unroll
    for (int i = 0; i < kUsed / 2; ++i) {
      const uint32_t word = words[i];
      words[i] = words[kUsed - 1 - i];
      words[kUsed - 1 - i] = word;
    }
    if constexpr (kSize == 2) {
#pragma unroll
      for (int i = 0; i < kUsed; ++i) words[i] = __byte_perm(words[i], 0, 0x1032);
    }
  }
  /// Of the warp's first channel at the first step of a chunk, in every array and, behind these, in
  /// the saved states. They are kept where all lanes find them: in registers they would crowd out
  /// the sweeps' values. They are those of the first chunk, from where all arrays are as far, or,
  /// where arrays have steps of their own, of the present one: one lane each moves them on.
  __device__ __forceinline__ char** addresses() const {
    return reinterpret_cast<char**>(shared_memory() + shared_ + Shape::kAddresses);
  }
  __device__ __forceinline__ char* address(int array) const {
    char* const result = addresses()[array];
    __builtin_assume(__isGlobal(result));
    return result;
  }
  /// What is added to a warp's address fits 32 bits, see backward.cu.
  __device__ __forceinline__ Cursor cursor(Row which) const {
    const RowArray& array = args_.row(which);
    int offset;
    if constexpr (kMap == LaneMap::kSteps) {
      const int step = slice_.step - steps_back_;
      offset = slice_.channel * static_cast<int>(array.channel) +
               (slice_.is_backward ? -(step + Shape::kChannels - 1) : step) * kSize;
    } else {
      offset = slice_.step * static_cast<int>(array.step);
    }
    return Cursor(address(static_cast<int>(which)) + offset);
  }
  __device__ __forceinline__ float* rows(int at) const {
    return reinterpret_cast<float*>(shared_memory() + shared_ + at);
  }
  __device__ __forceinline__ float channel_value(int channel, int at) const {
    return rows(Shape::kChannelValues + at)[channel];
  }
  /// Between a slice, in the order of the scan, and a row.
  __device__ __forceinline__ void to_row(const Values& values, int at) const {
    float* const row = rows(at) + slice_.channel * kRowStride + slice_.step;
    if constexpr (kMap == LaneMap::kSteps) {
      store_pack(row, bit_cast<Pack<float, Shape::kChannels>>(values));
    } else {
#pragma unroll
      for (int i = 0; i < Shape::kChannels; ++i) row[i * kRowStride] = values.v[i];
    }
  }
  __device__ __forceinline__ Values from_row(int at) const {
    const float* const row = rows(at) + slice_.channel * kRowStride + slice_.step;
    if constexpr (kMap == LaneMap::kSteps) {
      return bit_cast<Values>(load_pack<float, Shape::kChannels>(row));
    } else {
      Values values;
#pragma unroll
      for (int i = 0; i < Shape::kChannels; ++i) values.v[i] = row[i * kRowStride];
      return values;
    }
  }

  /// The gate as the lane holds it: 16 bytes of all lanes side by side.
  static constexpr int kGateAccess = Shape::kChannels < 4 ? Shape::kChannels : 4;
  __device__ __forceinline__ void keep_gate(const Values& gate) const {
#pragma unroll
    for (int i = 0; i < Shape::kChannels; i += kGateAccess) {
      Pack<float, kGateAccess> pack;
#pragma unroll
      for (int k = 0; k < kGateAccess; ++k) pack.v[k] = gate.v[i + k];
      store_pack(rows(Shape::kGate) + i * kWarpSize + lane_ * kGateAccess, pack);
    }
  }
  __device__ __forceinline__ void apply_gate(Values& values) const {
#pragma unroll
    for (int i = 0; i < Shape::kChannels; i += kGateAccess) {
      const auto gate =
          load_pack<float, kGateAccess>(rows(Shape::kGate) + i * kWarpSize + lane_ * kGateAccess);
#pragma unroll
      for (int k = 0; k < kGateAccess; ++k) values.v[i + k] *= gate.v[k];
    }
  }

  const BackwardArgs& args_;
  int shared_;
  int lane_;
  LaneSlice slice_;
  int steps_back_ = 0;  // from `addresses`
  Raw raw_u_{}, raw_delta_{}, raw_z_{}, raw_dout_{};
};

/// Where a lane's parts of a group's sums lie, as byte offsets. Fours of neighbouring lanes have
/// their quads of steps in another order, which spreads them over the banks.
template <class Shape>
struct GroupPlanes {
  static constexpr int kSwizzle = 4;  // lanes

  static __device__ __forceinline__ int quad_slot(int planes, int lane, int quad) {
    return planes + lane * Shape::kPlaneRow + ((quad ^ lane / kSwizzle) & 1) * 16;
  }

  int own[kGroupBlocks];  // where this lane puts block b of the group

  __device__ __forceinline__ GroupPlanes(int planes, int lane) {
    own[0] = opaque(quad_slot(planes, lane, 0));
    own[1] = opaque(quad_slot(planes, lane, 1));
  }

  template <int kBlock>
  __device__ __forceinline__ void put(const BlockParts& parts, bool has_z) const {
    shared_store(own[kBlock], parts.w_b);
    shared_store(own[kBlock] + Shape::kPlane, parts.x_A);
    if (has_z) shared_store(own[kBlock] + 2 * Shape::kPlane, parts.y);
  }
};

/// Sums a group's parts over the lanes of each channel, and puts du, ddelta and y + D·u in place of
/// Δ·u, Δ and dy. A lane takes some steps of its own channel.
template <class T, class Shape, Method kMethod>
class GroupFinish {
  static constexpr int kHeld = kGroupSteps / Shape::kParts;
  using Values = Pack<float, kHeld>;

 public:
  __device__ __forceinline__ GroupFinish(int planes, int lane, float D, bool has_z)
      : D_(D), has_z_(has_z) {
    const int channel = lane & (Shape::kChannels - 1);
    const int step = (lane >> Shape::kChannelBits) * kHeld;
    row_ = opaque(step * 4);
    const int quad = step / kBlockSteps & 1;
    const int within = step % kBlockSteps * 4;
    from_ = opaque(GroupPlanes<Shape>::quad_slot(planes, channel, quad) + within);
    from_swizzled_ = opaque(GroupPlanes<Shape>::quad_slot(planes, channel, quad ^ 1) + within);
  }

  /// `row` is the lane's row at the first step of the group. kIncrements: the sums are what
  /// ExactIncrements gives.
  template <bool kIncrements>
  __device__ __forceinline__ void run(int row) {
    row += row_;
    Values sums[3] = {};
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      const bool swizzled = part * Shape::kChannels / GroupPlanes<Shape>::kSwizzle % 2 != 0;
      const int at =
          (swizzled ? from_swizzled_ : from_) + part * Shape::kChannels * Shape::kPlaneRow;
#pragma unroll
      for (int k = 0; k < 3; ++k) {
        if (k == 2 && !has_z_) break;
        const auto values = shared_load<float, kHeld>(at + k * Shape::kPlane);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          sums[k].v[i] = part == 0 ? values.v[i] : sums[k].v[i] + values.v[i];
        }
      }
    }
    const auto delta = shared_load<float, kHeld>(row + Shape::kDelta);
    const auto dy = shared_load<float, kHeld>(row + Shape::kDy);
    const auto u = shared_load<float, kHeld>(row + Shape::kU);
    const auto slope = shared_load<float, kHeld>(row + Shape::kSlope);
    using F = Formula<kMethod>;
    constexpr float kFromInput = static_cast<float>(F::kInputScale);
    constexpr float kFromPoles = static_cast<float>(F::kXScale) / pole_scale<kMethod, T>;
    Values du, ddelta, y;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const float w_b = kFromInput * sums[0].v[i];
      if constexpr (kIncrements) {
        du.v[i] = w_b + D_ * dy.v[i];
        ddelta.v[i] = sums[1].v[i] * slope.v[i];
      } else {
        du.v[i] = delta.v[i] * w_b + D_ * dy.v[i];
        ddelta.v[i] = (u.v[i] * w_b + kFromPoles * sums[1].v[i]) * slope.v[i];
      }
      y.v[i] = kOutputScale<T> * sums[2].v[i] + D_ * u.v[i];
      dD += dy.v[i] * u.v[i];
      ddelta_bias += ddelta.v[i];
    }
    shared_store(row + Shape::kDeltaU, du);
    shared_store(row + Shape::kDelta, ddelta);
    if (has_z_) shared_store(row + Shape::kDy, y);
  }

  // The lane's sums over all of its steps.
  float dD = 0;
  float ddelta_bias = 0;

 private:
  float D_;
  bool has_z_;
  int row_;
  int from_;
  int from_swizzled_;
};

}  // namespace selective_scan::cuda::streamed
