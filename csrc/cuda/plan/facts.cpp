// A device's figures as text, and the replacement of its figures by smaller ones.

#include <algorithm>
#include <array>
#include <charconv>
#include <stdexcept>
#include <string>
#include <utility>

#include "device.h"

namespace selective_scan::cuda {
namespace {

using Fact = std::pair<std::string_view, int Device::*>;
constexpr std::array kFacts = {
    Fact{"major", &Device::major},
    Fact{"multiprocessors", &Device::multiprocessors},
    Fact{"block_shared_bytes", &Device::block_shared_bytes},
    Fact{"shared_bytes", &Device::shared_bytes},
};

[[noreturn]] void fail(std::string_view entry) {
  std::string message = "selective_scan: SELECTIVE_SCAN_CUDA_DEVICE must be unset or have entries ";
  message += "such as multiprocessors=40, no greater than what the device has of";
  for (const Fact& fact : kFacts) message += " " + std::string(fact.first);
  throw std::runtime_error(message + ", got '" + std::string(entry) + "'");
}

/// Reads one entry, name=value.
void lessen(Device& device, std::string_view entry) {
  for (const auto& [name, member] : kFacts) {
    if (entry.substr(0, entry.find('=')) != name || entry.size() == name.size()) continue;
    const char* const end = entry.data() + entry.size();
    int value = 0;
    const auto read = std::from_chars(entry.data() + name.size() + 1, end, value);
    if (read.ec != std::errc() || read.ptr != end || value < 1 || value > device.*member) break;
    device.*member = value;
    return;
  }
  fail(entry);
}

}  // namespace

std::string facts_of(const Device& device) {
  std::string text;
  for (const auto& [name, member] : kFacts) {
    if (!text.empty()) text += ' ';
    text += std::string(name) + "=" + std::to_string(device.*member);
  }
  return text;
}

Device lessened(const Device& device, std::string_view text) {
  Device result = device;
  while (!text.empty()) {
    const size_t length = std::min(text.find(' '), text.size());
    if (length > 0) lessen(result, text.substr(0, length));
    text.remove_prefix(std::min(length + 1, text.size()));
  }
  return result;
}

}  // namespace selective_scan::cuda
