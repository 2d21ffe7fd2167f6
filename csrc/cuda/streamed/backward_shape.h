// The division of work among lanes in the streamed backward kernels, and the layout of their shared
// memory.
#pragma once

#include <type_traits>

#include "../../core/complex.h"
#include "../kit/barrier_state.h"
#include "../kit/config.h"

namespace selective_scan::cuda::streamed {

/// The chunks of B and C that shared memory holds at a time.
constexpr int kBackwardRingSlots = 3;

/// Blocks of kBlockSteps steps form step groups. The lanes' parts of a step group's du, ddelta and
/// y are summed over the lanes of each channel, and the warps' parts of its dB and dC over the
/// warps.
constexpr int kSweepBlocks = 2;
constexpr int kSweepSteps = kSweepBlocks * kBlockSteps;

/// The shape for states that one warp holds. A lane holds 16 bytes of states of one channel: lanes
/// 0 to kChannels - 1 hold the first states of the warp's channels, the next kChannels lanes the
/// next states, and so on. Neighboring lanes thus differ in channel, the dimension that the tensor
/// cores sum over. kOwnInputSteps adds rows for input_delta.
template <class T, int kLaneBits, bool kOwnInputSteps = false>
struct BackwardShape {
  static constexpr bool kHasInputDelta = kOwnInputSteps;
  static constexpr int kQuad = 4;  // floats of states per lane
  static constexpr int kComponents = is_complex_v<T> ? 2 : 1;
  static constexpr int kStates = kQuad / kComponents;
  static constexpr int kParts = 1 << kLaneBits;  // lanes per channel
  static constexpr int kChannelBits = kWarpBits - kLaneBits;
  static constexpr int kChannels = 1 << kChannelBits;
  static constexpr int kPadded = kParts * kStates;

  // Bytes of B and C of a step, and of a chunk.
  static constexpr int kHalfRow = kParts * kQuad * static_cast<int>(sizeof(float));
  static constexpr int kRow = 2 * kHalfRow;
  static constexpr int kChunkBytes = kChunk * kRow;

  // The partial sums of a step group that a warp contributes to the sum over warps: see
  // channel_sums.cuh.
  static constexpr bool kHalves = kChannelBits == 3;   // a lane contributes to either dB or dC
  static constexpr int kSumVectors = kHalves ? 1 : 2;  // of 16 bytes, per lane and block of steps
  static constexpr int kSumBytes = kSweepBlocks * kSumVectors * kWarpSize * 16;
  static constexpr int kSumSlots = kHalves ? 4 : 2;
  static constexpr int kTurnBlocks = kHalves ? kSweepBlocks : 1;  // that a warp adds up in a turn
  static constexpr int kSumUnroll = 4;  // warps whose sums are loaded at a time
  /// True if exact sums accumulate in separate registers what tf32 cuts off of the products.
  static constexpr bool kSumsRestsApart = kChannelBits == 3;
  /// True if storing sums and adding them to those of other tiles are separate code.
  static constexpr bool kAddsApart = false;

  // Byte offsets in a warp's part of shared memory: rows [channel][step] of Δ, Δ·u, dy, u, the
  // slope of softplus and the factor by which y is multiplied for dz; the states before all blocks
  // of steps but the last; planes [du | ddelta | y][lane][step]; D and delta_bias [channel]; the
  // addresses of the arrays that rows are loaded from and stored to.
  static constexpr int kRowSet = kChannels * kRowStride * static_cast<int>(sizeof(float));
  static constexpr int kDelta = 0;
  static constexpr int kDeltaU = kDelta + kRowSet;
  static constexpr int kDy = kDeltaU + kRowSet;
  static constexpr int kU = kDy + kRowSet;
  static constexpr int kSlope = kU + kRowSet;
  static constexpr int kGate = kSlope + kRowSet;
  static constexpr int kInputDelta = kGate + kRowSet;  // only with input_delta
  static constexpr int kCheckpoints = kInputDelta + (kHasInputDelta ? kRowSet : 0);
  static constexpr int kCheckpoint = kWarpSize * 16;
  static constexpr int kPlanes = kCheckpoints + (kBlocksPerChunk - 1) * kCheckpoint;
  static constexpr int kPlaneRow = kSweepSteps * static_cast<int>(sizeof(float));
  static constexpr int kPlane = kWarpSize * kPlaneRow;
  static constexpr int kChannelValues = kPlanes + 3 * kPlane;
  static constexpr int kAddresses = kChannelValues + round_up(2 * kChannels * 4, 16);
  static constexpr int kAddressPair = 16;  // distance between pairs of addresses
  static constexpr int kNumAddresses = kHasInputDelta ? 10 : 8;
  static constexpr int kWarpBytes = kAddresses + kNumAddresses * static_cast<int>(sizeof(char*));

  // The copies of the next chunk's rows overwrite checkpoints as soon as only kStageGroup step
  // groups are left to do, and those of the remaining rows overwrite planes when none is left.
  static constexpr int kStageGroup = 1;
  static constexpr int kStage = kCheckpoints + (kStageGroup * kSweepBlocks - 1) * kCheckpoint;
  static constexpr int kStageBytes = kPlanes - kStage;
  static constexpr int kLateStage = kPlanes;
};

/// The shape for real A and constant B and C: see constant_sweeps.cuh. There are no sums over
/// warps. The forward sweep keeps a record for each step group: abar of the steps of its first
/// block, then the states before its blocks. The record of the last group shares the memory of the
/// planes, since it is read before the first parts are stored there.
template <class T, int kLaneBits>
struct ConstantShape : BackwardShape<T, kLaneBits> {
  using Base = BackwardShape<T, kLaneBits>;
  static constexpr int kGroups = kChunk / kSweepSteps;
  static constexpr int kRecords = Base::kCheckpoints;
  static constexpr int kStepStates = Base::kCheckpoint;
  static constexpr int kRecordStates = kBlockSteps * kStepStates;
  static constexpr int kRecord = kRecordStates + kSweepBlocks * kStepStates;
  static constexpr int kPlanes = kRecords + (kGroups - 1) * kRecord;
  static constexpr int kChannelValues = kPlanes + 3 * Base::kPlane;
  static_assert(kRecord <= 3 * Base::kPlane);
  // The padding after each row of u holds two addresses. Anywhere else, they would leave no room
  // for two blocks of six warps.
  static constexpr int kAddresses = Base::kU + kChunk * static_cast<int>(sizeof(float));
  static constexpr int kAddressPair = kRowStride * static_cast<int>(sizeof(float));
  static constexpr int kWarpBytes = kChannelValues + Base::kAddresses - Base::kChannelValues;
  static constexpr int kStage = kRecords + Base::kStageGroup * kRecord;
  static constexpr int kStageBytes = kPlanes - kStage;
  static constexpr int kLateStage = kPlanes;
};

template <class T, int kLaneBits, bool kVariable, bool kOwnInputSteps = false>
using StreamedShape = std::conditional_t<kVariable, BackwardShape<T, kLaneBits, kOwnInputSteps>,
                                         ConstantShape<T, kLaneBits>>;

/// The shape for real states that a team of kWarps warps shares: see team_backward.cuh. The team
/// has common rows of Δ, inputs and dy. All other values of a (channel, step) belong to the lane
/// that moves it.
template <int kTeamWarps>
struct TeamShape : BackwardShape<float, 2> {
  static constexpr int kWarps = kTeamWarps;
  static constexpr int kRowChannels = kChannels / kWarps;  // channels whose rows a warp moves

  // Only few warps have sums to add.
  static constexpr int kSumUnroll = kMaxWarps / 4;
  static constexpr bool kSumsRestsApart = false;
  static constexpr bool kAddsApart = true;

  // Byte offsets in a team's part of shared memory, which holds rows. The row of inputs is either
  // Δ·u or u.
  static constexpr int kU = kDeltaU;
  static constexpr int kTeamBytes = kDy + kRowSet;

  // Byte offsets in a warp's part: checkpoints; the sums over its lanes of each step group's parts
  // of du, ddelta and y, the last group first; planes, which the first group's sums overwrite in
  // the end; the values that lanes keep of the rows they move; the channels' values and addresses
  // as in BackwardShape. Padding of 8 bytes between groups spreads them over the banks.
  static constexpr int kGroups = kChunk / kSweepSteps;
  static constexpr int kPart = kChannels * kPlaneRow;
  static constexpr int kPartPair = kChannels * 2 * static_cast<int>(sizeof(float));
  static constexpr int kGroupParts = 3 * kPart + 8;
  static constexpr int kKeptArray = kWarpSize * kRowChannels * static_cast<int>(sizeof(float));
  static constexpr int kCheckpoints = 0;
  static constexpr int kPlanes =
      round_up((kBlocksPerChunk - 1) * kCheckpoint + (kGroups - 1) * kGroupParts, 16);
  static constexpr int kKept = kPlanes + 3 * kPlane;
  static constexpr int kKeptU = 0;
  static constexpr int kKeptSlope = kKeptArray;
  static constexpr int kKeptGate = 2 * kKeptArray;
  static constexpr int kChannelValues = kKept + 3 * kKeptArray;
  static constexpr int kAddresses = kChannelValues + round_up(2 * kRowChannels * 4, 16);
  static constexpr int kWarpBytes = kAddresses + 8 * static_cast<int>(sizeof(char*));
};

/// The shape for the summary of a segment. A warp's part of shared memory holds rows of Δ and dy
/// and what filling them takes.
template <class T, int kLaneBits>
struct SummaryShape : BackwardShape<T, kLaneBits> {
  using Base = BackwardShape<T, kLaneBits>;
  static constexpr int kDelta = 0;
  static constexpr int kDy = Base::kRowSet;
  static constexpr int kChannelValues = 2 * Base::kRowSet;
  static constexpr int kAddresses = kChannelValues + Base::kAddresses - Base::kChannelValues;
  static constexpr int kStage = kAddresses + Base::kWarpBytes - Base::kAddresses;
  static constexpr int kStageBytes = 3 * Base::kChannels * kChunk * static_cast<int>(sizeof(float));
  static constexpr int kWarpBytes = kStage + kStageBytes;
  static constexpr int kSumBytes = 0;
};

/// True for the kernels that most calls use. They exist for every method, for packed sequences and
/// for input_delta. float16 has separate ones, whereas other kernels for 2-byte types serve both of
/// these. All other kernels exist for kCommonMethod alone.
template <class T, bool kVariable>
constexpr bool kIsCommonBackward = !is_complex_v<T> && kVariable;

/// The barriers of the slots through which warps pass their sums to the warp that adds them.
struct alignas(16) SumBarriers {
  static constexpr int kMostSlots = 4;
  BarrierState full[kMostSlots];
  BarrierState empty[kMostSlots];
};

/// The barriers of what a team shares; each completes one phase per chunk.
struct TeamBarriers {
  BarrierState filled;  // the rows are filled
  BarrierState swept;   // no warp reads the chunk's rows anymore; all sums over lanes are stored
};

/// Byte offsets in a block's shared memory. B and C of a chunk come in slices, one for each of the
/// warps that share a channel.
struct BackwardLayout {
  int ring;
  int sums;
  int warps;
  int bytes;

  template <class Shape>
  static SELECTIVE_SCAN_HD BackwardLayout make(int warps, bool variable, int slices = 1) {
    BackwardLayout layout;
    layout.ring = static_cast<int>(sizeof(RingBarriers<kBackwardRingSlots>) + sizeof(SumBarriers));
    layout.sums = layout.ring + (variable ? kBackwardRingSlots * slices * Shape::kChunkBytes : 0);
    layout.warps = layout.sums + (variable ? Shape::kSumSlots * warps * Shape::kSumBytes : 0);
    layout.bytes = layout.warps + warps * Shape::kWarpBytes;
    return layout;
  }
};

/// Byte offsets in the shared memory of a block of teams. Every slice of the states has separate
/// sums.
template <class Shape>
struct TeamLayout {
  int sum_barriers;
  int team_barriers;
  int ring;
  int sums;
  int teams;
  int warps;
  int bytes;

  static SELECTIVE_SCAN_HD TeamLayout make(int teams) {
    constexpr int kRingBarriers = static_cast<int>(sizeof(RingBarriers<kBackwardRingSlots>));
    constexpr int kSumBarriers = static_cast<int>(sizeof(SumBarriers));
    constexpr int kTeamBarriers = static_cast<int>(sizeof(TeamBarriers));
    const int warps = teams * Shape::kWarps;
    TeamLayout layout;
    layout.sum_barriers = kRingBarriers;
    layout.team_barriers = layout.sum_barriers + Shape::kWarps * kSumBarriers;
    layout.ring = layout.team_barriers + teams * kTeamBarriers;
    layout.sums = layout.ring + kBackwardRingSlots * Shape::kWarps * Shape::kChunkBytes;
    layout.teams = layout.sums + Shape::kSumSlots * warps * Shape::kSumBytes;
    layout.warps = layout.teams + teams * Shape::kTeamBytes;
    layout.bytes = layout.warps + warps * Shape::kWarpBytes;
    return layout;
  }
  SELECTIVE_SCAN_HD int team(int index) const { return teams + index * Shape::kTeamBytes; }
  SELECTIVE_SCAN_HD int warp(int team, int slice) const {
    return warps + (team * Shape::kWarps + slice) * Shape::kWarpBytes;
  }
};

}  // namespace selective_scan::cuda::streamed
