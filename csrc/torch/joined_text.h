// Texts made of parts.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace selective_scan::op {

/// A string, or an integer that stands for its digits.
class TextPart {
 public:
  template <std::convertible_to<std::string_view> Text>
  TextPart(const Text& text) : text_(text) {}
  TextPart(std::integral auto number) : number_(number), is_number_(true) {}

  void append_to(std::string& text) const {
    if (is_number_) {
      text += std::to_string(number_);
    } else {
      text += text_;
    }
  }

 private:
  std::string_view text_;
  int64_t number_ = 0;
  bool is_number_ = false;
};

/// The parts one behind the other. Not by streams: they ask locales, of which a library that was
/// linked with a C++ runtime of its own has others than PyTorch, and crashes.
std::string joined(std::initializer_list<TextPart> parts);

}  // namespace selective_scan::op
