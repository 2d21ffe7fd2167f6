// Texts made of parts.
#pragma once

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

}  // namespace selective_scan::op
