// The device on which ops run their kernels, and its scratch memory.
//
// The ops are templates of a Backend, which has:
//
//   static constexpr int64_t kMaxDstate, kMostChannels
//       The largest dstate, and the most channels of a normed row; 0 means no limit.
//   explicit Backend(const Tensor& tensor)
//       Selects the device of a tensor.
//   void check(const auto& given) const
//       Refuses invalid values, such as boundaries that do not rise or slots that do not exist, if
//       the backend can read them. `given` are parameters or packed sequences.
//   void launch(const auto& params, const auto& memory) const
//       Runs a call; batch and channels are at least 1. memory(int64_t bytes) returns scratch
//       memory as a void*.
//
// Some ops need further members, which their headers list.
#pragma once

#include <vector>

#include "tensor_views.h"

namespace selective_scan::op {

/// Scratch memory that lives as long as this object; null for 0 bytes.
class Workspace {
 public:
  Workspace(const Tensor& like, int64_t bytes) {
    if (bytes == 0) return;
    storage_ = allocate(like, {bytes}, ScalarType::Byte);
    data_ = storage_->mutable_data_ptr();
  }

  void* data() const { return data_; }

 private:
  OptionalTensor storage_;
  void* data_ = nullptr;
};

/// Returns whether a call leaves a backend nothing to run.
inline bool is_empty(const auto& params) {
  return params.batch == 0 || params.dim == 0;
}

/// Runs a call on a backend, which may ask for scratch memory at any time.
template <class Backend, class Params>
void launch_with_workspace(const Backend& backend, const Tensor& like, const Params& params) {
  std::vector<Workspace> workspaces;
  backend.launch(params, [&](int64_t bytes) {
    return bytes == 0 ? nullptr : workspaces.emplace_back(like, bytes).data();
  });
}

}  // namespace selective_scan::op
