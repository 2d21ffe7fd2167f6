// The adaptive unitary scan of a vector of channels through a slab.
//
// The lanes of a vector are channels of one group, so theta, in which channels are adjacent, is
// read in whole vectors, and the sum over the states needs no shuffling. Steps are processed in
// chunks of kUnitaryStateChunk. This is small enough that a chunk's inputs, and the values that one
// state leaves in the backward pass, stay in the first-level cache (58 KiB with AVX-512, half of
// which only the backward pass needs). Bound by arithmetic: about 65 vector operations per vector
// of states forward, 55 of them in the rotation (rotation.h says why).
#pragma once

#include <cstdint>

#include "../../core/rotation.h"
#include "../../core/unitary_params.h"
#include "../simd/states.h"
#include "../simd/tile.h"
#include "../simd/vector.h"
#include "../simd/vector_math.h"
#include "../work.h"

namespace selective_scan::cpu {

template <class R>
struct UnitaryChunk {
  using T = typename R::Scalar;
  static constexpr int64_t kSteps = kUnitaryStateChunk;
  static constexpr int kWidth = R::kWidth;
  using Tile = T[kSteps * kWidth];

  const UnitaryScanParams& params;
  const Block& block;
  int64_t batch;  // in the whole tensor
  int64_t first;  // step in the whole tensor
  int64_t steps;

  UnitaryChunk(const UnitaryScanParams& params, const Block& block, int64_t first)
      : params(params),
        block(block),
        batch(params.first_batch + block.batch),
        first(first),
        steps(lesser_of(kSteps, params.first_step + params.steps - first)) {}

  Section sequence(const ArrayView& view) const {
    const int64_t offset =
        batch * view.batch + block.first_channel * view.channel + first * view.step;
    return {element_at(view, offset), view.dtype, steps, block.channels, view.step, view.channel};
  }
  void load(const ArrayView& view, Tile& tile) const { load_tile<R>(sequence(view), tile, kWidth); }
  void store(const ArrayView& view, const Tile& tile) const {
    store_tile<R>(sequence(view), tile, kWidth);
  }

  /// Loads one value per channel.
  R load_channels(const ArrayView& view, int64_t state) const {
    R values;
    load_states(view, block.first_channel * view.channel + state * view.state, block.channels,
                view.channel, 1, &values);
    return values;
  }

  /// Returns the address of the chunk's step 0 and the block's channels in a slab array.
  T* slab(const SlabArray& array, int64_t state) const {
    return static_cast<T*>(array.data) + block.batch * array.batch +
           (first - params.first_step) * array.step + block.group * array.group +
           (block.first_channel - block.group * (params.dim / params.groups)) * array.channel +
           state * array.state;
  }
};

/// b or c of one state: one number, or one per step.
template <class R>
class UnitaryWeight {
  using T = typename R::Scalar;

 public:
  UnitaryWeight(const UnitaryChunk<R>& chunk, const ArrayView& view, bool is_variable,
                int64_t state)
      : view_(view),
        offset_(state * view.state +
                (is_variable ? chunk.batch * view.batch + chunk.block.group * view.group +
                                   chunk.first * view.step
                             : 0)) {}

  SELECTIVE_SCAN_HD Complex<R> at(int64_t step) const {
    const int64_t index = offset_ + step * view_.step;
    return {R(load_element<T>(view_.data, view_.dtype, index)),
            R(load_element<T>(view_.data, view_.dtype, index + view_.imag))};
  }

 private:
  const ArrayView& view_;
  int64_t offset_;
};

/// Loads and stores the states of a vector of channels, one state at a time, in a contiguous (row,
/// channel, state) array of the compute type. A State is R, or Complex<R>.
template <class State>
class StateArray {
  using R = real_t<State>;
  using T = scalar_t<State>;
  static constexpr int kParts = kComponents<State>;

 public:
  StateArray(void* data, const UnitaryScanParams& params, const Block& block, int64_t row)
      : data_(static_cast<T*>(data)),
        first_((row * params.dim + block.first_channel) * params.dstate * kParts),
        stride_(params.dstate * kParts),
        channels_(block.channels) {}

  State load(int64_t n) const {
    State state{};
    R* const parts = reinterpret_cast<R*>(&state);
    for (int lane = 0; lane < channels_; ++lane) {
      for (int part = 0; part < kParts; ++part) {
        parts[part].set_lane(lane, data_[index(lane, n) + part]);
      }
    }
    return state;
  }
  void store(int64_t n, State state) const {
    const R* const parts = reinterpret_cast<const R*>(&state);
    for (int lane = 0; lane < channels_; ++lane) {
      for (int part = 0; part < kParts; ++part) {
        data_[index(lane, n) + part] = parts[part].lane(lane);
      }
    }
  }
  void add(int64_t n, State state) const { store(n, load(n) + state); }

 private:
  int64_t index(int lane, int64_t n) const { return first_ + lane * stride_ + n * kParts; }

  T* data_;  // may be null if nothing is loaded or stored
  int64_t first_;
  int64_t stride_;
  int channels_;
};

template <class R>
SELECTIVE_SCAN_HD R gate_of(const typename R::Scalar* z) {
  return z == nullptr ? R(1) : silu<VectorMath>(R::load(z));
}

/// The inputs of a chunk, and what both passes compute from them.
template <class R>
struct UnitaryInputs {
  using Chunk = UnitaryChunk<R>;
  static constexpr int kWidth = Chunk::kWidth;
  static constexpr int64_t kSteps = Chunk::kSteps;

  alignas(64) typename Chunk::Tile u;
  alignas(64) typename Chunk::Tile dt;
  alignas(64) typename Chunk::Tile z;
  alignas(64) typename Chunk::Tile v;  // dt·silu(u)
  alignas(64) typename Chunk::Tile y;
  bool has_z;

  void load(const Chunk& chunk) {
    chunk.load(chunk.params.u, u);
    chunk.load(chunk.params.dt, dt);
    has_z = chunk.params.z.present();
    if (has_z) chunk.load(chunk.params.z, z);
    for (int64_t t = 0; t < chunk.steps; ++t) {
      (R::load(dt + t * kWidth) * silu<VectorMath>(R::load(u + t * kWidth))).store(v + t * kWidth);
      R(0).store(y + t * kWidth);
    }
  }

  /// Walks one state through the chunk and adds Re(c·h) to y. Calls keep(t, turn, h) at every step.
  template <class Keep>
  Complex<R> walk(const Chunk& chunk, int64_t state, Complex<R> h, const Keep& keep) {
    const auto& params = chunk.params;
    const UnitaryWeight<R> b(chunk, params.b, params.variable_b, state);
    const UnitaryWeight<R> c(chunk, params.c, params.variable_c, state);
    const R bias = chunk.load_channels(params.x_bias, state);
    const auto* theta = chunk.slab(params.theta, state);
    Complex<R> b_now = b.at(0), c_now = c.at(0);
    for (int64_t t = 0; t < chunk.steps; ++t) {
      const Complex<R> turn = rotation<VectorMath>(R::load(theta + t * params.theta.step), bias);
      if (params.variable_b) b_now = b.at(t);
      if (params.variable_c) c_now = c.at(t);
      const R v_now = R::load(v + t * kWidth);
      h = turn * h + v_now * b_now;
      (R::load(y + t * kWidth) + (c_now.re * h.re - c_now.im * h.im)).store(y + t * kWidth);
      keep(t, turn, h);
    }
    return h;
  }
};

template <class R>
struct UnitaryForward {
  using Chunk = UnitaryChunk<R>;
  static constexpr int kWidth = Chunk::kWidth;

  static void run(const UnitaryForwardParams& params, const Block& block) {
    UnitaryInputs<R> inputs;
    const int64_t batch = params.first_batch + block.batch;
    const StateArray<Complex<R>> carry(params.state, params, block, batch);
    const int64_t end = params.first_step + params.steps;
    for (int64_t first = params.first_step; first < end; first += Chunk::kSteps) {
      const Chunk chunk(params, block, first);
      inputs.load(chunk);
      const bool saves = params.states != nullptr && first > 0;
      const int64_t saved = first / Chunk::kSteps - 1;
      const StateArray<Complex<R>> states(params.states, params, block,
                                          batch * num_saved_unitary_states(params.seqlen) + saved);
      for (int64_t n = 0; n < params.dstate; ++n) {
        const Complex<R> h = carry.load(n);
        if (saves) states.store(n, h);
        carry.store(n, inputs.walk(chunk, n, h, [](auto...) {}));
      }
      finish(chunk, inputs);
      chunk.store(params.out, inputs.y);
    }
  }

 private:
  /// Replaces y by out.
  static void finish(const Chunk& chunk, UnitaryInputs<R>& inputs) {
    const R D = chunk.load_channels(chunk.params.D, 0);
    for (int64_t t = 0; t < chunk.steps; ++t) {
      const int64_t i = t * kWidth;
      const R skip = D * silu<VectorMath>(R::load(inputs.u + i));
      const R gate = gate_of<R>(inputs.has_z ? inputs.z + i : nullptr);
      ((R::load(inputs.y + i) + skip) * gate).store(inputs.y + i);
    }
  }
};

template <class R>
class UnitaryBackward {
  using Chunk = UnitaryChunk<R>;
  using T = typename R::Scalar;
  static constexpr int kWidth = Chunk::kWidth;
  static constexpr int64_t kSteps = Chunk::kSteps;

 public:
  static void run(const UnitaryBackwardParams& params, const Block& block) {
    UnitaryBackward backward(params, block);
    const int64_t chunks = ceil_div(params.steps, kSteps);
    for (int64_t i = chunks - 1; i >= 0; --i) {
      backward.run_chunk(Chunk(params, block, params.first_step + i * kSteps));
    }
  }

 private:
  UnitaryBackward(const UnitaryBackwardParams& params, const Block& block)
      : params_(params), block_(block), batch_(params.first_batch + block.batch) {}

  void run_chunk(const Chunk& chunk) {
    inputs_.load(chunk);
    if (params_.dout.present()) chunk.load(params_.dout, dout_);
    for (int64_t t = 0; t < chunk.steps; ++t) {
      const int64_t i = t * kWidth;
      if (!params_.dout.present()) R(0).store(dout_ + i);
      const R gate = gate_of<R>(inputs_.has_z ? inputs_.z + i : nullptr);
      (R::load(dout_ + i) * gate).store(dy_ + i);
      R(0).store(dv_ + i);
    }
    for (int64_t n = 0; n < params_.dstate; ++n) run_state(chunk, n);
    finish(chunk);
  }

  Complex<R> state_before(const Chunk& chunk, int64_t n) const {
    if (chunk.first > 0) {
      const int64_t saved = chunk.first / kSteps - 1;
      const int64_t row = batch_ * num_saved_unitary_states(params_.seqlen) + saved;
      return StateArray<Complex<R>>(params_.states, params_, block_, row).load(n);
    }
    Complex<R> h;
    const ArrayView& view = params_.initial_state;
    const int64_t first = batch_ * view.batch + block_.first_channel * view.channel;
    load_states(view, first + n * view.state, block_.channels, view.channel, 1, &h);
    return h;
  }

  /// Walks forward for h and the turns, then back with the gradient g of h.
  void run_state(const Chunk& chunk, int64_t n) {
    h_[0] = state_before(chunk, n);
    inputs_.walk(chunk, n, h_[0], [&](int64_t t, Complex<R> turn, Complex<R> h) {
      turns_[t] = turn;
      h_[t + 1] = h;
    });

    const UnitaryWeight<R> b(chunk, params_.b, params_.variable_b, n);
    const UnitaryWeight<R> c(chunk, params_.c, params_.variable_c, n);
    Complex<R> b_now = b.at(0), c_now = c.at(0);
    Complex<R> db{R(0), R(0)}, dc{R(0), R(0)};
    R dtheta_sum(0);
    T* dtheta = chunk.slab(params_.theta, n);
    const StateArray<Complex<R>> carry(params_.state_gradient, params_, block_, batch_);
    Complex<R> arriving = carry.load(n);
    for (int64_t t = chunk.steps - 1; t >= 0; --t) {
      if (params_.variable_b) b_now = b.at(t);
      if (params_.variable_c) c_now = c.at(t);
      const R dy = R::load(dy_ + t * kWidth);
      const R v = R::load(inputs_.v + t * kWidth);
      const Complex<R> g = dy * conj(c_now) + arriving;
      const Complex<R> dc_term = dy * conj(h_[t + 1]);
      const Complex<R> db_term = v * g;
      (R::load(dv_ + t * kWidth) + real_of_product_conj(g, b_now)).store(dv_ + t * kWidth);
      const Complex<R> rotated = turns_[t] * h_[t];
      const R dtheta_now = g.im * rotated.re - g.re * rotated.im;  // Im(g·conj(rotated))
      dtheta_now.store(dtheta + t * params_.theta.step);
      dtheta_sum += dtheta_now;
      arriving = conj(turns_[t]) * g;
      if (params_.variable_b) store_term(chunk, params_.db_terms, n, t, db_term);
      if (params_.variable_c) store_term(chunk, params_.dc_terms, n, t, dc_term);
      db += db_term;
      dc += dc_term;
    }
    carry.store(n, arriving);
    add_to_sums(params_.sums.theta, n, dtheta_sum);
    if (!params_.variable_b) add_to_sums(params_.sums.b, n, db);
    if (!params_.variable_c) add_to_sums(params_.sums.c, n, dc);
  }

  template <class State>
  void add_to_sums(void* sums, int64_t n, State sum) const {
    StateArray<State>(sums, params_, block_, batch_).add(n, sum);
  }

  void store_term(const Chunk& chunk, const SlabArray& array, int64_t n, int64_t t,
                  Complex<R> term) const {
    store_number(term, chunk.slab(array, n) + t * array.step, array.imag);
  }

  /// Computes the gradients that are sums over the states.
  void finish(const Chunk& chunk) {
    const R D = chunk.load_channels(params_.D, 0);
    R dD(0);
    T* du = chunk.slab(params_.du, 0);
    for (int64_t t = 0; t < chunk.steps; ++t) {
      const int64_t i = t * kWidth;
      const R u = R::load(inputs_.u + i);
      const R sigmoid_u = sigmoid<VectorMath>(u);
      const R silu_u = u * sigmoid_u;
      const R dy = R::load(dy_ + i);
      const R dv = R::load(dv_ + i);
      dD += dy * silu_u;
      ((dv * R::load(inputs_.dt + i) + dy * D) * silu_derivative(u, sigmoid_u))
          .store(du + t * params_.du.step);
      (dv * silu_u).store(dv_ + i);  // ddt
      if (inputs_.has_z) {
        const R z = R::load(inputs_.z + i);
        const R y = R::load(inputs_.y + i) + D * silu_u;
        (R::load(dout_ + i) * y * silu_derivative(z, sigmoid<VectorMath>(z))).store(dy_ + i);
      }
    }
    chunk.store(params_.ddt, dv_);
    if (inputs_.has_z) chunk.store(params_.dz, dy_);
    T* dD_sums = static_cast<T*>(params_.sums.D) + batch_ * params_.dim + block_.first_channel;
    for (int lane = 0; lane < block_.channels; ++lane) dD_sums[lane] += dD.lane(lane);
  }

  const UnitaryBackwardParams& params_;
  const Block& block_;
  int64_t batch_;
  UnitaryInputs<R> inputs_;
  alignas(64) typename Chunk::Tile dout_;
  alignas(64) typename Chunk::Tile dy_;
  alignas(64) typename Chunk::Tile dv_;
  Complex<R> h_[kSteps + 1];  // before the chunk and after every step
  Complex<R> turns_[kSteps];
};

}  // namespace selective_scan::cpu
