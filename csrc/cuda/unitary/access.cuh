// How the kernels of the adaptive unitary scan divide a slab, and their access to memory.
//
// A block owns kWarpSize / kLanes neighboring channels of one batch entry, with a team of kLanes
// lanes for each; lane l of a team has the states l, l + kLanes, ... (kStates of them). Time is
// divided among the kWarps warps of the block: each takes kSteps consecutive steps of a round's
// kRound steps. In theta, states and then channels are contiguous, so it is read in whole sectors.
//
// In arrays without states (u, dt, z, out and their gradients), a lane of a team owns some of its
// warp's steps, in order, which are usually contiguous in memory.
#pragma once

#include <cuda_runtime.h>

#include "../../core/affine_map.h"
#include "../../core/rotation.h"
#include "../kit/config.h"
#include "../kit/math.cuh"
#include "../kit/shuffle.cuh"
#include "../launch.h"

namespace selective_scan::cuda::unitary {

/// The steps whose rotations a lane keeps in registers.
template <class T>
constexpr int kSteps = 64 / sizeof(T);
/// A round is the stretch between two saved states.
constexpr int kRound = static_cast<int>(kUnitaryStateChunk);
template <class T>
constexpr int kWarps = kRound / kSteps<T>;
template <class T>
constexpr int kThreads = kWarps<T> * kWarpSize;
/// Lets a GPU of 132 multiprocessors hold all blocks of 1024 channels with 16 states at once.
template <class T>
constexpr int kBlocksPerMultiprocessor = sizeof(T) == 4 ? 4 : 1;

/// The steps that a lane owns, and the number of lanes that own the same ones.
template <class T, int kLanes>
constexpr int kOwned = kSteps<T> > kLanes ? kSteps<T> / kLanes : 1;
template <class T, int kLanes>
constexpr int kOwners = kLanes > kSteps<T> ? kLanes / kSteps<T> : 1;

/// The position of a thread. Threads past the last channel only take part in shuffles and barriers.
template <class T, int kLanes>
struct Place {
  static constexpr int kChannels = kWarpSize / kLanes;

  int lane = threadIdx.x % kLanes;
  int team = threadIdx.x % kWarpSize / kLanes;
  int warp = threadIdx.x / kWarpSize;
  int first_owned = lane * kSteps<T> / kLanes;
  bool is_first_owner = lane % kOwners<T, kLanes> == 0;
  int64_t local_batch;  // in the slab
  int64_t batch;
  int64_t channel;
  int64_t group;
  int64_t group_channel;  // the channel's index in its group
  bool active;

  __device__ explicit Place(const UnitaryScanParams& params)
      : local_batch(blockIdx.x / num_blocks(params)),
        batch(params.first_batch + local_batch),
        channel(blockIdx.x % num_blocks(params) * kChannels + team),
        group(channel / (params.dim / params.groups)),
        group_channel(channel - group * (params.dim / params.groups)),
        active(channel < params.dim) {}

  /// Returns the number of blocks per batch entry.
  static SELECTIVE_SCAN_HD int64_t num_blocks(const UnitaryScanParams& params) {
    return ceil_div(params.dim, kChannels);
  }

  __device__ int64_t state_index(const UnitaryScanParams& params, int64_t state) const {
    return (batch * params.dim + channel) * params.dstate + state;
  }
  /// Returns the index of the state saved before step `first`, a positive multiple of
  /// kUnitaryStateChunk.
  __device__ int64_t saved_index(const UnitaryScanParams& params, int64_t first,
                                 int64_t state) const {
    const int64_t chunk = first / kUnitaryStateChunk - 1;
    const int64_t row = batch * num_saved_unitary_states(params.seqlen) + chunk;
    return (row * params.dim + channel) * params.dstate + state;
  }
  /// Returns the address of a slab array's element at a step of the slab.
  __device__ T* at(const SlabArray& array, int64_t step, int64_t state) const {
    return static_cast<T*>(array.data) + local_batch * array.batch + step * array.step +
           group * array.group + group_channel * array.channel + state * array.state;
  }
};

/// The steps of a sequence that a lane owns, moved along with the rounds.
template <class T, int kLanes>
class OwnedSteps {
  static constexpr int kOwn = kOwned<T, kLanes>;

 public:
  /// Points at the owned steps of the round that begins with step `first` of the whole sequence.
  __device__ OwnedSteps(const ArrayView& view, const Place<T, kLanes>& place, int64_t first)
      : dtype_(view.dtype),
        step_bytes_(view.step * element_size(view.dtype)),
        data_(static_cast<char*>(view.data) +
              (place.batch * view.batch + place.channel * view.channel) * element_size(view.dtype) +
              (first + place.warp * kSteps<T> + place.first_owned) * step_bytes_) {}

  __device__ void move(int64_t steps) { data_ += steps * step_bytes_; }

  /// Loads the owned steps. The steps from `count` on become 0.
  __device__ void load(int count, T (&out)[kOwn]) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      out[i] = i < count ? load_element<T>(data_ + i * step_bytes_, dtype_, 0) : T(0);
    }
  }
  __device__ void store(int i, T value) const {
    store_element<T>(data_ + i * step_bytes_, dtype_, 0, value);
  }

 private:
  DType dtype_;
  int64_t step_bytes_;
  char* data_;
};

/// Values by (step of the warp, thread). Rows are padded by one value, so that a column is spread
/// over the banks.
template <class V, class T>
using ThreadTile = V[kSteps<T>][kThreads<T> + 1];

/// Sums the steps that a lane owns over the lanes of its team, and adds the results to `sums`.
template <class T, int kLanes, class V>
__device__ void add_over_team(const ThreadTile<V, T>& tile, const Place<T, kLanes>& place,
                              V (&sums)[kOwned<T, kLanes>]) {
  constexpr int kPart = kLanes / kOwners<T, kLanes>;
  const int first = threadIdx.x - place.lane + place.lane % kOwners<T, kLanes> * kPart;
  constexpr int kChains = kPart < 4 ? kPart : 4;  // additions in flight
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kOwned<T, kLanes>; ++i) {
    const V* values = &tile[place.first_owned + i][first];
    V parts[kChains];
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      if (j < kChains) {
        parts[j] = values[j];
      } else {
        parts[j % kChains] += values[j];
      }
    }
    V sum = parts[0];
#pragma unroll
    for (int j = 1; j < kChains; ++j) sum += parts[j];
#pragma unroll
    for (int mask = 1; mask < kOwners<T, kLanes>; mask *= 2) sum += shuffle_xor<kLanes>(sum, mask);
    sums[i] += sum;
  }
  __syncwarp();
}

template <class T>
__device__ Complex<T> load_complex(const ArrayView& view, int64_t index) {
  return {load_element<T>(view.data, view.dtype, index),
          load_element<T>(view.data, view.dtype, index + view.imag)};
}

/// b or c for one state of a channel.
template <class T, bool kVariable>
class Weight {
 public:
  Weight() = default;

  template <int kLanes>
  __device__ Weight(const ArrayView& view, bool has_steps, const Place<T, kLanes>& place,
                    int64_t state)
      : index_(state * view.state) {
    if (kVariable && has_steps) {
      index_ += place.batch * view.batch + place.group * view.group;
    } else {
      constant_ = load_complex<T>(view, index_);
    }
  }

  /// Returns the value at a step of the whole sequence. Steps after `last` have the value of
  /// `last`.
  __device__ Complex<T> at(const ArrayView& view, bool has_steps, int64_t step,
                           int64_t last) const {
    if (!kVariable || !has_steps) return constant_;
    return load_complex<T>(view, index_ + (step < last ? step : last) * view.step);
  }
  __device__ Complex<T> constant() const { return constant_; }

 private:
  int64_t index_;
  Complex<T> constant_;
};

/// A lane's inputs for one of its states; all zero for states beyond dstate.
template <class T, bool kVariable>
struct StateInputs {
  T bias;
  Weight<T, kVariable> b;
  Weight<T, kVariable> c;
};

template <class T>
__device__ T load_bias(const UnitaryScanParams& params, int64_t channel, int64_t state) {
  const ArrayView& view = params.x_bias;
  return load_element<T>(view.data, view.dtype, channel * view.channel + state * view.state);
}

/// Loads theta of kSteps steps; 0 from `left` on.
template <class T>
__device__ void load_theta(const T* theta, int64_t stride, int left, T (&out)[kSteps<T>]) {
  if (left >= kSteps<T>) {
#pragma unroll
    for (int i = 0; i < kSteps<T>; ++i) out[i] = theta[i * stride];
  } else {
#pragma unroll
    for (int i = 0; i < kSteps<T>; ++i) out[i] = i < left ? theta[i * stride] : T(0);
  }
}

/// Computes the rotations of the steps. From `left` on they are 1, and v and dy are 0: such a step
/// changes nothing.
template <class T>
__device__ void make_turns(const T (&theta)[kSteps<T>], T bias, int left,
                           Complex<T> (&turns)[kSteps<T>]) {
  rotations<DeviceMath>(theta, bias, turns);
  if (left >= kSteps<T>) return;
#pragma unroll
  for (int i = 0; i < kSteps<T>; ++i) turns[i] = select(i < left, turns[i], one<Complex<T>>());
}

/// Calls visit with the lanes per channel, the states per lane and whether b or c has steps, all as
/// constants. fp64, which serves to check gradients, has one team for any number of states.
template <class T, class Visit>
cudaError_t with_team(const UnitaryScanParams& params, const Visit& visit_team) {
  using std::integral_constant;
  const int64_t dstate = params.dstate;
  const auto visit = [&](auto lanes, auto states) {
    return params.variable_b || params.variable_c ? visit_team(lanes, states, std::true_type())
                                                  : visit_team(lanes, states, std::false_type());
  };
  if constexpr (sizeof(T) == sizeof(float)) {
    if (dstate <= 16) return visit(integral_constant<int, 16>(), integral_constant<int, 1>());
    if (dstate <= 64) return visit(integral_constant<int, 32>(), integral_constant<int, 2>());
  }
  if (dstate <= kMaxUnitaryDstate) {
    return visit(integral_constant<int, 32>(), integral_constant<int, 8>());
  }
  return cudaErrorInvalidValue;
}

}  // namespace selective_scan::cuda::unitary
