// The parameters of the s6_step kernels, which take a few tokens through a stack of plain layers.
//
// A row is one step of one batch entry. In every layer, for all rows,
//
//   h        = r / sqrt(mean r² + eps) · norm
//   x, z     = in_proj·h + in_bias
//   x        = silu(convolution of x, which goes on from conv_state)
//   dt, B, C = x_proj·x                          each divided by its rms, if inner_eps ≥ 0
//   Δ        = dt_proj·dt + dt_bias, through softplus
//   s        = abar·s + bbar·B·x                    by Δ and A = −exp(A_log)
//   y        = (Σ C·s + D·x)·silu(z)
//   r        = r + out_proj·y + out_bias
//
// Without norms h is r itself, and r becomes out_proj·y + out_bias without the residual.
//
// At the end out = r, or norm_f of r, or head · norm_f of r. The steps of a batch entry go through
// convolution and scan one after another; matrix products take all rows at once.
#pragma once

#include <cstdint>

#include "index_array.h"
#include "params.h"

namespace selective_scan {

/// One layer. Matrices are contiguous, of StepParams::weight_dtype; vectors and A_log are
/// contiguous, of the dtypes in StepParams. A null pointer stands for an absent tensor, which is
/// then absent from all layers.
struct StepLayer {
  const void* norm;       // (dim)
  const void* in_proj;    // (2·inner, dim): rows of x, then those of z
  const void* in_bias;    // (2·inner)
  const void* conv;       // (inner, width)
  const void* conv_bias;  // (inner)
  const void* x_proj;     // (rank + 2·dstate, inner): rows of dt, then of B and C
  const void* dt_proj;    // (inner, rank)
  const void* dt_bias;    // (inner)
  const void* A_log;      // (inner, dstate)
  const void* D;          // (inner)
  const void* out_proj;   // (dim, inner)
  const void* out_bias;   // (dim)
  void* conv_state;       // (slot, channel, width − 1)
  void* state;            // (slot, channel, state)
};

struct StepParams : SlotRule {
  static constexpr int64_t pad_slot_id = kNoSlot;  // only negative indices are padding

  int64_t batch = 0;
  int64_t steps = 1;
  int64_t layers = 0;
  int64_t dim = 0;         // d_model
  int64_t inner = 0;       // d_inner
  int64_t dstate = 0;      // 1 to 64
  int64_t rank = 0;        // dt_rank
  int64_t width = 0;       // of the convolution
  int64_t vocabulary = 0;  // rows of head; 0: none
  int64_t slots = 0;

  Method method = Method::kZoh;
  bool is_double = false;  // arithmetic in fp64, else fp32
  bool delta_softplus = false;
  double eps = 0;
  double inner_eps = -1;  // of the norms of dt, B and C; negative: there are none

  DType weight_dtype = DType::kFloat32;
  DType norm_dtype = DType::kFloat32;
  DType in_bias_dtype = DType::kFloat32;
  DType conv_bias_dtype = DType::kFloat32;
  DType dt_bias_dtype = DType::kFloat32;
  DType A_dtype = DType::kFloat32;
  DType D_dtype = DType::kFloat32;
  DType out_bias_dtype = DType::kFloat32;
  DType final_norm_dtype = DType::kFloat32;

  const StepLayer* layer = nullptr;  // [layers], on the host
  const void* final_norm = nullptr;  // (dim), optional
  const void* head = nullptr;        // (vocabulary, dim), contiguous, of weight_dtype, optional

  ArrayView hidden;      // (batch, step, channel)
  ArrayView out;         // (batch, step, channel), with dim or vocabulary channels
  ArrayView conv_state;  // for every layer, at its own pointer: (slot, channel, step)
  ArrayView state;       // for every layer, at its own pointer: (slot, channel, state)

  IndexArray slot_indices;  // (batch), optional: without them batch entry b has slot b

  SELECTIVE_SCAN_HD int64_t rows() const { return batch * steps; }
  SELECTIVE_SCAN_HD int64_t projections() const { return rank + 2 * dstate; }
  SELECTIVE_SCAN_HD bool has_inner_norms() const { return inner_eps >= 0; }
  SELECTIVE_SCAN_HD int64_t slot(int64_t entry) const {
    return slot_indices.present() ? named_slot(slot_indices.at(entry), *this) : entry;
  }
};

}  // namespace selective_scan
