// This goes from the arguments of s6_step to kernel parameters.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../core/step_params.h"
#include "packed_sequences.h"
#include "tensor_views.h"

namespace selective_scan::op {

using OptionalTensors = std::optional<TensorList>;

/// The tensors of a call in the order of the schema. Lists have an entry for each layer, or none.
struct StepArguments {
  enum Index {
    kHidden,
    kNorm,
    kInProj,
    kInProjBias,
    kConv,
    kConvBias,
    kXProj,
    kDtProj,
    kDtProjBias,
    kALog,
    kD,
    kOutProj,
    kOutProjBias,
    kConvState,
    kState,
    kNormF,
    kHead,
    kIndices,
    kWorkspace,
    kArguments
  };

  std::array<std::span<const Tensor>, kArguments> tensors;
  double eps;
  bool delta_softplus;
  Method method;

  const Tensor& hidden() const { return tensors[kHidden].front(); }
  bool has(Index argument) const { return !tensors[argument].empty(); }
  /// This is for what is no list.
  OptionalTensor single(Index argument) const {
    return has(argument) ? OptionalTensor(tensors[argument].front()) : std::nullopt;
  }
};

inline bool is_aligned(const Tensor& tensor, int64_t alignment) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % alignment == 0;
}

/// Parameters, and what they point to.
struct StepCall {
  StepParams params;
  std::vector<StepLayer> layers;
  std::vector<Tensor> copies;  // of weights that are not contiguous, or not aligned
};

/// Refuses whatever no kernel may see, but for indices out of range; returns parameters with
/// everything filled in but `out`. Weights are aligned to so many bytes, or copied.
StepCall make_step_call(const StepArguments& args, int64_t alignment);

inline ArrayView hidden_view(const Tensor& hidden) {
  return view_of(hidden, &ArrayView::batch, &ArrayView::step, &ArrayView::channel);
}

/// Refuses indices of slots that there are not; reads them, so that they must be the host's.
void check_slots(const StepParams& params);

}  // namespace selective_scan::op
