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
    for_each_component(view, chunk, dstate, tile, [&](const ArrayView& part, T* rows) {
      if (chunk.lanes.share_projections()) {
        load_tile<R>(shared_section(part, chunk, dstate), rows, kStateChunk);
      } else {
        load_own(part, chunk, dstate, steps_ahead, rows);
      }
    });
  }

  static void store(const ArrayView& view, const Chunk& chunk, int64_t dstate,
                    bool goes_past_caches, const T* tile) {
    for_each_component(view, chunk, dstate, tile, [&](const ArrayView& part, const T* rows) {
      if (chunk.lanes.share_projections()) {
        store_tile<R>(shared_section(part, chunk, dstate), rows, kStateChunk);
        return;
      }
      for (int64_t n = 0; n < dstate; ++n) {
        Section section = own_section(part, n * part.state, chunk);
        section.goes_past_caches = goes_past_caches;
        store_steps<R>(section, chunk, rows + n * kStateChunk * R::kWidth);
      }
    });
  }

 private:
  /// Calls visit(part, rows) for the real and the imaginary part: what belongs to the chunk's batch
  /// entry and group, from step 0 and state 0 on, and the rows of the tile.
  template <class Number, class Visit>
  static void for_each_component(ArrayView view, const Chunk& chunk, int64_t dstate, Number* rows,
                                 const Visit& visit) {
    const Lanes& lanes = chunk.lanes;
    int64_t offset = lanes.block.batch * view.batch + lanes.block.group * view.group;
    for (int component = 0; component < kComponents<State>; ++component) {
      view.data = element_at(view, offset);
      visit(view, rows);
      offset = view.imag;
      rows += dstate * kStateChunk * step_values(lanes.share_projections());
    }
  }

  static Section shared_section(const ArrayView& view, const Chunk& chunk, int64_t dstate) {
    return {element_at(view, chunk.first_step * view.step),
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
  static void load_own(const ArrayView& view, const Chunk& chunk, int64_t dstate,
                       int64_t steps_ahead, T* tile) {
    if (chunk.is_ragged() || (view.state != 1 && view.state != -1)) {
      for (int64_t n = 0; n < dstate; ++n) {
        Section section = own_section(view, n * view.state, chunk);
        section.rows_ahead = steps_ahead;
        load_steps<R>(section, chunk, tile + n * kStateChunk * R::kWidth);
      }
      return;
    }
    for (int64_t t = 0; t < chunk.steps; ++t) {
      Section section = own_section(view, t * view.step, chunk);
      section.rows = dstate;
      section.row_stride = view.state;
      load_tile<R>(section, tile + t * R::kWidth, kStateChunk * R::kWidth);
    }
  }
};

/// B or C of a block: one number per lane and state if constant, a tile for each chunk if variable.
template <class State>
class BlockProjection {
  using R = real_t<State>;
  using T = scalar_t<State>;
  using Tile = ProjectionTile<State>;

 public:
  SELECTIVE_SCAN_HD BlockProjection(Arena& arena, const ScanParams& params, const Block& block,
                                    bool is_variable)
      : dstate_(params.dstate), is_variable_(is_variable) {
    const int64_t tile = Tile::values(dstate_, shares_projections(block));
    constants_ = arena.take<State>(is_variable ? 0 : num_vectors<R>(block) * dstate_);
    tile_ = arena.take<T>(is_variable ? tile : 0);
  }

  void load_constants(const ArrayView& view, const Lanes& lanes, int64_t vector) const {
    if (is_variable_) return;
    channel_states(view, lanes, 0).load(lanes.count, dstate_, constants_ + vector * dstate_);
  }
  void load_chunk(const ArrayView& view, const Chunk& chunk, int64_t steps_ahead) const {
    if (is_variable_) Tile::load(view, chunk, dstate_, steps_ahead, tile_);
  }

  /// Returns the loaded numbers of a vector.
  SELECTIVE_SCAN_HD Projection<State> of(const Lanes& lanes, int64_t vector) const {
    if (!is_variable_) {
      const T* constants = reinterpret_cast<const T*>(constants_ + vector * dstate_);
      return {constants, R::kWidth, false, kComponents<State> * R::kWidth, 0};
    }
    const bool is_shared = lanes.share_projections();
    const int64_t step_values = Tile::step_values(is_shared);
    const int64_t state_stride = kStateChunk * step_values;
    return {tile_, dstate_ * state_stride, is_shared, state_stride, step_values};
  }

 private:
  int64_t dstate_;
  bool is_variable_;
  State* constants_;  // (vector, state)
  T* tile_;
};

/// Loads an array with one number per channel; zeros if it is absent.
template <class R>
void load_channels(const ArrayView& view, const Lanes& lanes, R& values) {
  channel_states(view, lanes, 0).load(lanes.count, 1, &values);
}

/// A block's inputs that hold for all steps, for every vector, and B and C.
template <class State>
struct BlockInputs {
  using R = real_t<State>;
  using T = scalar_t<State>;

  BlockProjection<State> B;
  BlockProjection<State> C;
  Pole<State>* poles;    // (vector, state)
  R* largest_exponents;  // (vector): of |exponent|, over the states
  R* D;                  // (vector)
  R* delta_bias;
  State* staging;  // (state)

  SELECTIVE_SCAN_HD BlockInputs(Arena& arena, const ScanParams& params, const Block& block)
      : B(arena, params, block, params.variable_B), C(arena, params, block, params.variable_C) {
    const int64_t vectors = num_vectors<R>(block);
    poles = arena.take<Pole<State>>(vectors * params.dstate);
    for (R** of_vectors : {&largest_exponents, &D, &delta_bias})
      *of_vectors = arena.take<R>(vectors);
    staging = arena.take<State>(params.dstate);
  }

  void load(const ScanParams& params, const Lanes& lanes, int64_t vector) const {
    const int64_t dstate = params.dstate;
    channel_states(params.A, lanes, 0).load(lanes.count, dstate, staging);
    R largest(T(0));
    for (int64_t n = 0; n < dstate; ++n) {
      const Pole<State> pole = make_pole<VectorMath>(staging[n]);
      largest = greater(magnitude(real(pole.exponent)), largest);
      poles[vector * dstate + n] = pole;
    }
    largest_exponents[vector] = largest;
    B.load_constants(params.B, lanes, vector);
    C.load_constants(params.C, lanes, vector);
    load_channels(params.D, lanes, D[vector]);
    load_channels(params.delta_bias, lanes, delta_bias[vector]);
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
    sweep.B = B.of(chunk.lanes, vector);
    sweep.C = C.of(chunk.lanes, vector);
  }
};

}  // namespace selective_scan::cpu
