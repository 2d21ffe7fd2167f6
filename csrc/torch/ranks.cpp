#include "ranks.h"

#include <algorithm>
#include <stdexcept>

#include "op_namespace.h"
#include "text.h"

namespace selective_scan::op {
namespace {

using torch::stable::detail::from, torch::stable::detail::to;

/// Calls an op and returns its tensors. No exception crosses the stable ABI, so the message of a
/// failed collective is fetched from Python.
template <size_t kCount, class... Arguments>
std::array<Tensor, kCount> exchange(const char* op, const Arguments&... arguments) {
  std::array<StableIValue, std::max(kCount, sizeof...(Arguments))> stack{from(arguments)...};
  if (torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION) != TORCH_SUCCESS) {
    std::array<StableIValue, 1> message;
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(SELECTIVE_SCAN_OP("_last_error"), "",
                                                 message.data(), TORCH_ABI_VERSION));
    throw std::runtime_error(to<Text>(message[0]));
  }
  std::array<Tensor, kCount> results;
  std::transform(stack.begin(), stack.begin() + kCount, results.begin(), to<Tensor>);
  return results;
}

}  // namespace

Enter enter_by_python(int64_t entrance) {
  return [entrance](const Tensor& own) {
    return exchange<1>(SELECTIVE_SCAN_OP("_enter"), own, entrance)[0];
  };
}

std::tuple<Tensor, Tensor> Ranks::steps_before(const Tensor& x, int64_t history) const {
  return std::tuple_cat(exchange<2>(SELECTIVE_SCAN_OP("_steps_before"), x, history, group_));
}

void Ranks::exchange_step_gradients(const Tensor& dbefore, const Tensor& counts,
                                    const Tensor& dx) const {
  exchange<0>(SELECTIVE_SCAN_OP("_exchange_step_gradients"), dbefore, counts, dx, group_);
}

std::tuple<Tensor, Tensor> Ranks::state_before(const Tensor& map, bool reverse) const {
  return std::tuple_cat(exchange<2>(SELECTIVE_SCAN_OP("_state_before"), map, reverse, group_));
}

Tensor Ranks::state_gradient_behind(const Tensor& own, const Tensor& factors, bool reverse) const {
  return exchange<1>(SELECTIVE_SCAN_OP("_state_gradient_behind"), own, factors, reverse, group_)[0];
}

}  // namespace selective_scan::op
