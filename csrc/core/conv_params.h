// What the kernels of the depthwise causal convolution are given. With W = width, for every channel
//
//   pre[t] = bias + Σ_k weight[k]·x[t - (W-1) + k]          k = 0 ... W-1
//   out[t] = silu(pre[t]), or pre[t] itself
//
// where x at the W - 1 steps before a sequence's first is initial_states, or 0. The last state is
// x, so continued backwards, at the W - 1 steps up to the sequence's last. The backward pass
// computes pre again. With g[t] = dout[t]·silu'(pre[t]), of one sequence,
//
//   dx[t]      = Σ_k weight[k]·g[t + (W-1) - k]             and its part of dfinal_states
//   dweight[k] = Σ_t g[t]·x[t - (W-1) + k]                  over all sequences
//   dbias      = Σ_t g[t]
//
// and dinitial_states is dx at the steps before the first.
//
// A batch entry is one sequence, unless it is divided:
//  - by seq_idx, whose runs of equal indices are sequences without states; a step whose index is
//    negative belongs to none.
//  - by cu_seqlens, with a batch of 1; see PackedSequences. States are those of its sequences.
// For a step that belongs to no sequence, out and dx are 0, and it adds nothing to any sum.
//
// As in params.h the caller has validated everything but the values of seq_idx and cu_seqlens, and
// a dimension that a tensor lacks, or that has the size 1, may have any stride.
#pragma once

#include <cstdint>

#include "index_array.h"
#include "params.h"
#include "state_slots.h"

namespace selective_scan {

constexpr int64_t kMaxConvWidth = 8;

/// Arithmetic and sums are fp64 if is_double, else fp32; every array has its own element type.
struct ConvParams {
  int64_t batch = 0;
  int64_t dim = 0;
  int64_t seqlen = 0;
  int64_t width = 0;      // 1 ... kMaxConvWidth
  int64_t sequences = 0;  // that have states: `batch`, or as many as cu_seqlens bounds

  bool silu = false;
  bool is_double = false;

  ArrayView x;               // (batch, channel, step)
  ArrayView weight;          // (channel, step): its steps are the W taps
  ArrayView bias;            // (channel), optional
  ArrayView initial_states;  // (batch, channel, step): sequences, their W - 1 steps; optional

  IndexArray seq_idx;     // (batch, step), optional
  IndexArray cu_seqlens;  // (sequences + 1), optional; not together with seq_idx

  SELECTIVE_SCAN_HD PackedSequences packed() const { return {cu_seqlens, sequences, seqlen}; }
};

struct ConvForwardParams : ConvParams {
  ConvForwardParams() = default;
  explicit ConvForwardParams(const ConvParams& inputs) : ConvParams(inputs) {}

  ArrayView out;           // (batch, channel, step)
  ArrayView final_states;  // as initial_states, optional; never together with seq_idx
};

/// The forward pass of packed sequences whose states lie in slots of a pool, (slot, channel, step).
/// `initial_states` and `final_states` are arrays for the kernels to use: what is in them before
/// does not matter.
struct ConvPrefillParams : ConvForwardParams {
  ConvPrefillParams() = default;
  explicit ConvPrefillParams(const ConvParams& inputs) : ConvForwardParams(inputs) {}

  StateSlots slots;

  /// initial_states or final_states as StateSlots has them.
  static SELECTIVE_SCAN_HD ArrayView as_states(ArrayView view) {
    view.state = view.step;
    return view;
  }
};

/// Every gradient that is present is written in full, never added to.
struct ConvBackwardParams : ConvParams {
  ConvBackwardParams() = default;
  explicit ConvBackwardParams(const ConvParams& inputs) : ConvParams(inputs) {}

  ArrayView dout;           // (batch, channel, step), optional: absent means zero
  ArrayView dfinal_states;  // as initial_states, optional

  ArrayView dx;               // (batch, channel, step)
  ArrayView dweight;          // (channel, step)
  ArrayView dbias;            // (channel); present where bias is
  ArrayView dinitial_states;  // present where initial_states is
};

/// Some steps more of a convolution whose state stays in memory, in place; `seqlen` counts them.
/// The state of a slot is x at its last state_len steps, state_len >= width - 1. With cache_seqlens
/// it is a ring: x of step t is at t modulo state_len, and cache_seqlens is the number of steps
/// before these. For a row whose index is padding no state is read or changed, and its out is 0.
struct ConvUpdateParams : ConvParams, SlotRule {
  ConvUpdateParams() = default;
  explicit ConvUpdateParams(const ConvParams& inputs) : ConvParams(inputs) {}

  int64_t slots = 0;
  int64_t state_len = 0;
  int64_t pad_slot_id = -1;

  ArrayView conv_state;           // (batch, channel, step): the slots and their steps
  ArrayView out;                  // (batch, channel, step); may be x itself
  IndexArray cache_seqlens;       // (batch), optional
  IndexArray conv_state_indices;  // (batch), optional: else every row has the slot of its number

  SELECTIVE_SCAN_HD int64_t slot_of(int64_t row) const {
    return conv_state_indices.present() ? named_slot(conv_state_indices.at(row), *this) : row;
  }
};

}  // namespace selective_scan
