// How the narrow kernels lay out shared memory.
#pragma once

#include "../kit/config.h"

namespace selective_scan::cuda::narrow {

constexpr int kMostStates = 8;
constexpr int64_t kMaxSteps = (int64_t{1} << 28) - kChunk;  // bytes of a row fit 32 bits
constexpr int64_t kMostDenseSteps = 256;

/// Steps that a lane takes from a row at a time, and keeps the states of in registers on its way
/// back.
constexpr int kItems = 8;
template <int kStates>
constexpr int kBackItems = kStates > 2 ? kItems / 2 : kItems;

/// How rows come to shared memory and go back: in chunks of steps, padded, or, if `is_dense`, as
/// all steps of all channels lie in memory, one behind the other.
struct RowLayout {
  bool is_dense;
  int access;  // bytes that are moved at a time
  int pitch;   // bytes from one channel's row to the next one's
  int bytes;   // of the rows of one array
  int stages;  // chunks that there are rows for

  static SELECTIVE_SCAN_HD RowLayout chunks(int size, int access) {
    // Rows stay aligned, and lanes read all of their vectors of 16 bytes from other banks.
    const int pitch = kChunk * size + 16;
    return {false, access, pitch, kWarpSize * pitch, 2};
  }
  static SELECTIVE_SCAN_HD RowLayout dense(int size, int seqlen) {
    // A lane's last steps may be read beyond the last row.
    const int pitch = seqlen * size;
    return {true, 16, pitch, round_up(kWarpSize * pitch, 16) + kItems * size, 1};
  }
};

/// Bytes of B and C of a chunk, [step][B | C][state] in fp32.
template <int kStates>
constexpr int kProjectionBytes = kChunk * 2 * kStates * static_cast<int>(sizeof(float));

template <int kStates>
SELECTIVE_SCAN_HD int forward_bytes(const RowLayout& rows, int arrays) {
  return kProjectionBytes<kStates> + rows.stages * arrays * rows.bytes;
}

/// Backward there is also Δ of a chunk, [step][lane], and the states before every block of steps
/// that are kept at a time, [block][state][lane].
template <int kStates>
struct BackwardLayout {
  static constexpr int kSteps = kProjectionBytes<kStates>;
  static constexpr int kCheckpoints = kSteps + kChunk * kWarpSize * static_cast<int>(sizeof(float));
  static constexpr int kRows = kCheckpoints + kChunk / kBackItems<kStates> * kStates * kWarpSize *
                                                  static_cast<int>(sizeof(float));
  static SELECTIVE_SCAN_HD int bytes(const RowLayout& rows, int arrays) {
    return kRows + rows.stages * arrays * rows.bytes;
  }
};

}  // namespace selective_scan::cuda::narrow
