// Calls of s6_step that are repeated with other values of hidden, token after token. Passing the
// tensor lists of a stack of layers and checking them takes longer than a small stack's kernels.
#pragma once

#include <memory>

#include "step_arguments.h"

namespace selective_scan::op {

/// A call with checked arguments, which it keeps alive.
class PreparedStep {
 public:
  /// Checks the arguments.
  PreparedStep(const StepArguments& args, int64_t alignment);

  /// Returns whether the call is unchanged apart from hidden's values and strides: whether every
  /// tensor has the dtype, device, sizes, strides and memory that it had.
  bool is_as_it_was(const Tensor& hidden) const;
  /// Returns the call's parameters for this hidden; they are valid while `made` lives.
  StepParams params_for(const Tensor& hidden, StepCall& made) const;
  /// Empty if the call has no workspace.
  OptionalTensor workspace() const { return args_.single(StepArguments::Op::kWorkspace); }
  OptionalTensor head() const { return args_.single(StepArguments::Op::kHead); }

 private:
  /// The properties of a tensor that PyTorch can change without creating another tensor.
  struct Layout {
    const void* data;
    ScalarType dtype;
    Place place;
    size_t rank;
    std::array<int64_t, 3> sizes, strides;

    explicit Layout(const Tensor& tensor);
    bool operator==(const Layout&) const = default;
  };

  int64_t alignment_;
  Layout hidden_;
  std::vector<Tensor> tensors_;  // of all other arguments
  std::vector<Layout> layouts_;  // of tensors_
  StepArguments args_;           // its spans point into tensors_; hidden's is empty
  StepCall call_;
};

/// The registry of prepared calls: ops refer to a call by its number.
int64_t keep_prepared_step(std::shared_ptr<const PreparedStep> prepared);
std::shared_ptr<const PreparedStep> prepared_step(int64_t number);
void forget_prepared_step(int64_t number);

}  // namespace selective_scan::op
