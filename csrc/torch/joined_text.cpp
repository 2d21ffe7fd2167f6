#include "joined_text.h"

namespace selective_scan::op {

std::string joined(std::initializer_list<TextPart> parts) {
  std::string text;
  for (const TextPart& part : parts) part.append_to(text);
  return text;
}

}  // namespace selective_scan::op
