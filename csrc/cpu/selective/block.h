// The parts that the forward and the backward kernel share: the sections of the arrays that belong
// to a block, and the block's inputs in the kernels' layout.
//
// The lanes of a vector are channels (or segments, see lanes.h). Every lane scans its own system,
// so sums over the states need no shuffling, any dstate fills the vectors, and lanes do not
// interact. The states of a vector are an array of dstate elements of type State (R, or
// Complex<R>).
#pragma once

#include <cstdint>

#include "../../core/discretization.h"
#include "../../core/params.h"
#include "../simd/states.h"
#include "../simd/tile.h"
#include "../simd/vector.h"
#include "../simd/vector_math.h"
#include "../work.h"
#include "lanes.h"
#include "sweeps.h"

namespace selective_scan::cpu {

/// The states of a vector's lanes in an array.
struct LaneStates {
  ArrayView view;
  int64_t offset;  // of the first lane's states
  int64_t lane_stride;

  /// Load or store the states of the first `count` lanes. An absent array gives zeros.
  template <class State>
  void load(int64_t count, int64_t dstate, State* states) const {
    load_states(view, offset, count, lane_stride, dstate, states);
  }
  template <class State>
  void store(int64_t count, int64_t dstate, const State* states) const {
    store_states(view, offset, count, lane_stride, dstate, states);
  }
};

/// Returns the states of a vector of channels in an array (batch, channel, state), for any batch
/// entry or that of their block.
SELECTIVE_SCAN_HD LaneStates channel_states(const ArrayView& view, const Lanes& lanes,
                                            int64_t batch) {
  return {view, batch * view.batch + lanes.channel * view.channel, lanes.channel_stride(view)};
}
SELECTIVE_SCAN_HD LaneStates channel_states(const ArrayView& view, const Lanes& lanes) {
  return channel_states(view, lanes, lanes.block.batch);
}

/// Returns the saved states, of which the first lane's is the state after chunk `chunk` of its
/// sequence.
template <class State>
SELECTIVE_SCAN_HD LaneStates saved_states(const ScanParams& params, const Lanes& lanes,
                                          int64_t chunk) {
  const ArrayView view = contiguous_states<State>(params.states, params);
  const int64_t row = lanes.block.batch * num_saved_states(params.seqlen) + chunk;
  LaneStates states = channel_states(view, lanes, row);
  if (lanes.are_segments()) states.lane_stride = lanes.segment_steps / kStateChunk * view.batch;
  return states;
}

/// Returns one of Segmentation's arrays, with `rows` rows of states per channel; `row` is the first
/// lane's row.
template <class State>
SELECTIVE_SCAN_HD LaneStates segment_rows(const ScanParams& params, const Lanes& lanes, void* data,
                                          int64_t rows, int64_t row) {
  const ArrayView view = contiguous_states<State>(data, params);
  const int64_t first_row = (lanes.block.batch * params.dim + lanes.channel) * rows + row;
  return {view, first_row * view.channel,
          lanes.are_segments() ? view.channel : rows * lanes.channel_stride(view)};
}
/// Returns the boundaries before each segment of a vector, or those `shift` later.
template <class State>
SELECTIVE_SCAN_HD LaneStates boundaries_of(const ScanParams& params, const Lanes& lanes,
                                           int64_t shift) {
  const Segmentation& segmentation = lanes.block.segmentation;
  return segment_rows<State>(params, lanes, segmentation.boundaries, segmentation.count + 1,
                             lanes.block.segment() + shift);
}
template <class State>
SELECTIVE_SCAN_HD LaneStates factors_of(const ScanParams& params, const Lanes& lanes) {
  const Segmentation& segmentation = lanes.block.segmentation;
  return segment_rows<State>(params, lanes, segmentation.factors, segmentation.count,
                             lanes.block.segment());
}

/// Returns ΣΔ.
template <class R>
SELECTIVE_SCAN_HD R span_of(const R* delta, int64_t steps) {
  R span(scalar_t<R>(0));
  for (int64_t t = 0; t < steps; ++t) span += delta[t];
  return span;
}

/// Returns the largest |Δ| of each lane, ignoring NaN.
template <class R>
SELECTIVE_SCAN_HD R largest_step(const R* delta, int64_t steps) {
  R largest(scalar_t<R>(0));
  for (int64_t t = 0; t < steps; ++t) largest = greater(magnitude(delta[t]), largest);
  return largest;
}

/// The affine maps of a block's segments, accumulated while a kernel walks the segments.
template <class State>
struct BlockMaps {
  using R = real_t<State>;
  using T = scalar_t<State>;

  State* offsets = nullptr;  // (vector, state)
  State* factors = nullptr;
  R* spans = nullptr;  // (vector)

  BlockMaps() = default;
  SELECTIVE_SCAN_HD BlockMaps(Arena& arena, const ScanParams& params, const Block& block)
      : offsets(arena.take<State>(num_vectors<R>(block) * params.dstate)),
        factors(arena.take<State>(num_vectors<R>(block) * params.dstate)),
        spans(arena.take<R>(num_vectors<R>(block))) {}

  void begin(const ScanParams& params, const Block& block) const {
    for (int64_t i = 0; i < num_vectors<R>(block) * params.dstate; ++i) {
      offsets[i] = State{};
      factors[i] = one<State>();
    }
    for (int64_t vector = 0; vector < num_vectors<R>(block); ++vector) spans[vector] = R(T(0));
  }

  /// Returns the map that the next steps continue.
  StateMap<State> next(const ScanParams& params, int64_t vector, const R* delta, int64_t steps,
                       bool is_end) const {
    spans[vector] += span_of(delta, steps);
    return {offsets + vector * params.dstate, factors + vector * params.dstate, spans[vector],
            is_end};
  }

  /// Stores the maps. Maps of gradients (`goes_back`) have the conjugate factors. Offsets are
  /// stored at the boundary whose state they contribute to: after the segments, or before them if
  /// `goes_back`.
  void store(const ScanParams& params, const Block& block, bool goes_back) const {
    for (int64_t vector = 0; vector < num_vectors<R>(block); ++vector) {
      const Lanes lanes = lanes_of<R>(block, vector);
      const int64_t first = vector * params.dstate;
      if (goes_back) {
        for (int64_t n = 0; n < params.dstate; ++n) factors[first + n] = conj(factors[first + n]);
      }
      factors_of<State>(params, lanes).store(lanes.count, params.dstate, factors + first);
      boundaries_of<State>(params, lanes, goes_back ? 0 : 1)
          .store(lanes.count, params.dstate, offsets + first);
    }
  }
};

/// Returns the offset of the element (batch, group, 0, 0) of a variable B or C.
SELECTIVE_SCAN_HD int64_t projection_offset(const ArrayView& view, const Block& block) {
  return block.batch * view.batch + block.group * view.group;
}

/// The staged form of a chunk of a variable B or C: a row of kStateChunk steps for every component
/// and state, with imaginary parts after the real parts of all states. A step is one number that
/// all lanes share, or one number per lane.
template <class State>
struct ProjectionTile {
  using R = real_t<State>;
  using T = scalar_t<State>;

  static SELECTIVE_SCAN_HD int64_t step_values(bool is_shared) { return is_shared ? 1 : R::kWidth; }
  static SELECTIVE_SCAN_HD int64_t values(int64_t dstate, bool is_shared) {
    return kComponents<State> * dstate * kStateChunk * step_values(is_shared);
  }

  /// Loads a chunk. The chunk that the caller loads next starts `steps_ahead` steps from this one.
  static void load(const ArrayView& view, const Chunk& chunk, int64_t dstate, int64_t steps_ahead,
                   T* tile) {
    for_each_component(view, chunk.lanes, dstate, tile, [&](const ArrayView& part, T* rows) {
      const int64_t offset = projection_offset(part, chunk.lanes.block);
      if (chunk.lanes.share_projections()) {
        load_tile<R>(shared_section(part, offset, chunk, dstate), rows, kStateChunk);
      } else {
        load_own(part, offset, chunk, dstate, steps_ahead, rows);
      }
    });
  }

  static void store(const ArrayView& view, const Chunk& chunk, int64_t dstate,
                    bool goes_past_caches, const T* tile) {
    for_each_component(view, chunk.lanes, dstate, tile, [&](const ArrayView& part, const T* rows) {
      const int64_t offset = projection_offset(part, chunk.lanes.block);
      if (chunk.lanes.share_projections()) {
        store_tile<R>(shared_section(part, offset, chunk, dstate), rows, kStateChunk);
        return;
      }
      for (int64_t n = 0; n < dstate; ++n) {
        Section section = own_section(part, offset + n * part.state, chunk);
        section.goes_past_caches = goes_past_caches;
        store_steps<R>(section, chunk, rows + n * kStateChunk * R::kWidth);
      }
    });
  }

 private:
  template <class Rows, class Visit>
  static void for_each_component(ArrayView view, const Lanes& lanes, int64_t dstate, Rows* rows,
                                 const Visit& visit) {
    for (int component = 0; component < kComponents<State>; ++component) {
      visit(view, rows);
      view.data = element_at(view, view.imag);
      rows += dstate * kStateChunk * step_values(lanes.share_projections());
    }
  }

  static Section shared_section(const ArrayView& view, int64_t offset, const Chunk& chunk,
                                int64_t dstate) {
    return {element_at(view, offset + chunk.first_step * view.step),
            view.dtype,
            dstate,
            chunk.steps,
            view.state,
            view.step};
  }
  static Section own_section(const ArrayView& view, int64_t offset, const Chunk& chunk) {
    return step_section(view, offset, chunk.lanes.projection_stride(view), chunk);
  }

  /// Loads numbers that lanes do not share, in whole vectors along the steps or the states,
  /// whichever is contiguous.
  static void load_own(const ArrayView& view, int64_t offset, const Chunk& chunk, int64_t dstate,
                       int64_t steps_ahead, T* tile) {
    if (chunk.is_ragged() || (view.state != 1 && view.state != -1)) {
      for (int64_t n = 0; n < dstate; ++n) {
        Section section = own_section(view, offset + n * view.state, chunk);
        section.rows_ahead = steps_ahead;
        load_steps<R>(section, chunk, tile + n * kStateChunk * R::kWidth);
      }
      return;
    }
    for (int64_t t = 0; t < chunk.steps; ++t) {
      Section section = own_section(view, offset + t * view.step, chunk);
      section.rows = dstate;
      section.row_stride = view.state;
      load_tile<R>(section, tile + t * R::kWidth, kStateChunk * R::kWidth);
    }
  }
};

/// Loads an array with one number per channel; zeros if it is absent.
template <class R>
void load_channels(const ArrayView& view, const Lanes& lanes, R& values) {
  channel_states(view, lanes, 0).load(lanes.count, 1, &values);
}

/// A block's inputs that hold for all steps, for every vector, and tiles of B and C.
template <class State>
struct BlockInputs {
  using R = real_t<State>;
  using T = scalar_t<State>;
  using Tile = ProjectionTile<State>;

  Pole<State>* poles;    // (vector, state)
  R* largest_exponents;  // (vector): of |exponent|, over the states
  State* B_constant;     // (vector, state), if constant
  State* C_constant;
  T* B_tile;  // if variable
  T* C_tile;
  R* D;  // (vector)
  R* delta_bias;
  State* staging;  // (state)

  SELECTIVE_SCAN_HD BlockInputs(Arena& arena, const ScanParams& params, const Block& block) {
    const int64_t dstate = params.dstate;
    const int64_t vectors = num_vectors<R>(block);
    const int64_t tile = Tile::values(dstate, shares_projections(block));
    poles = arena.take<Pole<State>>(vectors * dstate);
    largest_exponents = arena.take<R>(vectors);
    B_constant = arena.take<State>(params.variable_B ? 0 : vectors * dstate);
    C_constant = arena.take<State>(params.variable_C ? 0 : vectors * dstate);
    B_tile = arena.take<T>(params.variable_B ? tile : 0);
    C_tile = arena.take<T>(params.variable_C ? tile : 0);
    D = arena.take<R>(vectors);
    delta_bias = arena.take<R>(vectors);
    staging = arena.take<State>(dstate);
  }

  void load(const ScanParams& params, const Lanes& lanes, int64_t vector) const {
    const int64_t dstate = params.dstate;
    const auto load = [&](const ArrayView& view, State* states) {
      channel_states(view, lanes, 0).load(lanes.count, dstate, states);
    };
    load(params.A, staging);
    R largest(T(0));
    for (int64_t n = 0; n < dstate; ++n) {
      const Pole<State> pole = make_pole<VectorMath>(staging[n]);
      largest = greater(magnitude(real(pole.exponent)), largest);
      poles[vector * dstate + n] = pole;
    }
    largest_exponents[vector] = largest;
    if (!params.variable_B) load(params.B, B_constant + vector * dstate);
    if (!params.variable_C) load(params.C, C_constant + vector * dstate);
    load_channels(params.D, lanes, D[vector]);
    load_channels(params.delta_bias, lanes, delta_bias[vector]);
  }

  void load_B(const ScanParams& params, const Chunk& chunk, int64_t steps_ahead) const {
    if (!params.variable_B) return;
    Tile::load(params.B, chunk, params.dstate, steps_ahead, B_tile);
  }
  void load_C(const ScanParams& params, const Chunk& chunk, int64_t steps_ahead) const {
    if (!params.variable_C) return;
    Tile::load(params.C, chunk, params.dstate, steps_ahead, C_tile);
  }

  /// Returns whether every Δ·exponent of a chunk is in BoundedVectorMath's range, as in most
  /// chunks. NaN may pass, since it stays NaN without clamps.
  SELECTIVE_SCAN_HD bool is_bounded(const R* delta, int64_t steps, int64_t vector) const {
    if constexpr (kAlwaysClamps<State>) return true;
    const R largest = largest_step(delta, steps) * largest_exponents[vector];
    return all(largest < R(T(MathConstants<T>::kExponentBias - 1)));
  }

  /// Sets the members of a sweep that come from these inputs and from a chunk's steps.
  SELECTIVE_SCAN_HD void begin_sweep(const ScanParams& params, const Chunk& chunk, int64_t vector,
                                     const R* delta, const R* gains,
                                     ForwardSweep<State>& sweep) const {
    sweep.is_bounded = is_bounded(delta, chunk.steps, vector);
    sweep.dstate = params.dstate;
    sweep.steps = chunk.steps;
    sweep.delta = delta;
    sweep.gain = gains;
    sweep.poles = poles + vector * params.dstate;
    sweep.B = B(params, chunk.lanes, vector);
    sweep.C = C(params, chunk.lanes, vector);
  }

  SELECTIVE_SCAN_HD Projection<State> B(const ScanParams& params, const Lanes& lanes,
                                        int64_t vector) const {
    return params.variable_B ? variable(params, lanes, B_tile)
                             : constant(B_constant + vector * params.dstate);
  }
  SELECTIVE_SCAN_HD Projection<State> C(const ScanParams& params, const Lanes& lanes,
                                        int64_t vector) const {
    return params.variable_C ? variable(params, lanes, C_tile)
                             : constant(C_constant + vector * params.dstate);
  }

 private:
  static SELECTIVE_SCAN_HD Projection<State> variable(const ScanParams& params, const Lanes& lanes,
                                                      const T* tile) {
    const bool is_shared = lanes.share_projections();
    const int64_t step_values = Tile::step_values(is_shared);
    const int64_t state_stride = kStateChunk * step_values;
    return {tile, params.dstate * state_stride, is_shared, state_stride, step_values};
  }
  static SELECTIVE_SCAN_HD Projection<State> constant(const State* states) {
    return {reinterpret_cast<const T*>(states), R::kWidth, false, kComponents<State> * R::kWidth,
            0};
  }
};

}  // namespace selective_scan::cpu
