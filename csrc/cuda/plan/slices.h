// Calls that run as several calls, each with a slice of the states, or on copies of their rows.
//
// y is a sum over states, and everything after it is linear. So slices of the states, with A, B, C
// and their gradients, run one after another on kernels that hold one slice; their parts of out,
// du, ddelta and dz are summed in fp32 and rounded once. Rows that kernels do not support, or run
// slowly, are first copied to fp32 or to another layout.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "../kit/row_sum.h"
#include "plan.h"

namespace selective_scan::cuda {

/// How a call is arranged.
struct Arrangement {
  int64_t slice_states;  // the last slice may have fewer
  int64_t slices;
  // The form of the copies of rows that do not have it already:
  DType dtype;
  bool along_steps;  // steps are contiguous, else channels
  bool has_vectors;  // rows are aligned and long enough for vectors
};

template <class Params>
using PlanOf = std::conditional_t<std::is_same_v<Params, ForwardParams>, ForwardPlan, BackwardPlan>;

/// A slice of a call, and the sums to launch after it.
template <class Params>
struct StateSlice {
  Params params;
  PlanOf<Params> plan;
  std::vector<RowSum> sums;
};

template <class Params>
struct SlicedPlan {
  std::vector<RowSum> copies;  // before all slices
  std::vector<StateSlice<Params>> slices;
  int64_t scratch_bytes = 0;  // of the slice that needs most; slices reuse it in turn
};

/// Returns an arrangement if a call runs in slices. Saved states are stored slice by slice, so the
/// decision depends only on inputs that both passes have in common and on the kind of device.
std::optional<Arrangement> arrange_states(const ScanParams& params, const Device& device);

/// Returns an arrangement if a call planned as `plan` is faster on copies of its rows, provided
/// that a path other than the floor takes the copies.
std::optional<Arrangement> arrange_rows(const ForwardParams& params, const Device& device,
                                        const ForwardPlan& plan);
std::optional<Arrangement> arrange_rows(const BackwardParams& params, const Device& device,
                                        const BackwardPlan& plan);

/// Plans the slices. `memory` provides memory for copies and parts.
template <class Params>
SlicedPlan<Params> plan_slices(const Params& params, const Arrangement& arrangement,
                               const Device& device, std::optional<Path> wanted,
                               const ScratchMemory& memory);

}  // namespace selective_scan::cuda
