// The parameters of the depthwise causal convolution's kernels. With W = width, for every channel
//
//   pre[t] = bias + Σ_k weight[k]·x[t - (W-1) + k]          k = 0 ... W-1
//   out[t] = silu(pre[t]), or pre[t] itself
//
// where x at the W - 1 steps before a sequence's first step is initial_states, or 0. The final
// state is x, extended to the left in this way, at the sequence's last W - 1 steps. The backward
// pass recomputes pre. With g[t] = dout[t]·silu'(pre[t]), for one sequence,
//
//   dx[t]      = Σ_k weight[k]·g[t + (W-1) - k]             plus the gradient from dfinal_states
//   dweight[k] = Σ_t g[t]·x[t - (W-1) + k]                  over all sequences
//   dbias      = Σ_t g[t]
//
// and dinitial_states is dx at the steps before the first.
//
// A batch entry is one sequence, unless one of these arrays divides it:
//  - seq_idx: each run of equal indices is a sequence without states. A step with a negative index
//    belongs to no sequence.
//  - cu_seqlens, with a batch of 1: see PackedSequences. Each of its sequences has states.
// At a step that belongs to no sequence, out and dx are 0, and the step adds nothing to any sum.
//
// As in params.h the caller has validated everything but the values of seq_idx and cu_seqlens. A
// dimension that a tensor lacks, or whose size is 1, may have any stride.
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
  int64_t sequences = 0;  // with states: `batch`, or the number that cu_seqlens bounds

  bool silu = false;
  bool is_double = false;

  ArrayView x;               // (batch, channel, step)
  ArrayView weight;          // (channel, step): the steps are the W taps
  ArrayView bias;            // (channel), optional
  ArrayView initial_states;  // (batch, channel, step): the W - 1 steps before each sequence;
                             // optional

  IndexArray seq_idx;     // (batch, step), optional
  IndexArray cu_seqlens;  // (sequences + 1), optional; not together with seq_idx

  SELECTIVE_SCAN_HD PackedSequences packed() const { return {cu_seqlens, sequences, seqlen}; }
};

struct ConvForwardParams : ConvParams {
  ConvForwardParams() = default;
  explicit ConvForwardParams(const ConvParams& inputs) : ConvParams(inputs) {}

  ArrayView out;           // (batch, channel, step)
  ArrayView final_states;  // like initial_states, optional; never together with seq_idx
};

/// The forward pass of packed sequences whose states lie in slots of a pool, (slot, channel, step).
/// `initial_states` and `final_states` are scratch arrays for the kernels, whose contents are
/// overwritten.
struct ConvPrefillParams : ConvForwardParams {
  StateSlots slots;

  /// Returns initial_states or final_states with the strides that StateSlots expects.
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
  ArrayView dfinal_states;  // like initial_states, optional

  ArrayView dx;               // (batch, channel, step)
  ArrayView dweight;          // (channel, step)
  ArrayView dbias;            // (channel); present if bias is
  ArrayView dinitial_states;  // present if initial_states is
};

/// Advances a convolution by `seqlen` steps and updates its state in place. The state in a slot is
/// x at the last state_len steps, state_len >= width - 1. With cache_seqlens it is a ring buffer: x
/// of step t is stored at t modulo state_len, and cache_seqlens counts the steps before this call.
/// For a row whose index is padding no state is read or written, and out is 0.
struct ConvUpdateParams : ConvParams, SlotRule {
  int64_t slots = 0;
  int64_t state_len = 0;
  int64_t pad_slot_id = -1;

  ArrayView conv_state;           // (batch, channel, step), with the slots as the batch
  ArrayView out;                  // (batch, channel, step); may be x itself
  IndexArray cache_seqlens;       // (batch), optional
  IndexArray conv_state_indices;  // (batch), optional: without them row i has slot i

  SELECTIVE_SCAN_HD int64_t slot_of(int64_t row) const {
    return conv_state_indices.present() ? named_slot(conv_state_indices.at(row), *this) : row;
  }
};

}  // namespace selective_scan
