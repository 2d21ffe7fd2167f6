// Calls of s6_step that are made again and again with other values of hidden: tokens. To hand over
// the lists of a stack's tensors and to check them takes longer than a small stack's kernels.
#pragma once

#include <memory>

#include "step_arguments.h"

namespace selective_scan::op {

/// A call whose arguments were checked, and keeps them alive.
class PreparedStep {
 public:
  /// Checks the arguments.
  PreparedStep(const StepArguments& args, int64_t alignment);

  /// Whether this is the call still, hidden's values and strides aside: whether every tensor has
  /// the dtype, device, sizes, strides and memory that it had.
  bool is_as_it_was(const Tensor& hidden) const;
  /// The call's parameters, which are for this hidden as long as `made` lives.
  StepParams params_for(const Tensor& hidden, StepCall& made) const;
  /// None where the call has none.
  OptionalTensor workspace() const { return args_.single(StepArguments::Op::kWorkspace); }
  OptionalTensor head() const { return args_.single(StepArguments::Op::kHead); }

 private:
  /// What PyTorch can change of a tensor without making another.
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
  StepArguments args_;           // whose spans are of tensors_, hidden's is empty
  StepCall call_;
};

/// Prepared calls have numbers, by which an op is told which one is meant.
int64_t keep_prepared_step(std::shared_ptr<const PreparedStep> prepared);
std::shared_ptr<const PreparedStep> prepared_step(int64_t number);
void forget_prepared_step(int64_t number);

}  // namespace selective_scan::op
