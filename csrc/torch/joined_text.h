// Texts made of parts.
#pragma once

#include <string>
#include <type_traits>

namespace selective_scan::op {

/// The parts one behind the other, integers as digits. Not by streams: they ask locales, of which
/// a library that was linked with a C++ runtime of its own has others than PyTorch, and crashes.
template <class... Parts>
std::string joined(const Parts&... parts) {
  std::string text;
  const auto append = [&](const auto& part) {
    using Part = std::decay_t<decltype(part)>;
    if constexpr (std::is_integral_v<Part> && !std::is_same_v<Part, char>) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (append(parts), ...);
  return text;
}

}  // namespace selective_scan::op
