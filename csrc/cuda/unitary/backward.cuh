// The adaptive unitary scan of a slab on the GPU, backward.
//
// As in the forward pass, but with rounds from the last to the first. Each warp computes the
// rotations of its steps and the maps that the steps apply to the state, going forward, and to its
// gradient, going back; both rotate by the same angle. After the exchange of maps a warp knows the
// state before its steps and the gradient after them. It walks through the steps forward, storing
// every h to shared memory, and then back.
//
// Shared memory: v and dy by (warp, channel, step), h by (step, thread), two sets of maps by (warp,
// lane), used in turn; at the end the warps' sums.
//
// Bound by instruction issue: about 130 per state and step.
#pragma once

#include "forward.cuh"

namespace selective_scan::cuda::unitary {

/// The effect of some steps on the state, h -> product·h + state, and on the gradient that arrives
/// from later steps, g -> conj(product)·g + gradient.
template <class T>
struct TwoWayMap {
  Complex<T> product;
  Complex<T> state;
  Complex<T> gradient;
};

/// The sums that the backward pass carries from round to round for one state.
template <class T>
struct StateSums {
  T theta;
  Complex<T> b;
  Complex<T> c;
};

template <class T, int kLanes>
struct BackwardShared {
  StepTile<T, kLanes> v[kWarps<T>];
  StepTile<T, kLanes> dy[kWarps<T>];
  ThreadTile<Complex<T>, T> h;  // before every step; later the state's parts of y and dv
  typename Exchange<TwoWayMap<T>, kWarps<T>>::Storage maps;
  StateSums<T> sums[kWarps<T>][kWarpSize];
  T dD[kWarps<T>][kWarpSize];
};

template <class T, int kLanes, int kStates, bool kVariable>
__global__ void __launch_bounds__(kThreads<T>, kBlocksPerMultiprocessor<T>)
    backward_kernel(const __grid_constant__ UnitaryBackwardParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<T, kLanes>*>(shared_bytes);
  constexpr int kCount = kSteps<T>;
  constexpr int kOwn = kOwned<T, kLanes>;
  const Place<T, kLanes> place(params);
  const int thread_lane = threadIdx.x % kWarpSize;
  auto& v_steps = shared.v[place.warp][place.team];
  auto& dy_steps = shared.dy[place.warp][place.team];
  const int64_t last = params.seqlen - 1;
  auto* carry = static_cast<Complex<T>*>(params.state_gradient);
  const auto* saved = static_cast<const Complex<T>*>(params.states);
  const T D = place.active
                  ? load_element<T>(params.D.data, params.D.dtype, place.channel * params.D.channel)
                  : T(0);

  Complex<T> carried[kStates];  // the gradient of the state after the round; all warps keep it
  StateInputs<T, kVariable> inputs[kStates];
  StateSums<T> sums[kStates];
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    const int64_t n = place.lane + s * kLanes;
    carried[s] = {};
    inputs[s] = {};
    sums[s] = {};
    if (!place.active || n >= params.dstate) continue;
    carried[s] = carry[place.state_index(params, n)];
    inputs[s] = {load_bias<T>(params, place.channel, n),
                 {params.b, params.variable_b, place, n},
                 {params.c, params.variable_c, place, n}};
  }
  T dD(0);

  Exchange<TwoWayMap<T>, kWarps<T>> exchange{shared.maps};
  const int steps = static_cast<int>(params.steps);
  const int last_round = (steps - 1) / kRound * kRound;
  using Steps = OwnedSteps<T, kLanes>;
  Steps u_steps(params.u, place, params.first_step + last_round);
  Steps dt_steps(params.dt, place, params.first_step + last_round);
  Steps z_steps(params.z, place, params.first_step + last_round);
  Steps dout_steps(params.dout, place, params.first_step + last_round);
  Steps ddt_steps(params.ddt, place, params.first_step + last_round);
  Steps dz_steps(params.dz, place, params.first_step + last_round);
  T* theta_at = place.at(params.theta, last_round + place.warp * kCount, place.lane);
  for (int round = last_round; round >= 0; round -= kRound) {
    const int begin = round + place.warp * kCount;
    const int64_t first = params.first_step + begin;
    const int left = steps - begin;
    const int count = place.active ? left - place.first_owned : 0;  // existing owned steps, or more
    T u[kOwn], dt[kOwn], z[kOwn], dout[kOwn] = {};
    u_steps.load(count, u);
    dt_steps.load(count, dt);
    if (params.dout.present()) dout_steps.load(count, dout);
    if (params.z.present()) z_steps.load(count, z);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const T gate = params.z.present() ? device_silu(z[i]) : T(1);
      v_steps[place.first_owned + i] = dt[i] * device_silu(u[i]);
      dy_steps[place.first_owned + i] = dout[i] * gate;
    }
    __syncwarp();

    Complex<T> y_and_dv[kOwn] = {};
#pragma unroll 1
    for (int s = 0; s < kStates; ++s) {
      const int64_t n = place.lane + s * kLanes;
      const bool has_state = place.active && n < params.dstate;
      const StateInputs<T, kVariable>& input = inputs[s];
      TwoWayMap<T> map{one<Complex<T>>(), {}, {}};
      Complex<T> turns[kCount];
      Complex<T> h{};  // the state before the round
      if (has_state) {
        T theta[kCount];
        load_theta(theta_at + s * kLanes, params.theta.step, left, theta);
        if (round + params.first_step > 0) {
          h = saved[place.saved_index(params, round + params.first_step, n)];
        } else if (params.initial_state.present()) {
          const ArrayView& view = params.initial_state;
          h = load_complex<T>(
              view, place.batch * view.batch + place.channel * view.channel + n * view.state);
        }
        make_turns(theta, input.bias, left, turns);
#pragma unroll
        for (int t = 0; t < kCount; ++t) {
          map.state = turns[t] * map.state +
                      v_steps[t] * input.b.at(params.b, params.variable_b, first + t, last);
          map.product = turns[t] * map.product;
        }
#pragma unroll
        for (int t = kCount - 1; t >= 0; --t) {
          map.gradient =
              conj(turns[t]) *
              (dy_steps[t] * conj(input.c.at(params.c, params.variable_c, first + t, last)) +
               map.gradient);
        }
      }

      const auto& maps = exchange.share(map);
#pragma unroll
      for (int w = 0; w < kWarps<T> - 1; ++w) {
        const auto& of_warp = maps[w][thread_lane];
        if (w < place.warp) h = multiply_add(of_warp.product, h, of_warp.state);
      }
      Complex<T> after = carried[s];
      Complex<T> arriving = after;
#pragma unroll
      for (int w = kWarps<T> - 1; w >= 0; --w) {
        const auto& of_warp = maps[w][thread_lane];
        if (w == place.warp) arriving = after;
        after = multiply_add(conj(of_warp.product), after, of_warp.gradient);
      }
      carried[s] = after;

      if (has_state) {
#pragma unroll
        for (int t = 0; t < kCount; ++t) {
          shared.h[t][threadIdx.x] = h;
          h = turns[t] * h + v_steps[t] * input.b.at(params.b, params.variable_b, first + t, last);
        }
#pragma unroll
        for (int t = kCount - 1; t >= 0; --t) {
          const bool inside = t < left;
          const T dy = dy_steps[t];
          const Complex<T> b_now = input.b.at(params.b, params.variable_b, first + t, last);
          const Complex<T> c_now = input.c.at(params.c, params.variable_c, first + t, last);
          const Complex<T> g = dy * conj(c_now) + arriving;
          const Complex<T> dc = dy * conj(h);
          const Complex<T> db = v_steps[t] * g;
          const T y = c_now.re * h.re - c_now.im * h.im;
          h = shared.h[t][threadIdx.x];
          shared.h[t][threadIdx.x] = {y, real_of_product_conj(g, b_now)};
          const Complex<T> turned = turns[t] * h;
          const T dtheta = g.im * turned.re - g.re * turned.im;  // Im(g·conj(turned))
          if (inside) theta_at[t * params.theta.step + s * kLanes] = dtheta;
          sums[s].theta += inside ? dtheta : T(0);
          sums[s].b += db;
          sums[s].c += dc;
          arriving = conj(turns[t]) * g;
          if (kVariable && params.variable_b && inside) {
            T* term = place.at(params.db_terms, begin + t, n);
            term[0] = db.re;
            term[params.db_terms.imag] = db.im;
          }
          if (kVariable && params.variable_c && inside) {
            T* term = place.at(params.dc_terms, begin + t, n);
            term[0] = dc.re;
            term[params.dc_terms.imag] = dc.im;
          }
        }
      } else {
#pragma unroll
        for (int t = 0; t < kCount; ++t) shared.h[t][threadIdx.x] = {};
      }
      add_over_team<T, kLanes>(shared.h, place, y_and_dv);
    }

    if (place.is_first_owner) {
      T* du = place.at(params.du, begin + place.first_owned, 0);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (i >= count) break;
        const T sigmoid_u = device_sigmoid(u[i]);
        const T silu_u = u[i] * sigmoid_u;
        const T dy = dy_steps[place.first_owned + i];
        const T dv = y_and_dv[i].im;
        dD += dy * silu_u;
        du[i * params.du.step] = (dv * dt[i] + dy * D) * silu_derivative(u[i], sigmoid_u);
        ddt_steps.store(i, dv * silu_u);
        if (params.z.present()) {
          const T y = y_and_dv[i].re + D * silu_u;
          dz_steps.store(i, dout[i] * y * silu_derivative(z[i], device_sigmoid(z[i])));
        }
      }
    }
    __syncwarp();  // other owners of these steps write the next round's dy
    for (Steps* sequence : {&u_steps, &dt_steps, &z_steps, &dout_steps, &ddt_steps, &dz_steps}) {
      sequence->move(-kRound);
    }
    theta_at -= kRound * params.theta.step;
  }

  shared.dD[place.warp][thread_lane] = sum_over_lanes<kLanes>(dD);
#pragma unroll 1
  for (int s = 0; s < kStates; ++s) {
    const int64_t n = place.lane + s * kLanes;
    __syncthreads();
    shared.sums[place.warp][thread_lane] = sums[s];
    __syncthreads();
    if (place.warp > 0 || !place.active || n >= params.dstate) continue;
    StateSums<T> total{};
    for (int w = 0; w < kWarps<T>; ++w) {
      const StateSums<T>& part = shared.sums[w][thread_lane];
      total.theta += part.theta;
      total.b += part.b;
      total.c += part.c;
    }
    const int64_t index = place.state_index(params, n);
    carry[index] = carried[s];
    if (params.sums.theta != nullptr) static_cast<T*>(params.sums.theta)[index] += total.theta;
    if (params.sums.b != nullptr) static_cast<Complex<T>*>(params.sums.b)[index] += total.b;
    if (params.sums.c != nullptr) static_cast<Complex<T>*>(params.sums.c)[index] += total.c;
  }
  if (place.warp == 0 && place.lane == 0 && place.active) {
    T total(0);
    for (int w = 0; w < kWarps<T>; ++w) total += shared.dD[w][thread_lane];
    static_cast<T*>(params.sums.D)[place.batch * params.dim + place.channel] += total;
  }
}

}  // namespace selective_scan::cuda::unitary
