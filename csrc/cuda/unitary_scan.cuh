// The adaptive unitary scan of a slab on the GPU.
//
// A team of kLanes lanes owns a channel of one batch entry; lane l has the states l, l + kLanes,
// ... (kStates of them) in registers and walks the slab step by step. A block is kThreads / kLanes
// neighbouring channels, so that theta, which has states next to each other and then channels, is
// read in whole sectors. What all lanes of a team need of a step (v = dt·silu(u), dy) and what they
// sum over their states (y, dv) lies in shared memory, (channel, step), for a chunk of
// kUnitaryStateChunk steps; all threads stage and finish it together, along time, in which the
// arrays are contiguous as a rule. Sums over the lanes of kGroup steps are made at a time, by a
// transposition that adds as it goes: kGroup shuffles instead of kGroup·log2(kLanes).
//
// The backward kernel takes a chunk's states one per lane at a time: forward from the saved state,
// keeping h of every step in shared memory (step, thread), 64 KiB in fp32; then back with the
// gradient of h in registers, the rotation computed again.
//
// Bound by latency at the sizes that matter: a state is one lane, so 16384 of them are four warps
// on each of 132 multiprocessors, and twice as many take the same time. Rotations of a group of
// steps are independent, which hides part of it; reading theta a group ahead and splitting time
// would more.
#pragma once

#include <cuda_runtime.h>

#include "../core/rotation.h"
#include "device_math.cuh"
#include "unitary_scan.h"

namespace selective_scan::cuda::unitary {

constexpr int kWarp = 32;
/// As many as h of a chunk has room for in 64 KiB of shared memory.
template <class T>
constexpr int kThreads = 512 / sizeof(T);
constexpr int kChunk = static_cast<int>(kUnitaryStateChunk);
constexpr int kGroup = 8;
static_assert(kChunk % kGroup == 0);

template <class T, int kLanes>
using ChunkTile = T[kThreads<T> / kLanes][kChunk];

/// Adds up `values` of kGroup steps over the lanes of a team. Afterwards values[0 .. held) of a
/// lane are the sums of the steps from the returned one on; several lanes may hold the same.
template <int kLanes, class T>
__device__ int sum_over_team(T (&values)[kGroup], int lane, int& held) {
  int first = 0;
  int count = kGroup;
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    if (count > 1) {
      count /= 2;
      const bool upper = (lane & mask) != 0;
#pragma unroll
      for (int i = 0; i < kGroup / 2; ++i) {
        if (i >= count) break;
        const T kept = upper ? values[i + count] : values[i];
        const T sent = upper ? values[i] : values[i + count];
        values[i] = kept + __shfl_xor_sync(0xffffffffu, sent, mask);
      }
      if (upper) first += count;
    } else {
      values[0] += __shfl_xor_sync(0xffffffffu, values[0], mask);
    }
  }
  held = count;
  return first;
}

/// Where a thread works. Threads beyond the last channel take part in shuffles and barriers alone.
template <class T, int kLanes>
struct Place {
  static constexpr int kChannels = kThreads<T> / kLanes;

  int lane = threadIdx.x % kLanes;
  int team = threadIdx.x / kLanes;
  int64_t local_batch;  // in the slab
  int64_t batch;
  int64_t first_channel;
  int64_t channel;
  int64_t group;
  bool active;

  __device__ explicit Place(const UnitaryScanParams& params)
      : local_batch(blockIdx.x / num_blocks(params)),
        batch(params.first_batch + local_batch),
        first_channel(blockIdx.x % num_blocks(params) * kChannels),
        channel(first_channel + team),
        group(channel / (params.dim / params.groups)),
        active(channel < params.dim) {}

  /// Blocks for every batch entry.
  static SELECTIVE_SCAN_HD int64_t num_blocks(const UnitaryScanParams& params) {
    return (params.dim + kChannels - 1) / kChannels;
  }

  __device__ int64_t state_index(const UnitaryScanParams& params, int64_t state) const {
    return (batch * params.dim + channel) * params.dstate + state;
  }
  __device__ int64_t saved_index(const UnitaryScanParams& params, int64_t first,
                                 int64_t state) const {
    const int64_t row = batch * num_saved_unitary_states(params.seqlen) + first / kChunk - 1;
    return (row * params.dim + channel) * params.dstate + state;
  }
  /// A slab array at a step of the slab.
  __device__ T* at(const SlabArray& array, const UnitaryScanParams& params, int64_t step,
                   int64_t state) const {
    return static_cast<T*>(array.data) + local_batch * array.batch + step * array.step +
           group * array.group + (channel - group * (params.dim / params.groups)) * array.channel +
           state * array.state;
  }
};

template <class T>
__device__ T load_sequence(const ArrayView& view, int64_t batch, int64_t channel, int64_t step) {
  return load_element<T>(view.data, view.dtype,
                         batch * view.batch + channel * view.channel + step * view.step);
}
template <class T>
__device__ void store_sequence(const ArrayView& view, int64_t batch, int64_t channel, int64_t step,
                               T value) {
  store_element<T>(view.data, view.dtype,
                   batch * view.batch + channel * view.channel + step * view.step, value);
}

template <class T>
__device__ Complex<T> load_complex(const ArrayView& view, int64_t index) {
  return {load_element<T>(view.data, view.dtype, index),
          load_element<T>(view.data, view.dtype, index + view.imag)};
}

/// Calls visit(channel in the block, channel, step in the chunk) for all of a chunk, each thread
/// for its share; a warp takes steps next to each other, always the same ones.
template <class T, int kLanes, class Visit>
__device__ void for_chunk(const UnitaryScanParams& params, const Place<T, kLanes>& place,
                          const Visit& visit) {
#pragma unroll 2
  for (int i = threadIdx.x; i < Place<T, kLanes>::kChannels * kChunk; i += kThreads<T>) {
    const int team = i / kChunk;
    visit(team, place.first_channel + team, i % kChunk, place.first_channel + team < params.dim);
  }
}

template <class T>
__device__ T gate_of(const ArrayView& z, int64_t batch, int64_t channel, int64_t step) {
  return z.present() ? silu<DeviceMath>(load_sequence<T>(z, batch, channel, step)) : T(1);
}

/// b or c for one state of a channel.
template <class T>
struct Weight {
  const ArrayView& view;
  int64_t index;
  bool variable;
  Complex<T> constant;

  template <int kLanes>
  __device__ Weight(const ArrayView& view, bool variable, const Place<T, kLanes>& place,
                    int64_t state)
      : view(view),
        index(state * view.state +
              (variable ? place.batch * view.batch + place.group * view.group : 0)),
        variable(variable),
        constant(variable ? Complex<T>{} : load_complex<T>(view, index)) {}

  /// At a step of the whole sequence, of which `last` is the last.
  __device__ Complex<T> at(int64_t step, int64_t last) const {
    if (!variable) return constant;
    return load_complex<T>(view, index + (step < last ? step : last) * view.step);
  }
};

/// theta of the next kGroup steps, 0 beyond the slab.
template <class T>
__device__ void load_theta(const T* theta, int64_t stride, int64_t left, T (&out)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i) out[i] = i < left ? theta[i * stride] : T(0);
}

/// Their rotations, 1 beyond the slab, where v and dy are 0: such a step changes nothing.
template <class T>
__device__ void make_turns(const T (&theta)[kGroup], T bias, int64_t left,
                           Complex<T> (&turns)[kGroup]) {
  rotations<DeviceMath>(theta, bias, turns);
#pragma unroll
  for (int i = 0; i < kGroup; ++i) turns[i] = select(i < left, turns[i], one<Complex<T>>());
}

template <class T, int kLanes, int kStates>
__global__ void __launch_bounds__(kThreads<T>)
    forward_kernel(const __grid_constant__ UnitaryForwardParams params) {
  __shared__ ChunkTile<T, kLanes> v_tile;
  __shared__ ChunkTile<T, kLanes> y_tile;
  const Place<T, kLanes> place(params);
  auto* carry = static_cast<Complex<T>*>(params.state);
  auto* saved = static_cast<Complex<T>*>(params.states);

  const int64_t last = params.seqlen - 1;
  Complex<T> h[kStates];
  T bias[kStates];
  bool has_state[kStates];
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    const int64_t n = place.lane + s * kLanes;
    has_state[s] = place.active && n < params.dstate;
    h[s] = has_state[s] ? carry[place.state_index(params, n)] : Complex<T>{};
    bias[s] = has_state[s]
                  ? load_element<T>(params.x_bias.data, params.x_bias.dtype,
                                    place.channel * params.x_bias.channel + n * params.x_bias.state)
                  : T(0);
  }

  for (int64_t begin = 0; begin < params.steps; begin += kChunk) {
    const int64_t first = params.first_step + begin;
    const int64_t left = params.steps - begin;
    for_chunk(params, place, [&](int team, int64_t channel, int t, bool active) {
      const bool inside = active && t < left;
      const T u = inside ? load_sequence<T>(params.u, place.batch, channel, first + t) : T(0);
      const T dt = inside ? load_sequence<T>(params.dt, place.batch, channel, first + t) : T(0);
      v_tile[team][t] = dt * silu<DeviceMath>(u);
    });
    if (saved != nullptr && first > 0) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const int64_t n = place.lane + s * kLanes;
        if (has_state[s]) saved[place.saved_index(params, first, n)] = h[s];
      }
    }
    __syncthreads();

    for (int group = 0; group < kChunk && group < left; group += kGroup) {
      T y[kGroup] = {};
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        if (!has_state[s]) continue;
        const int64_t n = place.lane + s * kLanes;
        const Weight<T> b(params.b, params.variable_b, place, n);
        const Weight<T> c(params.c, params.variable_c, place, n);
        T theta[kGroup];
        load_theta(place.at(params.theta, params, begin + group, n), params.theta.step,
                   left - group, theta);
        Complex<T> turns[kGroup];
        make_turns(theta, bias[s], left - group, turns);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          const int64_t step = first + group + i;
          h[s] = turns[i] * h[s] + v_tile[place.team][group + i] * b.at(step, last);
          const Complex<T> weight = c.at(step, last);
          y[i] += weight.re * h[s].re - weight.im * h[s].im;
        }
      }
      int held;
      const int at = sum_over_team<kLanes>(y, place.lane, held);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (i < held) y_tile[place.team][group + at + i] = y[i];
      }
    }
    __syncthreads();

    for_chunk(params, place, [&](int team, int64_t channel, int t, bool active) {
      if (!active || t >= left) return;
      const T D = load_element<T>(params.D.data, params.D.dtype, channel * params.D.channel);
      const T u = load_sequence<T>(params.u, place.batch, channel, first + t);
      const T gate = gate_of<T>(params.z, place.batch, channel, first + t);
      store_sequence(params.out, place.batch, channel, first + t,
                     (y_tile[team][t] + D * silu<DeviceMath>(u)) * gate);
    });
  }
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    const int64_t n = place.lane + s * kLanes;
    if (has_state[s]) carry[place.state_index(params, n)] = h[s];
  }
}

template <class T, int kLanes>
struct BackwardShared {
  ChunkTile<T, kLanes> v;
  ChunkTile<T, kLanes> dy;
  ChunkTile<T, kLanes> y;
  ChunkTile<T, kLanes> dv;
  Complex<T> h[kChunk][kThreads<T>];            // after every step
  T dD[kThreads<T> / kLanes * kChunk / kWarp];  // of the steps that a warp takes at a time
};

/// What the backward pass carries from chunk to chunk for one state.
template <class T>
struct StateSums {
  Complex<T> arriving;  // the gradient of the state
  T theta;
  Complex<T> b;
  Complex<T> c;
};

template <class T, int kLanes>
__device__ void add_to_tile(ChunkTile<T, kLanes>& tile, const Place<T, kLanes>& place, int group,
                            T (&values)[kGroup]) {
  int held;
  const int at = sum_over_team<kLanes>(values, place.lane, held);
  // Lanes that hold the same sums differ in the low bits of their number; one of them adds.
  constexpr int kCopies = kLanes > kGroup ? kLanes / kGroup : 1;
  if (place.lane % kCopies != 0) return;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    if (i < held) tile[place.team][group + at + i] += values[i];
  }
}

/// One state of every lane through a chunk, forward and back.
template <class T, int kLanes>
__device__ void backward_state(const UnitaryBackwardParams& params, const Place<T, kLanes>& place,
                               BackwardShared<T, kLanes>& shared, int64_t n, bool has_state,
                               int64_t begin, StateSums<T>& sums) {
  const int64_t first = params.first_step + begin;
  const int64_t left = params.steps - begin;
  const int64_t last_group = ((left < kChunk ? left : kChunk) - 1) / kGroup * kGroup;
  const int64_t last = params.seqlen - 1;
  const int64_t state = has_state ? n : 0;  // other lanes read what is there and use nothing
  const Weight<T> b(params.b, params.variable_b, place, state);
  const Weight<T> c(params.c, params.variable_c, place, state);
  Complex<T> before{};
  T bias = T(0);
  if (has_state) {
    bias = load_element<T>(params.x_bias.data, params.x_bias.dtype,
                           place.channel * params.x_bias.channel + n * params.x_bias.state);
    if (first > 0) {
      before = static_cast<const Complex<T>*>(params.states)[place.saved_index(params, first, n)];
    } else if (params.initial_state.present()) {
      const ArrayView& view = params.initial_state;
      before = load_complex<T>(
          view, place.batch * view.batch + place.channel * view.channel + n * view.state);
    }
  }

  Complex<T> h = before;
  for (int64_t group = 0; group <= last_group; group += kGroup) {
    T y[kGroup] = {};
    if (has_state) {
      T theta[kGroup];
      load_theta(place.at(params.theta, params, begin + group, n), params.theta.step, left - group,
                 theta);
      Complex<T> turns[kGroup];
      make_turns(theta, bias, left - group, turns);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int64_t step = first + group + i;
        h = turns[i] * h + shared.v[place.team][group + i] * b.at(step, last);
        shared.h[group + i][threadIdx.x] = h;
        const Complex<T> weight = c.at(step, last);
        y[i] = weight.re * h.re - weight.im * h.im;
      }
    }
    if (params.z.present()) add_to_tile<T, kLanes>(shared.y, place, group, y);
  }

  for (int64_t group = last_group; group >= 0; group -= kGroup) {
    T dv[kGroup] = {};
    if (has_state) {
      T* theta_at = place.at(params.theta, params, begin + group, n);
      T theta[kGroup];
      load_theta(theta_at, params.theta.step, left - group, theta);
      Complex<T> turns[kGroup];
      make_turns(theta, bias, left - group, turns);
#pragma unroll
      for (int i = kGroup - 1; i >= 0; --i) {
        const int t = static_cast<int>(group) + i;
        const Complex<T> turn = turns[i];
        const bool inside = t < left;
        const T dy = shared.dy[place.team][t];
        const Complex<T> g = dy * conj(c.at(first + t, last)) + sums.arriving;
        const Complex<T> dc = dy * conj(shared.h[t][threadIdx.x]);
        const Complex<T> db = shared.v[place.team][t] * g;
        dv[i] = real_of_product_conj(g, b.at(first + t, last));
        const Complex<T> turned = turn * (t > 0 ? shared.h[t - 1][threadIdx.x] : before);
        const T dtheta = g.im * turned.re - g.re * turned.im;  // Im(g·conj(turned))
        if (inside) theta_at[i * params.theta.step] = dtheta;
        sums.theta += inside ? dtheta : T(0);
        sums.b += db;
        sums.c += dc;
        sums.arriving = conj(turn) * g;
        if (params.variable_b && inside) {
          T* term = place.at(params.db_terms, params, begin + t, n);
          term[0] = db.re;
          term[params.db_terms.imag] = db.im;
        }
        if (params.variable_c && inside) {
          T* term = place.at(params.dc_terms, params, begin + t, n);
          term[0] = dc.re;
          term[params.dc_terms.imag] = dc.im;
        }
      }
    }
    add_to_tile<T, kLanes>(shared.dv, place, static_cast<int>(group), dv);
  }
}

template <class T, int kLanes, int kStates>
__global__ void __launch_bounds__(kThreads<T>)
    backward_kernel(const __grid_constant__ UnitaryBackwardParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<T, kLanes>*>(shared_bytes);
  const Place<T, kLanes> place(params);
  auto* carry = static_cast<Complex<T>*>(params.state_gradient);

  StateSums<T> sums[kStates];
  bool has_state[kStates];
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    const int64_t n = place.lane + s * kLanes;
    has_state[s] = place.active && n < params.dstate;
    sums[s] = {};
    if (has_state[s]) sums[s].arriving = carry[place.state_index(params, n)];
  }
  constexpr int kParts = sizeof(shared.dD) / sizeof(T);
  for (int i = threadIdx.x; i < kParts; i += kThreads<T>) shared.dD[i] = T(0);

  const int64_t chunks = (params.steps + kChunk - 1) / kChunk;
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t begin = chunk * kChunk;
    const int64_t first = params.first_step + begin;
    const int64_t left = params.steps - begin;
    for_chunk(params, place, [&](int team, int64_t channel, int t, bool active) {
      const bool inside = active && t < left;
      const T u = inside ? load_sequence<T>(params.u, place.batch, channel, first + t) : T(0);
      const T dt = inside ? load_sequence<T>(params.dt, place.batch, channel, first + t) : T(0);
      T dy(0);
      if (inside && params.dout.present()) {
        dy = load_sequence<T>(params.dout, place.batch, channel, first + t) *
             gate_of<T>(params.z, place.batch, channel, first + t);
      }
      shared.v[team][t] = dt * silu<DeviceMath>(u);
      shared.dy[team][t] = dy;
      shared.y[team][t] = T(0);
      shared.dv[team][t] = T(0);
    });
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      backward_state(params, place, shared, place.lane + s * kLanes, has_state[s], begin, sums[s]);
      __syncwarp();
    }
    __syncthreads();

    for_chunk(params, place, [&](int team, int64_t channel, int t, bool active) {
      T dD(0);
      if (active && t < left) {
        const int64_t step = first + t;
        const T D = load_element<T>(params.D.data, params.D.dtype, channel * params.D.channel);
        const T u = load_sequence<T>(params.u, place.batch, channel, step);
        const T dt = load_sequence<T>(params.dt, place.batch, channel, step);
        const T sigmoid_u = sigmoid<DeviceMath>(u);
        const T silu_u = u * sigmoid_u;
        const T dy = shared.dy[team][t];
        const T dv = shared.dv[team][t];
        dD = dy * silu_u;
        const int64_t group = channel / (params.dim / params.groups);
        static_cast<T*>(
            params.du.data)[place.local_batch * params.du.batch + (begin + t) * params.du.step +
                            group * params.du.group +
                            (channel - group * (params.dim / params.groups)) * params.du.channel] =
            (dv * dt + dy * D) * silu_derivative(u, sigmoid_u);
        store_sequence(params.ddt, place.batch, channel, step, dv * silu_u);
        if (params.z.present()) {
          const T z = load_sequence<T>(params.z, place.batch, channel, step);
          const T dout = params.dout.present()
                             ? load_sequence<T>(params.dout, place.batch, channel, step)
                             : T(0);
          const T y = shared.y[team][t] + D * silu_u;
          store_sequence(params.dz, place.batch, channel, step,
                         dout * y * silu_derivative(z, sigmoid<DeviceMath>(z)));
        }
      }
#pragma unroll
      for (int mask = kWarp / 2; mask > 0; mask /= 2) {
        dD += __shfl_xor_sync(0xffffffffu, dD, mask);
      }
      if (t % kWarp == 0) shared.dD[(team * kChunk + t) / kWarp] += dD;
    });
    __syncthreads();
  }

  const auto* theta_sums = params.sums.theta;
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    const int64_t n = place.lane + s * kLanes;
    if (!has_state[s]) continue;
    const int64_t index = place.state_index(params, n);
    carry[index] = sums[s].arriving;
    if (theta_sums != nullptr) static_cast<T*>(params.sums.theta)[index] += sums[s].theta;
    if (params.sums.b != nullptr) static_cast<Complex<T>*>(params.sums.b)[index] += sums[s].b;
    if (params.sums.c != nullptr) static_cast<Complex<T>*>(params.sums.c)[index] += sums[s].c;
  }
  if (place.lane == 0 && place.active) {
    T dD(0);
    for (int i = 0; i < kChunk / kWarp; ++i) dD += shared.dD[place.team * (kChunk / kWarp) + i];
    static_cast<T*>(params.sums.D)[place.batch * params.dim + place.channel] += dD;
  }
}

/// Calls visit with lanes per channel and states per lane as constants.
template <class Visit>
cudaError_t with_team(int64_t dstate, const Visit& visit) {
  using std::integral_constant;
  if (dstate <= 4) return visit(integral_constant<int, 4>(), integral_constant<int, 1>());
  if (dstate <= 8) return visit(integral_constant<int, 8>(), integral_constant<int, 1>());
  if (dstate <= 16) return visit(integral_constant<int, 16>(), integral_constant<int, 1>());
  if (dstate <= 32) return visit(integral_constant<int, 32>(), integral_constant<int, 1>());
  if (dstate <= 64) return visit(integral_constant<int, 32>(), integral_constant<int, 2>());
  if (dstate <= 128) return visit(integral_constant<int, 32>(), integral_constant<int, 4>());
  if (dstate <= kMaxUnitaryDstate) {
    return visit(integral_constant<int, 32>(), integral_constant<int, 8>());
  }
  return cudaErrorInvalidValue;
}

}  // namespace selective_scan::cuda::unitary
