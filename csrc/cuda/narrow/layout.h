// How the narrow kernels lay out shared memory.
#pragma once

#include "../kit/config.h"

namespace selective_scan::cuda::narrow {

constexpr int kMostStates = 8;
constexpr int64_t kMaxSteps = (int64_t{1} << 28) - kChunk;  // bytes of a row fit 32 bits

/// Steps that a lane takes from a row at a time.
constexpr int kItems = 8;

/// How lanes divide the channels of a warp, and the states of a channel among them: many of them
/// would have a lane wait too long for itself.
template <int kStates>
struct WarpShape {
  static constexpr int kLanes = kStates > 2 ? 2 : 1;    // of a channel
  static constexpr int kChannels = kWarpSize / kLanes;  // of a warp
  static constexpr int kOwn = kStates / kLanes;         // states of a lane
  static constexpr int kBackItems = kOwn > 2 ? 4 : 8;   // steps at a time on the way back
};

/// How rows come to shared memory and go back: in chunks of steps, padded, or, if `is_dense`, as
/// all steps of all channels lie in memory, one behind the other.
struct RowLayout {
  bool is_dense;
  int access;  // bytes that are moved at a time
  int pitch;   // bytes from one channel's row to the next one's
  int bytes;   // of the rows of one array
  int stages;  // chunks that there are rows for: with two the next one comes meanwhile

  static SELECTIVE_SCAN_HD RowLayout chunks(int channels, int size, int access) {
    // Rows stay aligned, and lanes read all of their vectors of 16 bytes from other banks.
    const int pitch = kChunk * size + 16;
    return {false, access, pitch, channels * pitch, 2};
  }
  static SELECTIVE_SCAN_HD RowLayout dense(int channels, int size, int seqlen) {
    // A lane's last steps may be read beyond the last row.
    const int pitch = seqlen * size;
    return {true, 16, pitch, round_up(channels * pitch, 16) + kItems * size, 1};
  }
};

/// Bytes of B and C of a chunk, [step][B | C][state] in fp32.
template <int kStates>
constexpr int kProjectionBytes = kChunk * 2 * kStates * static_cast<int>(sizeof(float));

template <int kStates>
SELECTIVE_SCAN_HD int forward_bytes(const RowLayout& rows, int arrays) {
  return kProjectionBytes<kStates> + rows.stages * arrays * rows.bytes;
}

/// Backward there is also Δ of a chunk, [step][lane], and the states before every block of
/// steps, [block][state][lane].
template <int kStates>
struct BackwardLayout {
  static constexpr int kSteps = kProjectionBytes<kStates>;
  static constexpr int kCheckpoints = kSteps + kChunk * kWarpSize * static_cast<int>(sizeof(float));
  static constexpr int kRows = kCheckpoints + kChunk / WarpShape<kStates>::kBackItems *
                                                  WarpShape<kStates>::kOwn * kWarpSize *
                                                  static_cast<int>(sizeof(float));
  static SELECTIVE_SCAN_HD int bytes(const RowLayout& rows, int arrays) {
    return kRows + rows.stages * arrays * rows.bytes;
  }
};

}  // namespace selective_scan::cuda::narrow
