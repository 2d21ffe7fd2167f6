// Builds text from parts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace selective_scan::op {

inline void append(std::string& text, std::string_view part) {
  text += part;
}
inline void append(std::string& text, int64_t number) {
  text += std::to_string(number);
}

/// Concatenates the parts; integers are written as digits. This avoids streams because they use
/// locales: a library that is linked with its own C++ runtime has other locales than PyTorch, and
/// crashes.
std::string joined(const auto&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

/// Returns "(a, b)", or "(a,)" for a single entry, from the texts of the entries.
template <class Range, class TextOf>
std::string tuple_text(const Range& entries, const TextOf& text_of) {
  std::string text = "(";
  size_t count = 0;
  for (const auto& entry : entries) {
    if (count++ > 0) text += ", ";
    text += text_of(entry);
  }
  return text + (count == 1 ? ",)" : ")");
}

/// Returns "a, b or c".
template <class Range, class TextOf>
std::string alternatives_text(const Range& entries, const TextOf& text_of) {
  std::string text;
  size_t index = 0;
  for (const auto& entry : entries) {
    if (index > 0) text += index + 1 == entries.size() ? " or " : ", ";
    text += text_of(entry);
    ++index;
  }
  return text;
}

}  // namespace selective_scan::op
