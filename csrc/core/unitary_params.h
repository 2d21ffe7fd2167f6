// The parameters of the adaptive unitary scan's kernels. With b and c complex,
//
//   theta[t,d,n] = Σ_r x[d,n,r]·u[t,r] + x_bias[d,n]
//   h[t] = exp(i·theta[t])·h[t-1] + b·dt[t]·silu(u[t])
//   y[t] = Re Σ_n c_n h[t,n]
//   out  = (y + D·silu(u))·silu(z)
//
// theta is a matrix product, which the caller computes one slab at a time: some steps of some batch
// entries. A kernel works on one slab. It begins with the state that the previous slab left, and
// rotates by the angle of the step alone, so phases are as accurate at the last step as at the
// first. The backward pass visits the slabs from the last to the first and replaces theta by its
// gradient in place, from which the caller's matrix products compute the gradients of x and u.
#pragma once

#include <cstdint>

#include "params.h"

namespace selective_scan {

/// A real array (batch, step, channel, state) of the compute type that covers one slab: indices
/// count from the slab's first batch entry and first step. Strides count elements.
struct SlabArray {
  void* data = nullptr;
  int64_t batch = 0;
  int64_t step = 0;
  int64_t group = 0;    // stride of the group that a channel belongs to
  int64_t channel = 0;  // stride of the channel within its group
  int64_t state = 0;
  int64_t imag = 0;  // from the real to the imaginary part, if there are two

  SELECTIVE_SCAN_HD bool present() const { return data != nullptr; }
};

struct UnitaryScanParams {
  int64_t batch = 0;
  int64_t dim = 0;
  int64_t groups = 1;  // channel d belongs to group d / (dim / groups)
  int64_t dstate = 0;
  int64_t seqlen = 0;

  // The slab. first_step is a multiple of kUnitaryStateChunk.
  int64_t first_batch = 0;
  int64_t batches = 0;
  int64_t first_step = 0;
  int64_t steps = 0;

  bool is_double = false;
  bool variable_b = false;  // b has steps (batch, group, state, step), else (state)
  bool variable_c = false;

  ArrayView u;       // (batch, channel, step)
  ArrayView dt;      // (batch, channel, step)
  ArrayView z;       // (batch, channel, step), optional
  ArrayView x_bias;  // (channel, state)
  ArrayView b;       // complex
  ArrayView c;       // complex
  ArrayView D;       // (channel)
  SlabArray theta;   // without x_bias

  /// (batch, channel, state), contiguous, complex of the compute type: the initial state before the
  /// first slab. The forward pass leaves the last state here.
  void* state = nullptr;
  /// States after every kUnitaryStateChunk steps but the last: (batch, chunk, channel, state),
  /// contiguous, of the same type. Written by the forward pass when present, read by the backward
  /// pass.
  void* states = nullptr;
};

struct UnitaryForwardParams : UnitaryScanParams {
  explicit UnitaryForwardParams(const UnitaryScanParams& inputs) : UnitaryScanParams(inputs) {}

  ArrayView out;  // (batch, channel, step)
};

/// Sums over time for every (batch, channel, state), contiguous, of the compute type. Each slab is
/// added to them.
struct UnitarySums {
  void* theta = nullptr;  // real: the gradient of x_bias before the sum over the batch
  void* b = nullptr;      // complex, interleaved; constant b
  void* c = nullptr;
  void* D = nullptr;  // real, (batch, channel)
};

struct UnitaryBackwardParams : UnitaryScanParams {
  explicit UnitaryBackwardParams(const UnitaryScanParams& inputs) : UnitaryScanParams(inputs) {}

  ArrayView initial_state;  // (batch, channel, state), optional
  ArrayView dout;           // (batch, channel, step), optional: absent means zero

  ArrayView ddt;
  ArrayView dz;
  /// The gradient of u without its part through theta, in the compute type.
  SlabArray du;

  /// On entry the gradient of the state after the slab, on return that of the state before it; laid
  /// out like `state`.
  void* state_gradient = nullptr;

  UnitarySums sums;
  SlabArray db_terms;  // variable b: the contribution of each channel
  SlabArray dc_terms;
};

}  // namespace selective_scan
