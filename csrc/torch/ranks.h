// What ranks that share a sequence tell each other: ops in Python, each with one collective, that
// selective_scan/distributed defines. Every rank of a group must call them in the same order.
#pragma once

#include <functional>
#include <string>
#include <tuple>

#include "tensor_views.h"

namespace selective_scan::op {

/// Gets what all steps do to a state that enters them, or to the gradient of the one that leaves,
/// and gives what enters or leaves.
using Enter = std::function<Tensor(const Tensor& own)>;

/// Has a function of Python's do that, which is known by a number.
Enter enter_by_python(int64_t entrance);

/// One rank's place among those of a group.
class Ranks {
 public:
  explicit Ranks(const std::string& group) : group_(group) {}

  /// Returns the `history` steps before those of x, (batch, dim, seqlen), and how many every rank
  /// has of these.
  std::tuple<Tensor, Tensor> steps_before(const Tensor& x, int64_t history) const;

  /// Adds to dx what other ranks find of its last steps, and this one of those before.
  void exchange_step_gradients(const Tensor& dbefore, const Tensor& counts, const Tensor& dx) const;

  /// Returns the state that enters a rank's steps, and the factors of all ranks' maps, of what its
  /// own do to a state that enters them.
  std::tuple<Tensor, Tensor> state_before(const Tensor& map, bool reverse) const;

  /// Returns the gradient of the state that leaves a rank's steps, of that which its own outputs
  /// give to the one that enters.
  Tensor state_gradient_behind(const Tensor& own, const Tensor& factors, bool reverse) const;

 private:
  const std::string& group_;
};

}  // namespace selective_scan::op
