// Where the kernels of the ops run, and their scratch memory.
//
// The ops are templates of a Backend, which has:
//
//   static constexpr int64_t kMaxDstate, kMostChannels
//       The largest dstate, and of a row that is normed; 0 says that there is no limit.
//   explicit Backend(const Tensor& tensor)
//       Selects the device of a tensor.
//   void check(const auto& given) const
//       Refuses boundaries that do not rise, slots that there are not and the like, where the
//       values can be looked at; given are parameters, or packed sequences.
//   void launch(const auto& params, const auto& memory) const
//       Runs a call; batch and channels are at least 1. memory(int64_t bytes) returns the void* of
//       its scratch memory.
//
// What some ops want beside is said where they are.
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

/// Whether a call has nothing that a backend would run.
inline bool is_empty(const auto& params) {
  return params.batch == 0 || params.dim == 0;
}

/// Has a backend run a call, which may ask for scratch memory whenever it likes.
template <class Backend, class Params>
void launch_with_workspace(const Backend& backend, const Tensor& like, const Params& params) {
  std::vector<Workspace> workspaces;
  backend.launch(params, [&](int64_t bytes) {
    return bytes == 0 ? nullptr : workspaces.emplace_back(like, bytes).data();
  });
}

}  // namespace selective_scan::op
