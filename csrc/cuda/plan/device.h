// The properties of a device that plans depend on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "../../core/config.h"

namespace selective_scan::cuda {

struct Device {
  int multiprocessors = 1;
  int block_shared_bytes = 48 * 1024;  // the most that a block can have
  int shared_bytes = 48 * 1024;        // per multiprocessor
  /// The compute capability of the code that runs. Code that was compiled for an earlier one, and
  /// runs here from PTX, lacks later features.
  int major = 0;

  /// Returns whether there are asynchronous copies to shared memory, and barriers that wait for
  /// them.
  constexpr bool has_async_copies() const { return major >= 8; }

  /// Returns how many blocks with this much shared memory fit into a multiprocessor.
  int blocks_by_shared_memory(int bytes) const {
    return shared_bytes / (bytes + kReservedSharedBytes);
  }
  /// Returns the shared memory that blocks needing `bytes` should ask for so that they are spread
  /// evenly over the multiprocessors. Otherwise, while a previous kernel still occupies some
  /// multiprocessors, the others would take as many blocks as they have room for.
  int even_shared_bytes(int64_t blocks, int bytes) const {
    constexpr int kUnit = 128;
    const auto wanted = static_cast<int>(ceil_div(blocks, multiprocessors));
    const int too_many = shared_bytes / (wanted + 1) - kReservedSharedBytes;
    return std::max(bytes, round_up(too_many + 1, kUnit));
  }
  static constexpr int kReservedSharedBytes = 1024;  // per block, by the system
};

/// Returns the figures under the names above, such as "multiprocessors=40 shared_bytes=65536".
std::string facts_of(const Device& device);

/// Returns the device with the figures in `text`, which has the same format. No figure may exceed
/// the device's own, so that plans for the result run on the device; throws std::runtime_error
/// otherwise.
Device lessened(const Device& device, std::string_view text);

}  // namespace selective_scan::cuda
