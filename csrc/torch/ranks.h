// The data that ranks sharing a sequence exchange. Each exchange is a Python op with one
// collective, defined by selective_scan/distributed. Every rank of a group must call these ops in
// the same order.
#pragma once

#include <functional>
#include <string>
#include <tuple>

#include "tensor_views.h"

namespace selective_scan::op {

/// Receives the map that a rank's steps apply to the state that enters them, and returns the state
/// that enters. Backward, it receives the gradient that the steps' outputs give the entering state,
/// and returns the gradient of the state that leaves.
using Enter = std::function<Tensor(const Tensor& own)>;

/// Returns an Enter that calls the Python function registered under this number.
Enter enter_by_python(int64_t entrance);

/// One rank of a group, and its exchanges with the others.
class Ranks {
 public:
  explicit Ranks(const std::string& group) : group_(group) {}

  /// Returns the `history` steps before those of x, (batch, dim, seqlen), and how many steps each
  /// rank has, at most `history`.
  std::tuple<Tensor, Tensor> steps_before(const Tensor& x, int64_t history) const;

  /// Adds to dx the gradients that other ranks found for this rank's last steps, and sends them
  /// this rank's gradients of the steps before its own.
  void exchange_step_gradients(const Tensor& dbefore, const Tensor& counts, const Tensor& dx) const;

  /// Returns the state that enters this rank's steps, and the factors of all ranks' maps. `map` is
  /// what this rank's steps do to an entering state.
  std::tuple<Tensor, Tensor> state_before(const Tensor& map, bool reverse) const;

  /// Returns the gradient of the state that leaves this rank's steps. `own` is the gradient that
  /// this rank's outputs give the state that enters.
  Tensor state_gradient_behind(const Tensor& own, const Tensor& factors, bool reverse) const;

 private:
  const std::string& group_;
};

}  // namespace selective_scan::op
