// What the plans know of a device.
#pragma once

#include <string>
#include <string_view>

namespace selective_scan::cuda {

struct Device {
  int multiprocessors = 1;
  int block_shared_bytes = 48 * 1024;  // that a block may have
  int shared_bytes = 48 * 1024;        // of a multiprocessor
  int registers = 65536;               // likewise
  /// Compute capability of the code that runs: what is compiled for an earlier one, and on this
  /// device from PTX, has nothing of what came later.
  int major = 0;

  /// Whether there are asynchronous copies to shared memory, and barriers that wait for them.
  constexpr bool has_async_copies() const { return major >= 8; }

  /// How many blocks of that much shared memory a multiprocessor has room for.
  int blocks_by_shared_memory(int bytes) const {
    return shared_bytes / (bytes + kReservedSharedBytes);
  }
  static constexpr int kReservedSharedBytes = 1024;  // per block, by the system
};

/// The figures by the names above, such as "multiprocessors=40 shared_bytes=65536".
std::string facts_of(const Device& device);

/// The device with the figures that `text` has, written likewise. None is greater than before, so
/// that plans for the result run on the device. Throws std::runtime_error where that is not so.
Device lessened(const Device& device, std::string_view text);

}  // namespace selective_scan::cuda
