// The backward scan of a block of channels, over the chunks from the last to the first.
//
// Mapping as in the forward scan. From the state saved before a chunk a sweep goes forward, then
// back (sweep_kernels.h). Gradients of u and Δ are summed over the states in tiles (step, lane).
// Gradients of variable B and C are sums over channels, accumulated over the block's vectors in one
// tile (state, step). Gradients summed over the steps are accumulated in registers through a chunk,
// and with compensation over the chunks.
#pragma once

#include <cstdint>

#include "block.h"
#include "kernels.h"
#include "steps.h"

namespace selective_scan::cpu {

/// The steps of a chunk for one vector of lanes.
template <class R>
struct BackwardSteps : InputSteps<R> {
  R* z;
  R* gate;  // sigmoid(z)
  R* dout;
  R* dy;
  R* y;
  R* du;  // at first the gradient of the gains
  R* ddelta;

  SELECTIVE_SCAN_HD explicit BackwardSteps(Arena& arena) {
    for (R** steps : {&this->biased_delta, &this->decay, &this->delta, &this->u, &this->input_delta,
                      &this->gains, &z, &gate, &dout, &dy, &y, &du, &ddelta}) {
      *steps = arena.take<R>(kStateChunk);
    }
  }
};

template <class State>
struct BackwardScratch {
  using R = real_t<State>;
  using T = scalar_t<State>;

  Arena arena;
  BackwardSteps<R> steps;
  BlockInputs<State> inputs;
  BlockMaps<State> maps;      // if sequences are segmented
  State* carry;               // (vector, state): gradient of h from later steps
  CompensatedSum<State>* dA;  // (vector, state)
  CompensatedSum<State>* dB;  // if constant
  CompensatedSum<State>* dC;
  CompensatedSum<R>* dD;  // (vector)
  CompensatedSum<R>* ddelta_bias;
  T* dB_tile;  // laid out like a ProjectionTile, if variable
  T* dC_tile;
  State* states;  // (state)
  KeptSteps<State> kept;

  SELECTIVE_SCAN_HD BackwardScratch(const BackwardParams& params, const Block& block, void* base)
      : arena{static_cast<char*>(base)}, steps(arena), inputs(arena, params, block) {
    const int64_t vectors = num_vectors<R>(block);
    const int64_t per_state = vectors * params.dstate;
    const int64_t tile = ProjectionTile<State>::values(params.dstate, shares_projections(block));
    constexpr int64_t kKept = kStatesInRegisters * kStateChunk;
    if (block.segmentation.present()) maps = BlockMaps<State>(arena, params, block);
    carry = arena.take<State>(per_state);
    dA = arena.take<CompensatedSum<State>>(per_state);
    dB = arena.take<CompensatedSum<State>>(params.variable_B ? 0 : per_state);
    dC = arena.take<CompensatedSum<State>>(params.variable_C ? 0 : per_state);
    dD = arena.take<CompensatedSum<R>>(vectors);
    ddelta_bias = arena.take<CompensatedSum<R>>(vectors);
    dB_tile = arena.take<T>(params.variable_B ? tile : 0);
    dC_tile = arena.take<T>(params.variable_C ? tile : 0);
    states = arena.take<State>(params.dstate);
    kept.h = arena.take<State>(kKept + kStatesInRegisters);
    kept.first = arena.take<State>(kKept);
    kept.second = arena.take<State>(kKept);
  }
};

/// Calls visit with the offset of every chunk, from the last to the first.
template <class Visit>
SELECTIVE_SCAN_HD void for_each_chunk_backwards(const Block& block, const Visit& visit) {
  for (int64_t offset = round_up(block.steps, kStateChunk) - kStateChunk; offset >= 0;
       offset -= kStateChunk) {
    visit(offset);
  }
}

/// Computes dy, the gradient of the output before the gate: the gradient of out times silu(z).
template <class R>
void load_output_gradient(const BackwardParams& params, const Chunk& chunk, int64_t steps_ahead,
                          const BackwardSteps<R>& steps) {
  load_sequence(params.dout, chunk, steps_ahead, steps.dout);
  if (!params.z.present()) {
    for (int64_t t = 0; t < chunk.steps; ++t) steps.dy[t] = steps.dout[t];
    return;
  }
  load_sequence(params.z, chunk, steps_ahead, steps.z);
  for (int64_t t = 0; t < chunk.steps; ++t) {
    steps.gate[t] = VectorMath::sigmoid(steps.z[t]);
    steps.dy[t] = steps.dout[t] * (steps.z[t] * steps.gate[t]);
  }
}

/// Loads a chunk's inputs and returns the gains. Sets y, du and ddelta to 0.
template <class State, class R>
const R* load_backward_steps(const BackwardParams& params, const Chunk& chunk, R delta_bias,
                             const BackwardSteps<R>& steps) {
  const R* gains = load_inputs<State>(params, chunk, -kStateChunk, delta_bias, steps);
  load_output_gradient(params, chunk, -kStateChunk, steps);
  for (int64_t t = 0; t < chunk.steps; ++t) {
    for (R* sums : {steps.y, steps.du, steps.ddelta}) sums[t] = R(scalar_t<R>(0));
  }
  return gains;
}

/// Computes the gradients of the sequences, which are stored, and of D and delta_bias, which are
/// accumulated, from Re(Σ C·h) in y and the states' parts of du and ddelta. If the gains contain
/// the steps `gain_steps`, du holds the gradient of the gains, part of which goes to the steps.
template <class State, class R>
void finish_backward_steps(const BackwardParams& params, const Chunk& chunk, R D,
                           const R* gain_steps, const BackwardSteps<R>& steps,
                           CompensatedSum<R>& dD, CompensatedSum<R>& ddelta_bias) {
  // Hoisted out of the loop, since they are the same for all steps.
  const bool has_input_delta = params.input_delta.present();
  const bool has_softplus = params.delta_softplus;
  R dD_of_chunk(scalar_t<R>(0)), ddelta_bias_of_chunk(scalar_t<R>(0));
  for (int64_t t = 0; t < chunk.steps; ++t) {
    const R u = steps.u[t];
    const R dy = steps.dy[t];
    R du = steps.du[t];
    if (gain_steps) {
      const R dgain = du;
      du = gain_steps[t] * dgain;
      if (has_input_delta) {
        steps.input_delta[t] = u * dgain;
      } else {
        steps.ddelta[t] += u * dgain;
      }
    }
    steps.du[t] = du + D * dy;
    if (has_softplus) {
      steps.ddelta[t] =
          steps.ddelta[t] * VectorMath::softplus_derivative(steps.biased_delta[t], steps.decay[t]);
    }
    dD_of_chunk += dy * u;
    ddelta_bias_of_chunk += steps.ddelta[t];
  }
  dD.add(dD_of_chunk);
  ddelta_bias.add(ddelta_bias_of_chunk);
  if (params.z.present()) {
    for (int64_t t = 0; t < chunk.steps; ++t) {
      const R z = steps.z[t];
      const R y = constant<State>(kOutputScale<State>) * steps.y[t] + D * steps.u[t];
      steps.z[t] = steps.dout[t] * y * silu_derivative(z, steps.gate[t]);
    }
    store_sequence(params.dz, chunk, -kStateChunk, steps.z);
  }
  store_sequence(params.du, chunk, -kStateChunk, steps.du);
  store_sequence(params.ddelta, chunk, -kStateChunk, steps.ddelta);
  if (has_input_delta) {
    store_sequence(params.dinput_delta, chunk, -kStateChunk, steps.input_delta);
  }
}

/// Gradients of B and C from this size on bypass the caches, in which little of them would remain.
constexpr int64_t kBytesPastCaches = int64_t{4} << 20;

/// Stores a tile of the gradient of a variable B or C, in `blocks` if several blocks contribute to
/// it.
template <class State>
void store_projection_gradient(const BackwardParams& params, const Chunk& chunk,
                               const BackwardPartials& partials, const ArrayView& gradient,
                               void* blocks, const scalar_t<State>* tile) {
  using T = scalar_t<State>;
  if (!blocks) {
    const int64_t values = params.batch * params.groups * params.dstate * params.seqlen;
    const int64_t bytes = values * kComponents<State> * element_size(gradient.dtype);
    ProjectionTile<State>::store(gradient, chunk, params.dstate, bytes >= kBytesPastCaches, tile);
    return;
  }
  const int64_t size = ProjectionTile<State>::values(params.dstate, true);
  const int64_t chunks = ceil_div(params.seqlen, kStateChunk);
  const Block& block = chunk.lanes.block;
  const int64_t index =
      ((block.batch * params.groups + block.group) * partials.blocks_per_group + block.index) *
          chunks +
      chunk.first_step / kStateChunk;
  memcpy(static_cast<T*>(blocks) + index * size, tile, size * sizeof(T));
}

template <class State>
struct BackwardKernel {
  using R = real_t<State>;
  using T = scalar_t<State>;
  using Scratch = BackwardScratch<State>;

  static int64_t scratch_bytes(const BackwardParams& params, const Block& block) {
    return Scratch(params, block, nullptr).arena.bytes;
  }

  static void run(const BackwardParams& params, const Block& block,
                  const BackwardPartials& partials, void* scratch_base) {
    const Scratch scratch(params, block, scratch_base);
    const int64_t vectors = num_vectors<R>(block);
    const int64_t dstate = params.dstate;
    for (int64_t vector = 0; vector < vectors; ++vector) {
      const Lanes lanes = lanes_of<R>(block, vector);
      scratch.inputs.load(params, lanes, vector);
      State* carry = scratch.carry + vector * dstate;
      if (lanes.are_segments() || !block.is_last()) {
        boundaries_of<State>(params, lanes, 1).load(lanes.count, dstate, carry);
      } else {
        channel_states(params.dlast_state, lanes).load(lanes.count, dstate, carry);
      }
      for (int64_t i = vector * dstate; i < (vector + 1) * dstate; ++i) {
        scratch.dA[i] = {};
        if (!params.variable_B) scratch.dB[i] = {};
        if (!params.variable_C) scratch.dC[i] = {};
      }
      scratch.dD[vector] = {};
      scratch.ddelta_bias[vector] = {};
    }

    if (block.finds_map) scratch.maps.begin(params, block);
    for_each_chunk_backwards(block, [&](int64_t offset) {
      // Any vector serves here: vectors differ only in their channels.
      const Lanes first = lanes_of<R>(block, 0);
      const Chunk chunk = chunk_at(params, first, offset);
      scratch.inputs.B.load_chunk(params.B, chunk, -kStateChunk);
      scratch.inputs.C.load_chunk(params.C, chunk, -kStateChunk);
      const int64_t tile = ProjectionTile<State>::values(dstate, first.share_projections());
      if (params.variable_B) clear(scratch.dB_tile, tile);
      if (params.variable_C) clear(scratch.dC_tile, tile);
      for (int64_t vector = 0; vector < vectors; ++vector) {
        const Lanes lanes = lanes_of<R>(block, vector);
        scan_chunk(params, chunk_at(params, lanes, offset), scratch, vector);
      }
      if (params.variable_B) {
        store_projection_gradient<State>(params, chunk, partials, params.dB, partials.dB_blocks,
                                         scratch.dB_tile);
      }
      if (params.variable_C) {
        store_projection_gradient<State>(params, chunk, partials, params.dC, partials.dC_blocks,
                                         scratch.dC_tile);
      }
    });

    finish_stores_past_caches();
    if (block.finds_map) scratch.maps.store(params, block, true);
    for (int64_t vector = 0; vector < vectors; ++vector) {
      store_sums(params, lanes_of<R>(block, vector), partials, scratch, vector);
    }
  }

 private:
  static SELECTIVE_SCAN_HD void clear(T* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) values[i] = T(0);
  }

  /// Loads the states before a chunk.
  static void load_states_before(const BackwardParams& params, const Chunk& chunk, State* states) {
    const Lanes& lanes = chunk.lanes;
    const int64_t dstate = params.dstate;
    const int64_t first_chunk = chunk.first_step / kStateChunk;
    const int64_t count = chunk.whole_lanes + (chunk.rest > 0 ? 1 : 0);  // lanes with steps
    if (first_chunk > 0) {
      return saved_states<State>(params, lanes, first_chunk - 1).load(count, dstate, states);
    }
    if (!lanes.are_segments()) {
      return channel_states(params.initial_state, lanes).load(lanes.count, dstate, states);
    }
    // The first lane starts with the initial state, the others with saved states.
    for (int64_t n = 0; n < dstate; ++n) states[n] = State{};
    if (count > 1) {
      const int64_t second_chunk = lanes.segment_steps / kStateChunk;
      saved_states<State>(params, lanes, second_chunk - 1).load(count - 1, dstate, states);
    }
    T* row = reinterpret_cast<T*>(states);
    for (int64_t i = 0; i < dstate * kComponents<State>; ++i, row += R::kWidth) {
      memmove(row + 1, row, (R::kWidth - 1) * sizeof(T));
      row[0] = T(0);
    }
    if (!params.initial_state.present()) return;
    const LaneStates initial = channel_states(params.initial_state, lanes);
    const Section section = state_section(initial.view, initial.offset, 1, 0, dstate);
    constexpr int64_t kPitch = kComponents<State> * R::kWidth;
    row = reinterpret_cast<T*>(states);
    load_lane<R>(section, row, kPitch);
    if constexpr (is_complex_v<State>) {
      load_lane<R>(imaginary_part(section, initial.view), row + R::kWidth, kPitch);
    }
  }

  static void sweep(const BackwardParams& params, const Chunk& chunk, const R* gains,
                    const Scratch& scratch, int64_t vector) {
    const int64_t of_vector = vector * params.dstate;
    const auto gradient = [&](bool is_variable, T* tile, CompensatedSum<State>* sums) {
      return ProjectionGradient<State>{is_variable ? tile : nullptr,
                                       chunk.lanes.share_projections(),
                                       is_variable ? nullptr : sums + of_vector};
    };
    BackwardSweep<State> sweep;
    scratch.inputs.begin_sweep(params, chunk, vector, scratch.steps.delta, gains, sweep);
    sweep.states = scratch.states;
    sweep.y = scratch.steps.y;
    sweep.dy = scratch.steps.dy;
    sweep.dgain = scratch.steps.du;
    sweep.ddelta = scratch.steps.ddelta;
    sweep.carry = scratch.carry + of_vector;
    sweep.dA = scratch.dA + of_vector;
    sweep.dB = gradient(params.variable_B, scratch.dB_tile, scratch.dB);
    sweep.dC = gradient(params.variable_C, scratch.dC_tile, scratch.dC);
    sweep.kept = scratch.kept;
    if (chunk.lanes.block.finds_map) {
      sweep.map =
          scratch.maps.next(params, vector, scratch.steps.delta, chunk.steps, chunk.is_first());
    }
    Sweeps<State>::of(params).backward(sweep);
  }

  static void scan_chunk(const BackwardParams& params, const Chunk& chunk, const Scratch& scratch,
                         int64_t vector) {
    const BackwardSteps<R>& steps = scratch.steps;
    const R* gains =
        load_backward_steps<State>(params, chunk, scratch.inputs.delta_bias[vector], steps);
    load_states_before(params, chunk, scratch.states);
    sweep(params, chunk, gains, scratch, vector);
    clear_steps_beyond(chunk, steps.ddelta);
    const bool has_steps = gains != steps.u;
    const R* gain_steps = params.input_delta.present() ? steps.input_delta : steps.delta;
    finish_backward_steps<State>(params, chunk, scratch.inputs.D[vector],
                                 has_steps ? gain_steps : nullptr, steps, scratch.dD[vector],
                                 scratch.ddelta_bias[vector]);
  }

  static void store_sums(const BackwardParams& params, const Lanes& lanes,
                         const BackwardPartials& partials, const Scratch& scratch, int64_t vector) {
    const Block& block = lanes.block;
    const int64_t dstate = params.dstate;
    const int64_t row = block.batch * block.segmentation.parts() + block.part;
    const int64_t first_channel = row * params.dim + lanes.channel;
    const auto store = [&](void* data, const CompensatedSum<State>* sums) {
      const ArrayView view = contiguous_states<State>(data, params);
      for (int64_t n = 0; n < dstate; ++n) {
        scratch.states[n] = sums[vector * dstate + n].value();
        if (lanes.are_segments()) sum_over_lanes(scratch.states[n]);
      }
      store_states(view, first_channel * view.channel, lanes.are_segments() ? 1 : lanes.count,
                   lanes.channel_stride(view), dstate, scratch.states);
    };
    const auto store_channels = [&](void* data, const CompensatedSum<R>& sum) {
      R value = sum.value();
      if (lanes.are_segments()) sum_over_lanes(value);
      T* target = static_cast<T*>(data) + first_channel;
      const int64_t count = lanes.are_segments() ? 1 : lanes.count;
      for (int64_t lane = 0; lane < count; ++lane) target[lane * lanes.channels] = value.lane(lane);
    };
    store(partials.dA, scratch.dA);
    if (!params.variable_B) store(partials.dB, scratch.dB);
    if (!params.variable_C) store(partials.dC, scratch.dC);
    if (params.D.present()) store_channels(partials.dD, scratch.dD[vector]);
    if (params.delta_bias.present()) {
      store_channels(partials.ddelta_bias, scratch.ddelta_bias[vector]);
    }
    if (params.initial_state.present() && !lanes.are_segments() && block.is_first()) {
      channel_states(params.dinitial_state, lanes)
          .store(lanes.count, dstate, scratch.carry + vector * dstate);
    }
  }

  /// Leaves the sum of all lanes in the first one. Lanes without a segment hold 0.
  static SELECTIVE_SCAN_HD void sum_over_lanes(R& value) {
    double sum = 0;
    for (int lane = 0; lane < R::kWidth; ++lane) sum += value.lane(lane);
    value.set_lane(0, static_cast<T>(sum));
  }
  static SELECTIVE_SCAN_HD void sum_over_lanes(Complex<R>& value) {
    sum_over_lanes(value.re);
    sum_over_lanes(value.im);
  }
};

}  // namespace selective_scan::cpu
