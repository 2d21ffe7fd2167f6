// The shared memory layout of the narrow kernels.
#pragma once

#include "../kit/config.h"

namespace selective_scan::cuda::narrow {

constexpr int kMostStates = 8;
constexpr int64_t kMaxSteps = (int64_t{1} << 28) - kChunk;  // so that a row's bytes fit 32 bits

/// The steps of a row that a lane reads at a time.
constexpr int kItems = 8;

/// How the lanes of a warp divide its channels, and the lanes of a channel its states. With many
/// states a single lane would stall too long on its own results.
template <int kStates>
struct WarpShape {
  static constexpr int kLanes = kStates > 2 ? 2 : 1;    // lanes of a channel
  static constexpr int kChannels = kWarpSize / kLanes;  // channels of a warp
  static constexpr int kOwn = kStates / kLanes;         // states of a lane
  static constexpr int kBackItems = kOwn > 2 ? 4 : 8;   // steps at a time on the way back
};

/// The layout of rows in shared memory: padded chunks of steps or, if `is_dense`, all steps of all
/// channels as they lie in global memory, one row directly after the other.
struct RowLayout {
  bool is_dense;
  int access;  // bytes of one memory access
  int pitch;   // bytes from one channel's row to the next one's
  int bytes;   // bytes of one array's rows
  int stages;  // buffered chunks; with two, the next chunk is fetched during the current one

  static SELECTIVE_SCAN_HD RowLayout chunks(int channels, int size, int access) {
    // The padding keeps rows aligned and the lanes' vectors of 16 bytes in different banks.
    const int pitch = kChunk * size + 16;
    return {false, access, pitch, channels * pitch, 2};
  }
  static SELECTIVE_SCAN_HD RowLayout dense(int channels, int size, int seqlen) {
    // The extra items are for the last lane, whose last read may extend past the last row.
    const int pitch = seqlen * size;
    return {true, 16, pitch, round_up(channels * pitch, 16) + kItems * size, 1};
  }
};

/// The bytes of a chunk's B and C, [step][B | C][state] in fp32.
template <int kStates>
constexpr int kProjectionBytes = kChunk * 2 * kStates * static_cast<int>(sizeof(float));

/// The backward pass also keeps a chunk's Δ, [step][lane], and the states before every block of
/// steps, [block][state][lane].
template <int kStates>
struct BackwardLayout {
  static constexpr int kSteps = kProjectionBytes<kStates>;
  static constexpr int kCheckpoints = kSteps + kChunk * kWarpSize * static_cast<int>(sizeof(float));
  static constexpr int kRows = kCheckpoints + kChunk / WarpShape<kStates>::kBackItems *
                                                  WarpShape<kStates>::kOwn * kWarpSize *
                                                  static_cast<int>(sizeof(float));
};

}  // namespace selective_scan::cuda::narrow
