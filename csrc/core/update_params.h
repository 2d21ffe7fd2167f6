// The parameters of the state update's kernels: one step, or a few, of the selective scan, with
// states that stay in memory between calls.
//
//   h = state[source]        then for every step of a row   h = abar·h + bbar·B·x
//                                                           y = Σ_n C[n]·h[n] + D·x
//                                                           out = y·silu(z)
//   state[destination] = h   after the steps that have a destination
//
// with Δ, abar and bbar as in the scan. out and the next step are computed from h before it is
// rounded to the states' type.
//
// Channels belong to heads; in a call without heads the groups are the heads. As in params.h the
// caller has validated everything but the indices, and a dimension that an array lacks has stride
// 0. ArrayView::batch is the stride of rows, and of slots for `state`. ArrayView::group is the
// stride of heads, and of groups for B and C.
#pragma once

#include <cstdint>

#include "config.h"
#include "index_array.h"
#include "params.h"

namespace selective_scan {

struct UpdateParams : SlotRule {
  int64_t batch = 0;
  int64_t steps = 1;
  int64_t heads = 1;
  int64_t groups = 1;  // head h belongs to group h / (heads / groups)
  int64_t dim = 0;     // channels of a head
  int64_t dstate = 0;
  int64_t slots = 0;

  Method method = Method::kZoh;
  bool is_complex = false;  // A, B, C and the states are complex
  bool is_double = false;   // arithmetic in fp64, else fp32
  bool dt_softplus = false;
  bool A_is_log = false;             // for real A: the array holds log(−A)
  bool destination_by_step = false;  // else only the last step has one

  ArrayView state;  // (slot, head, channel, state)
  ArrayView x;      // (batch, step, head, channel), like dt, z, input_delta and out
  ArrayView dt;
  ArrayView A;            // (head, channel, state)
  ArrayView B;            // (batch, step, group, state)
  ArrayView C;            // like B
  ArrayView D;            // (head, channel), optional
  ArrayView z;            // optional
  ArrayView input_delta;  // optional: E, if bbar = E·b(Δ·A) instead of Δ·b(Δ·A)
  ArrayView dt_bias;      // (head, channel), optional
  ArrayView out;

  IndexArray sources;       // (batch), optional: without them row i has slot i
  IndexArray destinations;  // (batch) or (batch, step), optional: without them a row's source
  int64_t pad_slot_id = -1;

  SELECTIVE_SCAN_HD int64_t slot_of(int64_t index) const { return named_slot(index, *this); }
  SELECTIVE_SCAN_HD int64_t source(int64_t row) const {
    return sources.present() ? slot_of(sources.at(row, 0)) : row;
  }
  /// Returns the slot for the state after a step of a row whose source is `source`.
  SELECTIVE_SCAN_HD int64_t destination(int64_t row, int64_t step, int64_t source) const {
    if (!destination_by_step && step + 1 < steps) return kNoSlot;
    return destinations.present() ? slot_of(destinations.at(row, step)) : source;
  }

  SELECTIVE_SCAN_HD int64_t group_of(int64_t head) const { return head / (heads / groups); }
};

}  // namespace selective_scan
