// How the streamed backward kernels divide work among lanes, and what lies where in shared memory.
#pragma once

#include <type_traits>

#include "../../core/complex.h"
#include "../kit/barrier_state.h"
#include "../kit/config.h"
#include "row_array.h"

namespace selective_scan::cuda::streamed {

/// Chunks of B and C in shared memory.
constexpr int kBackwardRingSlots = 3;

/// Blocks of steps go in groups: what a warp's lanes hold of a group's du, ddelta and y is summed
/// over the lanes of a channel, and what warps hold of its dB and dC over the warps.
constexpr int kSweepBlocks = 2;
constexpr int kSweepSteps = kSweepBlocks * kBlockSteps;

/// A lane holds 16 bytes of states of one channel; lanes 0 to kChannels - 1 the first states of the
/// warp's channels, and so on. Neighbouring lanes thus differ in channel, which is what the tensor
/// cores sum over. Where the input has steps of its own, there are rows of these.
template <class T, int kLaneBits, bool kOwnInputSteps = false>
struct BackwardShape {
  static constexpr bool kHasInputDelta = kOwnInputSteps;
  static constexpr int kQuad = 4;  // floats of states that a lane holds
  static constexpr int kComponents = is_complex_v<T> ? 2 : 1;
  static constexpr int kStates = kQuad / kComponents;
  static constexpr int kParts = 1 << kLaneBits;  // lanes of a channel
  static constexpr int kChannelBits = kWarpBits - kLaneBits;
  static constexpr int kChannels = 1 << kChannelBits;
  static constexpr int kPadded = kParts * kStates;
  static constexpr int kWarps = 1;  // that share the states of a channel

  // B and C of a step, bytes.
  static constexpr int kHalfRow = kParts * kQuad * static_cast<int>(sizeof(float));
  static constexpr int kRow = 2 * kHalfRow;
  static constexpr int kChunkBytes = kChunk * kRow;

  // What a warp leaves of a group for the sum over warps: see channel_sums.cuh.
  static constexpr bool kHalves = kChannelBits == 3;   // a lane leaves one of dB and dC
  static constexpr int kSumVectors = kHalves ? 1 : 2;  // of 16 bytes, per lane and block
  static constexpr int kSumBytes = kSweepBlocks * kSumVectors * kWarpSize * 16;
  static constexpr int kSumSlots = kHalves ? 4 : 2;
  static constexpr int kTurnBlocks = kHalves ? kSweepBlocks : 1;  // that a warp adds up in its turn
  static constexpr int kSumUnroll = 4;  // warps whose sums are loaded at a time
  /// Whether exact sums have registers of their own for what is cut off of products.
  static constexpr bool kSumsRestsApart = kChannelBits == 3;
  /// Whether there is code for sums that are stored and code for those that are added to others'.
  static constexpr bool kAddsApart = false;

  // A warp's part of shared memory, bytes: rows [channel][step] of Δ, Δ·u, dy, u, softplus'
  // slope and what y is multiplied with for dz; the state before all blocks of steps but the last;
  // planes [du | ddelta | y][lane][step]; D and delta_bias [channel]; addresses of the arrays that
  // rows come from and go to.
  static constexpr int kRowSet = kChannels * kRowStride * static_cast<int>(sizeof(float));
  static constexpr int kDelta = 0;
  static constexpr int kDeltaU = kDelta + kRowSet;
  static constexpr int kDy = kDeltaU + kRowSet;
  static constexpr int kU = kDy + kRowSet;
  static constexpr int kSlope = kU + kRowSet;
  static constexpr int kGate = kSlope + kRowSet;
  static constexpr int kInputDelta = kGate + kRowSet;  // if there are any
  static constexpr int kCheckpoints = kInputDelta + (kHasInputDelta ? kRowSet : 0);
  static constexpr int kCheckpoint = kWarpSize * 16;
  static constexpr int kPlanes = kCheckpoints + (kBlocksPerChunk - 1) * kCheckpoint;
  static constexpr int kPlaneRow = kSweepSteps * static_cast<int>(sizeof(float));
  static constexpr int kPlane = kWarpSize * kPlaneRow;
  static constexpr int kChannelValues = kPlanes + 3 * kPlane;
  static constexpr int kAddresses = kChannelValues + round_up(2 * kChannels * 4, 16);
  static constexpr int kAddressPair = 16;  // from two addresses to the next two
  static constexpr int kNumAddresses = kHasInputDelta ? 10 : 8;
  static constexpr int kWarpBytes = kAddresses + kNumAddresses * static_cast<int>(sizeof(char*));

  // What is copied for the next chunk comes in place of checkpoints when kStageGroup groups are
  // left to do, the rest in place of planes when none is left.
  static constexpr int kStageGroup = 1;
  static constexpr int kStage = kCheckpoints + (kStageGroup * kSweepBlocks - 1) * kCheckpoint;
  static constexpr int kStageBytes = kPlanes - kStage;
  static constexpr int kLateStage = kPlanes;
};

/// This is the shape for real A and constant B and C: see constant_sweeps.cuh. There are no sums
/// over warps. What the way forward keeps lies in records, one for each group: abar of the steps of
/// its first block, then the states before its blocks. That of the last group lies in place of
/// planes, since it is read before the first parts come there.
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
  // Two addresses each behind rows of u. With these elsewhere there would be no room for two blocks
  // of six warps.
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

/// This is the shape for real states that kWarps warps share, a team: see team_backward.cuh. They
/// have the rows of Δ, inputs and dy in common; what else there is of a (channel, step) belongs to
/// the lane that moves it.
template <int kTeamWarps>
struct TeamShape : BackwardShape<float, 2> {
  static constexpr int kWarps = kTeamWarps;
  static constexpr int kRowChannels = kChannels / kWarps;  // whose rows a warp moves

  // Few warps have sums to add.
  static constexpr int kSumUnroll = kMaxWarps / 4;
  static constexpr bool kSumsRestsApart = false;
  static constexpr bool kAddsApart = true;

  // A team's part of shared memory, bytes: rows. There is one for inputs, either Δ·u or u.
  static constexpr int kU = kDeltaU;
  static constexpr int kTeamBytes = kDy + kRowSet;

  // A warp's: checkpoints; the sums over its lanes of each group's parts of du, ddelta and y, the
  // last group first; planes, in whose place the first group's sums come at last; what lanes keep
  // of the rows they move; channels' values and addresses as in BackwardShape. Between groups lie
  // 8 bytes more, which spreads them over the banks.
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

/// What a warp's part of shared memory holds for the summary of a segment: rows of Δ and dy, and
/// what it takes to fill them.
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

/// Whether kernels are those of most calls: of all methods, and for packed sequences and an input
/// that has steps of its own. float16 has some of its own, too, where those of others serve either
/// type of two bytes. All others are of kCommonMethod alone.
template <class T, bool kVariable>
constexpr bool kIsCommonBackward = !is_complex_v<T> && kVariable;

/// These guard the slots through which warps hand their sums to the one that adds them.
struct alignas(16) SumBarriers {
  static constexpr int kMostSlots = 4;
  BarrierState full[kMostSlots];
  BarrierState empty[kMostSlots];
};

/// These guard what a team shares, with a phase per chunk each.
struct TeamBarriers {
  BarrierState filled;  // rows
  BarrierState swept;   // the chunk: nobody reads its rows any more, all sums over lanes are there
};

/// Byte offsets of a block's shared memory. B and C of a chunk come in slices, as many as warps
/// share a channel.
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

/// This is the memory of a block of teams; every slice of the states has its own sums.
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
