#include "prepared_step.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace selective_scan::op {
namespace {

struct PreparedSteps {
  std::mutex mutex;
  int64_t last = 0;
  std::unordered_map<int64_t, std::shared_ptr<const PreparedStep>> by_number;
};

/// Returns the registry. It is never destroyed: at process exit, PyTorch may be unloaded before
/// this library.
PreparedSteps& prepared_steps() {
  static PreparedSteps& all = *new PreparedSteps;
  return all;
}

}  // namespace

PreparedStep::Layout::Layout(const Tensor& tensor)
    : data(tensor.const_data_ptr()),
      dtype(dtype_of(tensor)),
      place(place_of(tensor)),
      rank(tensor.sizes().size()),
      sizes{},
      strides{} {
  const size_t seen = std::min(rank, sizes.size());  // no argument here has more than 3 dimensions
  std::copy_n(tensor.sizes().data(), seen, sizes.begin());
  std::copy_n(tensor.strides().data(), seen, strides.begin());
}

PreparedStep::PreparedStep(const StepArguments& args, int64_t alignment)
    : alignment_(alignment),
      hidden_(args.hidden()),
      args_(args),
      call_(make_step_call(args, alignment)) {
  const auto lists = std::span(args_.tensors).subspan(1);
  for (const auto list : lists) tensors_.insert(tensors_.end(), list.begin(), list.end());
  const Tensor* next = tensors_.data();
  for (auto& list : lists) {
    list = {next, list.size()};
    next += list.size();
  }
  args_.tensors[StepArguments::Op::kHidden] = {};
  for (const Tensor& tensor : tensors_) layouts_.emplace_back(tensor);
}

bool PreparedStep::is_as_it_was(const Tensor& hidden) const {
  const Layout now(hidden);
  return now.dtype == hidden_.dtype && now.place == hidden_.place && now.rank == hidden_.rank &&
         now.sizes == hidden_.sizes &&
         std::equal(tensors_.begin(), tensors_.end(), layouts_.begin(),
                    [](const Tensor& tensor, const Layout& was) { return Layout(tensor) == was; });
}

StepParams PreparedStep::params_for(const Tensor& hidden, StepCall& made) const {
  if (!call_.copies.empty()) {  // of tensors whose values may have changed
    StepArguments args = args_;
    args.tensors[StepArguments::Op::kHidden] = {&hidden, 1};
    made = make_step_call(args, alignment_);
    return made.params;
  }
  StepParams params = call_.params;
  params.hidden = hidden_view(hidden);
  return params;
}

int64_t keep_prepared_step(std::shared_ptr<const PreparedStep> prepared) {
  PreparedSteps& all = prepared_steps();
  const std::lock_guard lock(all.mutex);
  all.by_number.emplace(++all.last, std::move(prepared));
  return all.last;
}

std::shared_ptr<const PreparedStep> prepared_step(int64_t number) {
  PreparedSteps& all = prepared_steps();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_number.find(number);
  if (found == all.by_number.end()) fail("there is no prepared step ", number);
  return found->second;
}

void forget_prepared_step(int64_t number) {
  PreparedSteps& all = prepared_steps();
  std::shared_ptr<const PreparedStep> last;  // destroyed after the lock is released
  const std::lock_guard lock(all.mutex);
  if (const auto found = all.by_number.find(number); found != all.by_number.end()) {
    last = std::move(found->second);
    all.by_number.erase(found);
  }
}

}  // namespace selective_scan::op
