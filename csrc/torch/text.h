// The strings that ops take.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>

namespace selective_scan::op {

/// A string argument of an op. PyTorch's conversion to std::string (ToImpl, as of 2.13) allocates
/// every string a second time and never frees it, so each call would leak 48 bytes.
struct Text : std::string {
  using std::string::string;
};

}  // namespace selective_scan::op

template <>
struct torch::stable::detail::ToImpl<selective_scan::op::Text> {
  static selective_scan::op::Text call(StableIValue value, uint64_t, bool) {
    const auto handle = to<StringHandle>(value);
    size_t length;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    const char* data;
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    selective_scan::op::Text text(data, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};
