// Translates the arguments of s6_step to kernel parameters.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "../core/step_params.h"
#include "argument_tables.h"
#include "scan_arguments.h"
#include "tensor_views.h"

namespace selective_scan::op {

/// The arguments of s6_step. PyTorch, or a prepared step, keeps their tensors alive.
struct StepArguments {
  using Op = tables::S6StepArguments;

  std::array<Entries, tables::kS6Step.arguments.size()> tensors;
  double eps, inner_eps;
  bool delta_softplus;
  Method method;

  StepArguments(const Op& op)
      : tensors(op.tensors()),
        eps(op.eps),
        inner_eps(op.inner_eps),
        delta_softplus(op.delta_softplus),
        method(parse_method(op.discretization_method)) {}

  const Tensor& hidden() const { return tensors[Op::kHidden].front(); }
  bool has(Index argument) const { return !tensors[argument].empty(); }
  /// Returns the tensor of an argument that is not a list.
  OptionalTensor single(Index argument) const {
    return has(argument) ? OptionalTensor(tensors[argument].front()) : std::nullopt;
  }
};

inline bool is_aligned(const Tensor& tensor, int64_t alignment) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % alignment == 0;
}

/// The parameters of a call, and the memory that they point to.
struct StepCall {
  StepParams params;
  std::vector<StepLayer> layers;
  std::vector<Tensor> copies;  // of weights that are not contiguous, or not aligned
};

/// Refuses invalid and unsupported calls, but does not check indices; returns parameters with
/// everything filled in but `out`. Weights that are not aligned to `alignment` bytes are copied.
StepCall make_step_call(const StepArguments& args, int64_t alignment);

inline ArrayView hidden_view(const Tensor& hidden) {
  return view_of(hidden, &ArrayView::batch, &ArrayView::step, &ArrayView::channel);
}

}  // namespace selective_scan::op
