// Texts made of parts.
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

/// The parts one behind the other; integers stand for their digits. Not by streams: they ask
/// locales, of which a library that was linked with a C++ runtime of its own has others than
/// PyTorch, and crashes.
std::string joined(const auto&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

/// "(a, b)", and "(a,)" for one entry, of the texts of entries.
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

/// "a, b or c"
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
