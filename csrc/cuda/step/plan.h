// How a token's way through a stack of layers is divided among blocks: who has which rows of which
// matrix, what lies where in shared memory, and in the memory through which blocks exchange values.
#pragma once

#include <cstdint>

#include "../../core/step_params.h"
#include "../kit/barrier_state.h"
#include "../kit/launch_shape.h"
#include "../plan/device.h"
#include "../plan/refusal.h"

namespace selective_scan::cuda::step {

constexpr int kMostLayers = 128;  // whose pointers a launch has room for
constexpr int kMostRows = 16;
/// Arrays of values in shared memory are [row of a matrix][row of activations]. The former are so
/// many floats apart that neighbours begin in different banks, and pairs of values are aligned.
SELECTIVE_SCAN_HD constexpr int row_pitch(int padded_rows) {
  return padded_rows + 2;
}
template <int kRows>
SELECTIVE_SCAN_HD constexpr int value_index(int matrix_row, int row) {
  return matrix_row * row_pitch(kRows) + row;
}

constexpr int kComputeWarps = 12;
constexpr int kProductWarps = 8;  // of those, which multiply
constexpr int kComputeThreads = kComputeWarps * 32;
constexpr int kProductThreads = kProductWarps * 32;
/// The others finish tiles, and do what else there is to be done meanwhile.
constexpr int kFinishWarps = kComputeWarps - kProductWarps;
constexpr int kFinishThreads = kFinishWarps * 32;
constexpr int kThreads = kComputeThreads + 64;  // and two warps that fetch

/// So many lanes share a channel's states, two of them each at a time.
constexpr int kChannelLanes = 8;
constexpr int kLaneStates = 2;
constexpr int kTurnStates = kChannelLanes * kLaneStates;
/// Batch entries of which lanes have all of a block's channels at a time.
SELECTIVE_SCAN_HD int entries_beside(int channels) {
  const int entries = kComputeThreads / kChannelLanes / channels;
  return entries > 1 ? entries : 1;
}

/// Rows of weights that are multiplied together, a stage of the ring: kStageBytes hold kRowBytes of
/// each, 16 bytes apart so that they begin in different banks.
constexpr int kTileRows = 16;
constexpr int kRowBytes = 2048;
constexpr int kRowPitch = kRowBytes + 16;
constexpr int kStageBytes = kTileRows * kRowPitch;
constexpr int kMostStages = 8;

/// Channels, of the inside and of the stream, are given to blocks by so many: two-byte weights of
/// dt_proj are then copied in whole words, and what is a word of an exchange is one block's.
constexpr int kChannelUnit = 4;
/// Products of two-byte matrices take so many columns at a time: dim and inner must be multiples.
constexpr int kColumnUnit = 16;

/// Numbers that a channel is given, besides its states: these, the taps of its convolution, and for
/// every batch entry the steps that the convolution keeps.
enum ChannelInput { kConvBias, kXBias, kZBias, kDtBias, kD, kFirstTap };
/// Numbers that an output is given: a bias, and the weight of the norm that it goes through next.
enum OutputInput { kOutBias, kNextNorm, kOutputInputs };
/// Inputs are there for so many layers at a time.
constexpr int kInputBuffers = 2;

/// Consecutive rows, or channels.
struct Share {
  int first;
  int count;
};
SELECTIVE_SCAN_HD Share share_of(int64_t total, int block, int blocks) {
  const int64_t first = total * block / blocks;
  return {static_cast<int>(first), static_cast<int>(total * (block + 1) / blocks - first)};
}
SELECTIVE_SCAN_HD Share channels_of(int64_t total, int block, int blocks) {
  const Share units = share_of(total / kChannelUnit, block, blocks);
  return {units.first * kChannelUnit, units.count * kChannelUnit};
}

/// Byte offsets in shared memory. Values of channels are as value_index() tells.
struct SharedLayout {
  int barriers;        // full and empty of every stage
  int input_barriers;  // full and empty of every buffer of inputs
  int stages;          // of the ring
  int activations;     // [row][column], what a product multiplies with
  int sums;            // of warps, for two tiles
  int squares;         // [row][word], sums of them that have come with the stream
  int norm_scale;      // of every row, what its sums are multiplied with
  int in;              // x of own channels, in front of the convolution
  int x;               // of own channels, behind the convolution
  int gates;           // of own channels, what z becomes
  int y;               // of own channels
  int projections;     // dt, B and C of all rows
  int residual;        // of own channels of the stream
  int scale;           // of every row, see Scale
  int inputs;          // two of what own channels and outputs are given: see BlockInputs
  int dt_proj;         // own rows of it
};

/// Offsets, in words of 8 bytes, of what blocks exchange: see words.cuh.
struct ExchangeLayout {
  /// One word, how many exchanges there have been. It lies at the same place in any call's layout,
  /// so that calls of other sizes may use a workspace in turn.
  static constexpr int64_t kEpoch = 0;
  int64_t stream;       // [row][StreamWord]
  int64_t x;            // [row][inner], of two-byte weights two values a word
  int64_t projections;  // [projection][padded row]
  int64_t y;            // as x
  int64_t words;
};

/// 2^32 over a number from 2 on, rounded up: the upper half of its product with a small number is
/// the quotient of the two.
SELECTIVE_SCAN_HD uint32_t inverse_of(int number) {
  return 0xffffffff / number + 1;
}

/// How many pairs of words, or words of 16 bytes, a row of an exchange has.
struct RowPairs {
  int count;
  uint32_t inverse;  // of the count
};

struct StepPlan {
  int blocks = 0;
  int padded_rows = 0;         // 8 or 16
  bool pairs_entries = false;  // lanes have the states of two batch entries at a time
  int stages = 0;
  int activation_pitch = 0;  // elements from row to row
  RowPairs stream_pairs{};
  RowPairs inner_pairs{};
  int channel_inputs = 0;  // numbers that a channel is given
  float inverse_dim = 0;
  float eps = 0;
  SharedLayout shared{};
  ExchangeLayout exchange{};
  LaunchShape shape{};

  int64_t workspace_bytes() const {
    return exchange.words * static_cast<int64_t>(sizeof(uint64_t));
  }
};

/// Why the kernel cannot run a call of these sizes; else `plan` says how it does.
Refusal plan_step(const StepParams& params, const Device& device, StepPlan& plan);

}  // namespace selective_scan::cuda::step
