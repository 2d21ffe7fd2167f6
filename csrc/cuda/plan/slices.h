// Calls that run as several, each with a slice of the states, or on copies of their rows.
//
// y is a sum over states, and what comes behind it is linear: so slices of the states, A, B, C and
// their gradients run one after another by the kernels that hold them, and what they leave of out,
// du, ddelta and dz is added up in fp32 and rounded once. Rows that kernels do not take, or slowly,
// are copied to fp32 or to another layout first.
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
  // What rows are copied to that are not so already:
  DType dtype;
  bool along_steps;  // steps are neighbours in memory, else channels
  bool has_vectors;  // rows must be aligned, and long enough, for vectors
};

template <class Params>
using PlanOf = std::conditional_t<std::is_same_v<Params, ForwardParams>, ForwardPlan, BackwardPlan>;

/// A call's part, and the sums that follow it.
template <class Params>
struct StateSlice {
  Params params;
  PlanOf<Params> plan;
  std::vector<RowSum> sums;
};

template <class Params>
struct SlicedPlan {
  std::vector<RowSum> copies;  // in front of all
  std::vector<StateSlice<Params>> slices;
  int64_t scratch_bytes = 0;  // of every slice in turn
};

/// Whether a call runs in slices. Saved states are those of one slice behind those of another, so
/// this follows from what both passes are given alike and the kind of device, and from nothing
/// else.
std::optional<Arrangement> arrange_states(const ScanParams& params, const Device& device);

/// Whether a call that would run by `plan` is faster on copies of its rows, if another path than
/// the floor takes these.
std::optional<Arrangement> arrange_rows(const ForwardParams& params, const Device& device,
                                        const ForwardPlan& plan);
std::optional<Arrangement> arrange_rows(const BackwardParams& params, const Device& device,
                                        const BackwardPlan& plan);

/// `memory` is asked for that of copies and parts.
template <class Params>
SlicedPlan<Params> plan_slices(const Params& params, const Arrangement& arrangement,
                               const Device& device, std::optional<Path> wanted,
                               const ScratchMemory& memory);

}  // namespace selective_scan::cuda
