// What the plans know of a device.
#pragma once

namespace selective_scan::cuda {

struct Device {
  int multiprocessors = 1;
  int block_shared_bytes = 48 * 1024;  // that a block may have
  int shared_bytes = 48 * 1024;        // of a multiprocessor
  int registers = 65536;               // likewise
  /// Compute capability of the code that runs: what is compiled for an earlier one, and on this
  /// device from PTX, has nothing of what came later.
  int major = 0;

  /// How many blocks of that much shared memory a multiprocessor has room for.
  int blocks_by_shared_memory(int bytes) const {
    return shared_bytes / (bytes + kReservedSharedBytes);
  }
  static constexpr int kReservedSharedBytes = 1024;  // per block, by the system
};

}  // namespace selective_scan::cuda
