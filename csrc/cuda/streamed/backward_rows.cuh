// The work of the streamed backward scan per (channel, step) before and after the sweeps: from
// arrays in global memory to rows in shared memory, and from rows to gradients in global memory.
#pragma once

#include "backward_kernels.h"
#include "backward_sweeps.cuh"
#include "row_copies.cuh"

namespace selective_scan::cuda::streamed {

/// Takes a gradient back through the gate z·sigmoid(z): dout becomes dy. Returns the factor of y in
/// dz, dout·s·(1 + z·(1 - s)).
template <int kSize>
__device__ __forceinline__ float pass_gate(float z, float& gradient) {
  const float s = sigmoid_for<kSize>(z);
  const float part = gradient * s;
  gradient = part * z;
  return part + gradient * (1.0f - s);
}

/// A warp's rows of one chunk. A lane's slice is consecutive steps of one channel
/// (LaneMap::kSteps), whatever the rows' layout in memory. Without kGradients, there are only rows
/// of Δ and dy. If kPacked, the chunks are those of packed sequences.
template <class Shape, Elements kElements, LaneMap kMap, bool kGradients, bool kPacked>
class WarpRows {
  static constexpr int kSize = size_of(kElements);
  static_assert(!kPacked || kMap != LaneMap::kSteps);
  using Chunk = std::conditional_t<kPacked, PackedChunk, int64_t>;
  static constexpr int kItems = Shape::kChannels;
  static constexpr bool kAlongSteps = kMap == LaneMap::kSteps;
  static constexpr bool kHasInputDelta = kGradients && Shape::kHasInputDelta;
  static constexpr int kArrays = kHasInputDelta ? kMostRowArrays : kRowArrays;
  using Copies = RowCopies<kItems, kSize, kMap>;
  using Cursor = RowCursor<kItems, kSize>;
  using Values = Slice<kItems>;
  using Raw = RawSlice<kItems>;

 public:
  /// Starts to fetch the first `steps` steps of the sequence's chunk `chunk`. `shared` is the
  /// warp's part of shared memory.
  __device__ __forceinline__ WarpRows(const BackwardArgs& args, int shared, int lane, int channels,
                                      int64_t batch, int64_t first_channel, Chunk chunk, int steps)
      : args_(args),
        shared_(shared),
        lane_(lane),
        slice_(LaneSlice::make<kItems>(LaneMap::kSteps, args.row(Row::kU), lane, channels)) {
    if constexpr (kSize == 2 && kElements != Elements::kTwoBytes) {
      slice_.is_bfloat16 = kElements == Elements::kBFloat16;
    }
    if (lane < kArrays) {
      // u stands in for an absent array: presence is checked only after address computations.
      const RowArray& array = args.rows[args.rows[lane].present() ? lane : 0];
      // A chunk's gradients are stored after the preceding chunk has been fetched.
      const bool is_gradient =
          lane >= static_cast<int>(Row::kDu) && lane != static_cast<int>(Row::kInputDelta);
      const int chunks_behind = is_gradient ? 1 : 0;
      if constexpr (kPacked) {
        address_at(lane) = array.at(0, first_channel, chunk.first_step + chunks_behind * kChunk);
      } else {
        address_at(lane) = array.at(batch, first_channel, (chunk + chunks_behind) * kChunk);
      }
    } else if (lane == kArrays) {
      int64_t row;
      if constexpr (kPacked) {
        row = (chunk.saved - 1) * args.params.dim + first_channel;
      } else {
        row = (batch * num_saved_states(args.params.seqlen) + chunk - 1) * args.params.dim +
              first_channel;
      }
      address_at(lane) = static_cast<char*>(args.params.states) + row * state_bytes();
    }
    const auto load = [&](const ArrayView& view) {
      return lane < channels && lane < kItems && view.present()
                 ? load_component<float>(view, (first_channel + lane) * view.channel)
                 : 0.0f;
    };
    __syncwarp();
    fetch(steps);
    fetch_late(steps);
    loaded_D_ = load(args.params.D);
    loaded_delta_bias_ = load(args.params.delta_bias);
  }
  /// Stores the channels' values, loaded meanwhile. To be called once before all else.
  __device__ __forceinline__ void keep_channel_values() {
    if (lane_ < kItems) {
      rows(Shape::kChannelValues)[lane_] = loaded_D_;
      rows(Shape::kChannelValues)[kItems + lane_] = loaded_delta_bias_;
    }
    __syncwarp();
  }

  __device__ __forceinline__ float D(int channel) const { return channel_value(channel, 0); }

  /// Moves on to the preceding chunk. A __syncwarp() must separate this from reads of addresses.
  __device__ __forceinline__ void step_back() {
    if constexpr (kAlongSteps) {
      steps_back_ += kChunk;
    } else if (lane_ <= kArrays) {
      address_at(lane_) -=
          lane_ < kArrays ? kChunk * args_.rows[lane_].step : args_.params.dim * state_bytes();
    }
  }

  /// Moves from one packed chunk to another, by separate distances for fetched arrays, stored
  /// arrays and states.
  __device__ __forceinline__ void step_back(int fetched_steps, int stored_steps, int saved_rows) {
    static_assert(kPacked);
    if (lane_ < kArrays) {
      const int steps = lane_ < static_cast<int>(Row::kDu) ? fetched_steps : stored_steps;
      address_at(lane_) -= steps * args_.rows[lane_].step;
    } else if (lane_ == kArrays) {
      address_at(lane_) -= saved_rows * (args_.params.dim * state_bytes());
    }
  }

  /// Returns the saved states of the warp's first channel before the chunk that fetch() takes next.
  __device__ __forceinline__ const char* saved_states() const {
    return address(kArrays) - steps_back_ / kChunk * (args_.params.dim * state_bytes());
  }

  /// Starts copying the chunk to the stage. To be called when no lane needs the stage's contents.
  __device__ __forceinline__ void fetch(int steps) const {
    if constexpr (kAlongSteps) {
      // The addresses come first, so that the copies follow each other closely.
      char* const delta = cursor(Row::kDelta);
      char* const dout = cursor(Row::kDout);
      char* const z = cursor(Row::kZ);
      char* const u = cursor(Row::kU);
      [[maybe_unused]] char* input_delta = nullptr;
      if constexpr (kHasInputDelta) input_delta = cursor(Row::kInputDelta);
      if (slice_.exists(steps)) {
        Copies::copy_slice(stage(Row::kDelta), slice_, delta);
        Copies::copy_slice(stage(Row::kDout), slice_, dout);
        if (has_z()) Copies::copy_slice(stage(Row::kZ), slice_, z);
        if constexpr (kGradients) {
          const auto copy_input = [&](Row which, char* source) {
            if constexpr (kHasLate) {
              Cursor(source).prefetch_here();
            } else {
              Copies::copy_slice(stage(which), slice_, source);
            }
          };
          copy_input(Row::kU, u);
          if constexpr (kHasInputDelta) copy_input(Row::kInputDelta, input_delta);
        }
      }
    } else {
      const auto copy = [&](Row which) {
        Copies::copy(stage(which), args_.row(which), address(which), lane_, steps, slice_);
      };
      const auto copy_input = [&](Row which) {
        if constexpr (kHasLate) {
          Copies::prefetch(args_.row(which), address(which), lane_, steps, slice_.channels_left);
        } else {
          copy(which);
        }
      };
      copy(Row::kDelta);
      copy(Row::kDout);
      if (has_z()) copy(Row::kZ);
      if constexpr (kGradients) copy_input(Row::kU);
      if constexpr (kHasInputDelta) copy_input(Row::kInputDelta);
    }
    commit_copies();
  }
  /// Fetches the arrays that have no room in the stage before the end of a chunk or pass through
  /// registers.
  __device__ __forceinline__ void fetch_late(int steps) {
    if constexpr (Copies::kHasElements) {
      for_elements([&](Row which, Raw& raw) {
        Copies::load_elements(args_.row(which), address(which), lane_, steps, slice_.channels_left,
                              raw);
      });
    } else if constexpr (kHasLate) {
      const auto copy = [&](Row which) {
        if constexpr (!kAlongSteps) {
          Copies::copy(stage(which), args_.row(which), address(which), lane_, steps, slice_);
        } else if (slice_.exists(steps)) {
          Copies::copy_slice(stage(which), slice_, cursor(which));
        }
      };
      copy(Row::kU);
      if constexpr (kHasInputDelta) copy(Row::kInputDelta);
      commit_copies();
    }
  }

  /// Fills the rows from the stage.
  __device__ __forceinline__ void to_shared(int steps) {
    if constexpr (Copies::kHasElements) {
      for_elements(
          [&](Row which, const Raw& raw) { Copies::stage_elements(stage(which), lane_, raw); });
    }
    wait_for_copies();
    if constexpr (!kAlongSteps) __syncwarp();
    Raw raw_delta, raw_dout, raw_z{}, raw_u, raw_input_delta;
    const auto load = [&](Row which, Raw& raw) {
      Copies::load(stage(which), slice_, args_.row(which), lane_, raw);
    };
    load(Row::kDelta, raw_delta);
    load(Row::kDout, raw_dout);
    if (has_z()) load(Row::kZ, raw_z);
    if constexpr (kGradients) load(Row::kU, raw_u);
    if constexpr (kHasInputDelta) load(Row::kInputDelta, raw_input_delta);
    if (against_memory()) {
      really_branch();
      reverse(raw_delta.words);
      reverse(raw_dout.words);
      if (has_z()) reverse(raw_z.words);
      if constexpr (kGradients) reverse(raw_u.words);
      if constexpr (kHasInputDelta) reverse(raw_input_delta.words);
    }
    Values delta, dy, u, z, slope;
    [[maybe_unused]] Values input_delta;
    with_typed_slice([&](const LaneSlice& slice) {
      delta = Cursor::to_values(args_.row(Row::kDelta), slice, raw_delta);
      if constexpr (kGradients) u = Cursor::to_values(args_.row(Row::kU), slice, raw_u);
      if constexpr (kHasInputDelta) {
        input_delta = Cursor::to_values(args_.row(Row::kInputDelta), slice, raw_input_delta);
      }
      dy = Cursor::to_values(args_.row(Row::kDout), slice, raw_dout);
      z = Cursor::to_values(args_.row(Row::kZ), slice, raw_z);
    });
    // A missing step leaves the state unchanged and contributes nothing.
    const bool all_exist = steps >= kChunk && slice_.channels_left >= kItems;
    const auto for_missing = [&](const auto& function) {
      if (all_exist) return;
      really_branch();
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (slice_.channel >= slice_.channels_left || slice_.step + i >= steps) function(i);
      }
    };
    for_missing([&](int i) {
      dy.v[i] = z.v[i] = 0;
      if constexpr (kGradients) u.v[i] = 0;
      if constexpr (kHasInputDelta) input_delta.v[i] = 0;
    });
#pragma unroll
    for (int i = 0; i < kItems; ++i) delta.v[i] += channel_value(slice_.channel, kItems * 4);
    make_steps_by_series<kSize>(delta, args_.params.delta_softplus, slope);
    for_missing([&](int i) { delta.v[i] = slope.v[i] = 0; });
    to_row(delta, Shape::kDelta);
    if constexpr (kGradients) {
      to_row(slope, Shape::kSlope);
      to_row(u, Shape::kU);
      if constexpr (kHasInputDelta) to_row(input_delta, Shape::kInputDelta);
#pragma unroll
      for (int i = 0; i < kItems; ++i) u.v[i] *= kHasInputDelta ? input_delta.v[i] : delta.v[i];
      to_row(u, Shape::kDeltaU);
    }
    if (has_z()) {
      Values gate;
#pragma unroll
      for (int i = 0; i < kItems; ++i) gate.v[i] = pass_gate<kSize>(z.v[i], dy.v[i]);
      if constexpr (kGradients) to_row(gate, Shape::kGate);
    }
    to_row(dy, Shape::kDy);
  }

  /// Stores the gradients of the chunk after the one that was fetched last. They have replaced the
  /// rows of Δ·u, Δ, dy and input_delta.
  __device__ __forceinline__ void store(int steps) const {
    if constexpr (kAlongSteps && kSize == 2) {
      // All arrays together: one branch for the element type, and no array waits for another.
      char* targets[kGradientArrays];
      for_gradients([&](int i, const Gradient& it) { targets[i] = cursor(it.row); });
      typename Cursor::Words words[kGradientArrays];
      words_of_gradients(words);
      if (against_memory()) {
        really_branch();
#pragma unroll
        for (int i = 0; i < kGradientArrays; ++i) reverse(words[i].v);
      }
      if (!slice_.exists(steps)) return;
      for_gradients([&](int i, const Gradient& it) {
        if (is_wanted(it)) Cursor(targets[i]).store_words(words[i]);
      });
    } else if constexpr (kAlongSteps) {
      for_gradients([&](int, const Gradient& it) {
        if (!is_wanted(it)) return;
        auto words = Cursor::to_words(slice_, values_of(it));
        if (against_memory()) {
          really_branch();
          reverse(words.v);
        }
        if (slice_.exists(steps)) Cursor(cursor(it.row)).store_words(words);
      });
    } else {
      if constexpr (Copies::kTransposes) {
        bool have_words = true;
        for_gradients([&](int, const Gradient& it) {
          have_words &= !is_wanted(it) || args_.row(it.row).has_vectors || is_slice(it.row);
        });
        if (have_words) {
          typename Cursor::Words words[kGradientArrays];
          words_of_gradients(words);
          for_gradients([&](int i, const Gradient& it) {
            if (!is_wanted(it)) return;
            if (args_.row(it.row).has_vectors) {
              Copies::store_transposed(args_.row(it.row), address(it.row), lane_, steps,
                                       slice_.channels_left, words[i]);
            } else {
              store_slice(it.row, steps, words[i]);
            }
          });
          return;
        }
      }
      for_gradients([&](int, const Gradient& it) {
        if (!is_wanted(it)) return;
        if (is_slice(it.row)) {
          store_slice(it.row, steps, Cursor::to_words(slice_, values_of(it)));
        } else {
          Copies::store(args_.row(it.row), address(it.row), lane_, steps, slice_, rows(it.at),
                        it.is_gated() ? rows(Shape::kGate) : nullptr);
        }
      });
    }
  }

 private:
  /// A stored array and the offset of its rows. dz is y times the gate.
  struct Gradient {
    Row row;
    int at;
    __device__ __forceinline__ constexpr bool is_gated() const { return row == Row::kDz; }
  };
  static constexpr int kGradientArrays = kHasInputDelta ? 4 : 3;

  /// Calls function(i, the i-th gradient) for all gradients.
  template <class Function>
  static __device__ __forceinline__ void for_gradients(const Function& function) {
    function(0, Gradient{Row::kDu, Shape::kDeltaU});
    function(1, Gradient{Row::kDdelta, Shape::kDelta});
    function(2, Gradient{Row::kDz, Shape::kDy});
    if constexpr (kHasInputDelta) function(3, Gradient{Row::kDinputDelta, Shape::kInputDelta});
  }
  __device__ __forceinline__ bool is_wanted(const Gradient& it) const {
    return !it.is_gated() || has_z();
  }
  __device__ __forceinline__ Values values_of(const Gradient& it) const {
    Values values = from_row(it.at);
    if (it.is_gated()) {
      const Values gate = from_row(Shape::kGate);
#pragma unroll
      for (int i = 0; i < kItems; ++i) values.v[i] *= gate.v[i];
    }
    return values;
  }

  /// True if the stage has no room for u and input_delta before the end of a chunk.
  static constexpr bool kHasLate = kGradients && 4 * Copies::kStageBytes > Shape::kStageBytes;
  static_assert(!kHasInputDelta || kHasLate || 5 * Copies::kStageBytes <= Shape::kStageBytes);

  __device__ __forceinline__ bool has_z() const { return args_.row(Row::kZ).present(); }
  /// Calls function(array, its raw elements) for the arrays that pass through registers.
  template <class Function>
  __device__ __forceinline__ void for_elements(const Function& function) {
    const auto call = [&](Row which, Raw& raw) {
      if (!args_.row(which).has_vectors && !is_slice(which)) function(which, raw);
    };
    call(Row::kDelta, elements_[0]);
    call(Row::kDout, elements_[1]);
    if (has_z()) call(Row::kZ, elements_[2]);
    if constexpr (kGradients) call(Row::kU, elements_[3]);
    if constexpr (kHasInputDelta) call(Row::kInputDelta, elements_[4]);
  }
  /// Calls `work` with the lane's slice, whose element type is then known to the compiler: one
  /// branch serves several arrays.
  template <class Work>
  __device__ __forceinline__ void with_typed_slice(const Work& work) const {
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
  __device__ __forceinline__ void words_of_gradients(
      typename Cursor::Words (&words)[kGradientArrays]) const {
    Values values[kGradientArrays] = {};
    for_gradients([&](int i, const Gradient& it) {
      if (is_wanted(it)) values[i] = values_of(it);
    });
    with_typed_slice([&](const LaneSlice& slice) {
#pragma unroll
      for (int i = 0; i < kGradientArrays; ++i) words[i] = Cursor::to_words(slice, values[i]);
    });
  }
  /// Returns the bytes of a channel's saved states.
  __device__ __forceinline__ int64_t state_bytes() const {
    return args_.params.dstate * (16 / Shape::kStates);
  }
  /// Returns whether the lanes' slices are contiguous in the array.
  __device__ __forceinline__ bool is_slice(Row which) const {
    return args_.row(which).has_step_vectors;
  }
  /// Stores such a slice to an array, whose strides may differ from those of other arrays.
  __device__ __forceinline__ void store_slice(Row which, int steps,
                                              const typename Cursor::Words& words) const {
    if (!slice_.exists(steps)) return;
    const RowArray& array = args_.row(which);
    Cursor(address(which) + Copies::slice_offset(array, slice_)).store_words(words);
  }
  /// Returns whether slices in memory are in the reverse of the scan's order. Rows are in the
  /// scan's order; slices are reversed as packed words on their way from and to memory.
  __device__ __forceinline__ bool against_memory() const {
    return kAlongSteps && slice_.is_backward;
  }
  template <int kWords>
  static __device__ __forceinline__ void reverse(uint32_t (&words)[kWords]) {
    constexpr int kUsed = kItems * kSize / 4;
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
  /// Returns the address of the warp's first channel at the first step of a chunk, in an array or,
  /// after all arrays, in the saved states. Addresses are in shared memory: in registers, they
  /// would crowd out the sweeps' values. If all rows lie along steps, they remain those of the
  /// first chunk, since the distance from there is the same in all arrays. Otherwise they are those
  /// of the present chunk, and one lane for each array updates its address.
  __device__ __forceinline__ char*& address_at(int array) const {
    const int at =
        Shape::kAddressPair == 16 ? array * 8 : array / 2 * Shape::kAddressPair + array % 2 * 8;
    return *reinterpret_cast<char**>(shared_memory() + shared_ + Shape::kAddresses + at);
  }
  __device__ __forceinline__ char* address(int array) const {
    char* const result = address_at(array);
    __builtin_assume(__isGlobal(result));
    return result;
  }
  __device__ __forceinline__ char* address(Row which) const {
    return address(static_cast<int>(which));
  }
  /// Returns the address of the lane's slice of a chunk. Its offset from the warp's address fits 32
  /// bits: see fits_lanes() in streamed_backward.cpp.
  __device__ __forceinline__ char* cursor(Row which) const {
    static_assert(kAlongSteps);
    const int step = slice_.step - steps_back_;
    const int offset = slice_.channel * static_cast<int>(args_.row(which).channel) +
                       (slice_.is_backward ? -(step + kItems - 1) : step) * kSize;
    return address(which) + offset;
  }
  /// Returns the offset of an array's stage.
  __device__ __forceinline__ int stage(Row which) const {
    const bool is_input_delta = which == Row::kInputDelta;
    if (kHasLate && (which == Row::kU || is_input_delta)) {
      return shared_ + Shape::kLateStage + (is_input_delta ? Copies::kStageBytes : 0);
    }
    const int place = is_input_delta ? 4 : (static_cast<int>(which) + 3) % 4;
    return shared_ + Shape::kStage + place * Copies::kStageBytes;
  }
  __device__ __forceinline__ float* rows(int at) const {
    return reinterpret_cast<float*>(shared_memory() + shared_ + at);
  }
  __device__ __forceinline__ float channel_value(int channel, int at) const {
    return rows(Shape::kChannelValues + at)[channel];
  }
  /// Stores a slice, which is in the order of the scan, to a row; from_row() loads one.
  __device__ __forceinline__ void to_row(const Values& values, int at) const {
    store_pack(rows(at) + slice_.channel * kRowStride + slice_.step,
               bit_cast<Pack<float, kItems>>(values));
  }
  __device__ __forceinline__ Values from_row(int at) const {
    return bit_cast<Values>(
        load_pack<float, kItems>(rows(at) + slice_.channel * kRowStride + slice_.step));
  }

  const BackwardArgs& args_;
  int shared_;
  int lane_;
  LaneSlice slice_;
  int steps_back_ = 0;  // from the address at address_at()
  float loaded_D_;      // for keep_channel_values(), as is the next
  float loaded_delta_bias_;
  Raw elements_[kHasInputDelta ? 5 : 4]{};  // see RowCopies::kHasElements
};

}  // namespace selective_scan::cuda::streamed
