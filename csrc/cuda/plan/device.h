// What the plans know of a device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "../../core/config.h"

namespace selective_scan::cuda {

struct Device {
  int multiprocessors = 1;
  int block_shared_bytes = 48 * 1024;  // that a block may have
  int shared_bytes = 48 * 1024;        // of a multiprocessor
  /// Compute capability of the code that runs: what is compiled for an earlier one, and on this
  /// device from PTX, has nothing of what came later.
  int major = 0;

  /// Whether there are asynchronous copies to shared memory, and barriers that wait for them.
  constexpr bool has_async_copies() const { return major >= 8; }

  /// How many blocks of that much shared memory a multiprocessor has room for.
  int blocks_by_shared_memory(int bytes) const {
    return shared_bytes / (bytes + kReservedSharedBytes);
  }
  /// How much shared memory blocks of `bytes` ask for so that the multiprocessors get as many of
  /// them each: behind a kernel that still runs on some, others would take all that they have room
  /// for.
  int even_shared_bytes(int64_t blocks, int bytes) const {
    constexpr int kUnit = 128;
    const auto wanted = static_cast<int>(ceil_div(blocks, multiprocessors));
    const int too_many = shared_bytes / (wanted + 1) - kReservedSharedBytes;
    return std::max(bytes, round_up(too_many + 1, kUnit));
  }
  static constexpr int kReservedSharedBytes = 1024;  // per block, by the system
};

/// The figures by the names above, such as "multiprocessors=40 shared_bytes=65536".
std::string facts_of(const Device& device);

/// The device with the figures that `text` has, written likewise. None is greater than before, so
/// that plans for the result run on the device. Throws std::runtime_error where that is not so.
Device lessened(const Device& device, std::string_view text);

}  // namespace selective_scan::cuda
