// The work items of a block and a lane, and the transfers of arrays of any dtype and layout to and
// from shared memory. Both passes build on this file.
#pragma once

#include <type_traits>

#include "../../core/method_table.h"
#include "../kit/geometry.cuh"
#include "../kit/update_gradient.cuh"
#include "kernels.h"
#include "rows.cuh"

namespace selective_scan::cuda::floor {

/// The steps of one sequence that a block works on.
struct Steps {
  int64_t sequence;  // its number in arrays of states
  int64_t first, end;
  int64_t whole_first, whole_end;  // of the sequence
  int64_t saved;                   // the row of its first saved state

  /// Returns the row of the saved state before a chunk that is not the first one.
  __device__ int64_t saved_before(int64_t step) const {
    return saved + (step - whole_first) / kChunk - 1;
  }
};

/// Returns arrays of states in shared memory. Only through this function does the compiler see that
/// they are in shared memory.
template <class T>
__device__ __forceinline__ T* shared() {
  return reinterpret_cast<T*>(shared_memory());
}

/// B or C of a lane's state at the steps of a chunk.
template <class T>
struct Projection {
  int first;
  int stride;  // 0 if it is constant

  __device__ T operator[](int t) const { return shared<T>()[first + t * stride]; }
};

/// A block and its work item: a tile of channels of a batch entry and, if time is cut, a segment of
/// time. Each of the block's lanes has a channel, and one state of this channel in each slice.
template <class T>
struct Block {
  using R = real_t<T>;

  const ScanParams& params;
  const Launch& launch;
  const int64_t index;
  const WorkItem item = launch.geometry.work_items >> 32 == 0
                            ? work_item(params, launch.geometry, index)
                            : work_item<uint64_t>(params, launch.geometry, index);
  const int lanes = launch.geometry.lanes();  // per channel
  const int slices = num_slices(params, launch.geometry);
  const LaneRole role = lane_role(threadIdx.x % kWarpSize, launch.geometry.lane_bits);
  const int lane = role.part;  // its number among the channel's lanes
  const int tile_channel = threadIdx.x / kWarpSize * launch.geometry.warp_channels() + role.channel;
  const int64_t channel = item.first_channel + tile_channel;
  const int place = tile_channel * lanes + lane;     // within a step of the plane
  const bool exists = tile_channel < item.channels;  // true if the channel exists
  const int64_t row = item.segment * params.batch + item.batch;

  /// Returns the end of the numbers that a block walks through. Packed sequences are dealt out to
  /// the segments: a block takes every `geometry.segments`-th sequence, from number `item.segment`
  /// on. Other calls have only this number, which is that of the segment.
  __device__ int64_t end_sequence() const {
    return params.packed.present() ? params.packed.count : item.segment + 1;
  }
  __device__ Steps steps_of(int64_t number) const {
    if (!params.packed.present()) {
      const int64_t saved = item.batch * num_saved_states(params.seqlen);
      return {item.batch, item.begin, item.end, 0, params.seqlen, saved};
    }
    const int64_t begin = params.packed.begin(number), end = params.packed.end(number);
    return {number, begin, end, begin, end, first_saved_state(begin)};
  }

  // --- states: arrays (row, channel, state) and (channel, state) ---

  __device__ int state(int slice) const { return slice * lanes + lane; }
  /// Returns whether the lane's state exists. If not, its results are added to nothing and stored
  /// nowhere.
  __device__ bool has_state(int slice) const { return exists && state(slice) < params.dstate; }
  __device__ int64_t state_at(const ArrayView& view, int64_t row, int slice) const {
    return row * view.batch + channel * view.channel + state(slice) * view.state;
  }
  __device__ T load_state(const ArrayView& view, int64_t row, int slice) const {
    return has_state(slice) ? load_component<T>(view, state_at(view, row, slice)) : T{};
  }
  __device__ void store_state(const ArrayView& view, int64_t row, int slice, T value) const {
    if (!has_state(slice) || !view.present()) return;
    store_component(view, state_at(view, row, slice), value);
  }
  /// Returns an array in scratch memory with room for `states` states per channel.
  __device__ ArrayView own_array(void* data, int64_t states) const {
    constexpr DType kDType = std::is_same_v<R, double> ? DType::kFloat64 : DType::kFloat32;
    constexpr int kReals = sizeof(T) / sizeof(R);
    return {data, kDType, params.dim * states * kReals, states * kReals, 0, kReals, 0, 1};
  }
  __device__ Pole<T> pole(int slice) const {
    return make_pole<DeviceMath>(load_state(params.A, 0, slice), params.method);
  }

  /// Returns the place of a value that the lane keeps of a slice.
  __device__ int kept_at(Kept what, int slice) const {
    return launch.layout.kept + (what * slices + slice) * blockDim.x + threadIdx.x;
  }
  __device__ T& kept(Kept what, int slice) const { return shared<T>()[kept_at(what, slice)]; }
  /// Initializes the lane's state (in the backward pass, its gradient) with the one that enters the
  /// block's steps: zero for a summary, the segment's if time is cut, else the sequence's row of
  /// `view`.
  __device__ void enter(ArrayView view, int64_t sequence) const {
    const bool is_segment = launch.workspace.segments.offsets != nullptr;
    if (is_segment) view = own_array(launch.workspace.segments.offsets, params.dstate);
    for (int slice = 0; slice < slices; ++slice) {
      kept(kFactor, slice) = one<T>();
      kept(kState, slice) =
          launch.is_summary ? T{} : load_state(view, is_segment ? row : sequence, slice);
    }
  }
  /// Stores the summary or, if the sequence ends here, the state that leaves it to its row of
  /// `view`.
  __device__ void leave(const ArrayView& view, int64_t sequence, bool ends) const {
    const SegmentStates& segments = launch.workspace.segments;
    for (int slice = 0; slice < slices; ++slice) {
      const T state = kept(kState, slice);
      if (ends && !launch.is_summary) store_state(view, sequence, slice, state);
      if (!launch.is_summary) continue;
      store_state(own_array(segments.offsets, params.dstate), row, slice, state);
      store_state(own_array(segments.factors, params.dstate), row, slice, kept(kFactor, slice));
    }
  }

  // --- rows: arrays (batch, channel, step) ---

  __device__ R* rows(Row which) const {
    return reinterpret_cast<R*>(shared_memory()) + which * launch.layout.row_array;
  }
  /// Returns the row of the lane's channel.
  __device__ R* own_row(Row which) const { return rows(which) + tile_channel * kElementRow; }

  /// Returns the rows of input_delta.
  __device__ R* input_steps() const { return rows(launch.layout.input_delta); }
  __device__ R* own_input_steps() const { return own_row(launch.layout.input_delta); }

  /// Returns the block's part of such arrays: the chunk from step `first` on, at most up to `end`.
  __device__ ElementTile chunk(int64_t first, int64_t end) const {
    const int row_bits = __ffs(blockDim.x) - 1 - launch.geometry.lane_bits;
    const int steps = static_cast<int>(end - first < kChunk ? end - first : kChunk);
    return {item.batch, item.first_channel, item.channels, row_bits, first, steps};
  }
  /// Returns the channel's D or delta_bias.
  __device__ static R of_channel(const ArrayView& view, int64_t c) {
    return load_component<R>(view, c * view.channel);
  }
  __device__ R make_step(R delta, int64_t c) const {
    return step_size(delta + of_channel(params.delta_bias, c), params.delta_softplus);
  }
  /// Returns y + D·u.
  __device__ R output(int64_t c, int at) const {
    return rows(kY)[at] + of_channel(params.D, c) * rows(kU)[at];
  }

  // --- B and C: arrays (batch, group, state, step) or (channel, state) ---

  __device__ bool is_variable(Kept which) const {
    return which == kB ? params.variable_B : params.variable_C;
  }
  __device__ Projection<T> projection(Kept which, int slice) const {
    if (!is_variable(which)) return {kept_at(which, slice), 0};
    const int first = launch.layout.projections + (which == kB ? 0 : kChunk * (lanes + 1));
    return {first + lane, lanes + 1};
  }
  __device__ void load_projection(const ArrayView& view, Kept which, const ElementTile& chunk,
                                  int slice) const {
    if (!is_variable(which)) {
      kept(which, slice) = load_state(view, 0, slice);
      return;
    }
    T* const target = shared<T>() + projection(which, slice).first - lane;
    const int64_t first = item.batch * view.batch + item.group * view.group +
                          slice * lanes * view.state + chunk.first_step * view.step;
    RowOrder(view.state, view.step, launch.geometry.lane_bits).visit([&](int n, int t) {
      if (slice * lanes + n >= params.dstate) return;
      const bool is_step = t < chunk.steps;
      const int64_t at = first + n * view.state + t * view.step;
      target[t * (lanes + 1) + n] = is_step ? load_component<T>(view, at) : T{};
    });
  }
};

/// Takes a lane's state through the steps of a chunk, kBlockSteps at a time. visit(step, states,
/// abar) receives each block of steps: its first step, the states after its steps, and abar of its
/// steps. Past the last step of a chunk, delta, u, B and C are zero, which leaves the state
/// unchanged.
template <Method kMethod, class T, class Visit>
__device__ __forceinline__ T sweep(const Block<T>& block, const ElementTile& chunk,
                                   const Pole<T>& pole, const Projection<T>& B, T h,
                                   const Visit& visit) {
  const real_t<T>* const delta = block.own_row(kDelta);
  const real_t<T>* const u = block.own_row(kU);
  const bool has_input_delta = block.params.input_delta.present();
  for (int t = 0; t < chunk.steps; t += kBlockSteps) {
    Pack<T, kBlockSteps> states, abar;
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      if (has_input_delta) {
        const Hold<T> hold = hold_of<kMethod>(delta[t + j], pole);
        abar.v[j] = hold.a;
        states.v[j] = (block.own_input_steps()[t + j] * u[t + j]) * (hold.b * B[t + j]);
      } else {
        const auto value = coefficients<kMethod>(delta[t + j], pole);
        abar.v[j] = value.abar;
        states.v[j] = held_input<kMethod>(delta[t + j], u[t + j], value) * B[t + j];
      }
    }
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) h = states.v[j] = abar.v[j] * h + states.v[j];
    visit(t, states, abar);
  }
  return h;
}

/// Sums values[j] over the lanes that share a channel. Afterwards, a lane holds the sums of kHeld
/// steps from held_step() on: halving the values while doubling the lanes takes 3 shuffles for 4
/// values over 4 lanes.
template <int kHeld, class R>
__device__ __forceinline__ Pack<R, kHeld> sum_over_parts(const Pack<R, kBlockSteps>& values,
                                                         int part, int lane_bits) {
  static_assert(kBlockSteps == 4);
  if constexpr (kHeld == 4) {
    return values;
  } else {
    const bool upper = part & 1;
    Pack<R, 2> half;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const R keep = upper ? values.v[2 + j] : values.v[j];
      const R give = upper ? values.v[j] : values.v[2 + j];
      half.v[j] = keep + __shfl_xor_sync(kFullMask, give, part_bit_mask(0, lane_bits));
    }
    if constexpr (kHeld == 2) {
      return half;
    } else {
      const bool odd = part & 2;
      const R give = odd ? half.v[0] : half.v[1];
      R sum = odd ? half.v[1] : half.v[0];
      sum += __shfl_xor_sync(kFullMask, give, part_bit_mask(1, lane_bits));
#pragma unroll
      for (int bit = 2; bit < kWarpBits; ++bit) {
        if (bit >= lane_bits) break;
        sum += __shfl_xor_sync(kFullMask, sum, part_bit_mask(bit, lane_bits));
      }
      return {sum};
    }
  }
}

/// Returns the first step of a block whose sums a lane holds.
template <int kHeld>
__device__ __forceinline__ int held_step(int part) {
  return kHeld == 4 ? 0 : kHeld == 2 ? 2 * (part & 1) : 2 * (part & 1) + ((part >> 1) & 1);
}

/// Adds the contributions of a slice's states to the sums over states of the steps from t on, which
/// are in the channel's row.
template <class T, class R>
__device__ __forceinline__ void gather(const Block<T>& block, Row which, int slice, int t,
                                       Pack<R, kBlockSteps> parts) {
  if (!block.has_state(slice)) parts = {};
  const int lane_bits = block.launch.geometry.lane_bits;
  const auto add = [&]<int kHeld>() {
    const auto held = sum_over_parts<kHeld>(parts, block.lane, lane_bits);
    if (block.lane >= kBlockSteps) return;  // it repeats the sums of an earlier lane
    R* const sums = block.own_row(which) + t + held_step<kHeld>(block.lane);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) sums[j] = slice == 0 ? held.v[j] : sums[j] + held.v[j];
  };
  if (lane_bits >= 2) {
    add.template operator()<1>();
  } else if (lane_bits == 1) {
    add.template operator()<2>();
  } else {
    add.template operator()<4>();
  }
}

}  // namespace selective_scan::cuda::floor
