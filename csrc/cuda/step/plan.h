// How a token's way through a stack of layers is divided among blocks: which rows of which matrix a
// block has, and the layouts of shared memory and of the memory through which blocks exchange
// values.
#pragma once

#include <cstdint>

#include "../../core/step_params.h"
#include "../kit/barrier_state.h"
#include "../kit/launch_shape.h"
#include "../plan/device.h"
#include "../plan/refusal.h"

namespace selective_scan::cuda::step {

constexpr int kMostLayers = 128;  // layers whose pointers fit a launch's arguments
constexpr int kMostRows = 16;
/// Arrays of values in shared memory are [row of a matrix][row of activations]. Rows of a matrix
/// are this many floats apart, so that neighbors begin in different banks and pairs of values are
/// aligned.
SELECTIVE_SCAN_HD constexpr int row_pitch(int padded_rows) {
  return padded_rows + 2;
}
template <int kRows>
SELECTIVE_SCAN_HD constexpr int value_index(int matrix_row, int row) {
  return matrix_row * row_pitch(kRows) + row;
}

constexpr int kComputeWarps = 12;
constexpr int kProductWarps = 8;  // the compute warps that multiply
constexpr int kComputeThreads = kComputeWarps * 32;
constexpr int kProductThreads = kProductWarps * 32;
/// The other compute warps finish tiles, and do other work meanwhile.
constexpr int kFinishWarps = kComputeWarps - kProductWarps;
constexpr int kFinishThreads = kFinishWarps * 32;
constexpr int kThreads = kComputeThreads + 64;  // plus two warps that fetch

/// The number of lanes that share a channel's states, with two states each at a time.
constexpr int kChannelLanes = 8;
constexpr int kLaneStates = 2;
constexpr int kTurnStates = kChannelLanes * kLaneStates;
/// Returns for how many batch entries the lanes can take all of a block's channels at a time.
SELECTIVE_SCAN_HD int entries_beside(int channels) {
  const int entries = kComputeThreads / kChannelLanes / channels;
  return entries > 1 ? entries : 1;
}

/// A stage of the ring holds the rows of weights that are multiplied together: kRowBytes of each
/// row in kStageBytes, with 16 bytes between rows so that they begin in different banks.
constexpr int kTileRows = 16;
constexpr int kRowBytes = 2048;
constexpr int kRowPitch = kRowBytes + 16;
constexpr int kStageBytes = kTileRows * kRowPitch;
constexpr int kMostStages = 8;

/// Inner channels and stream channels are given to blocks in units of this size. Two-byte weights
/// of dt_proj are then copied in whole words, and each word of an exchange belongs to one block.
constexpr int kChannelUnit = 4;
/// The columns of two-byte matrices that products take at a time: dim and inner must be multiples.
constexpr int kColumnUnit = 16;

/// The inputs of a channel besides its states: these, the taps of its convolution and, for every
/// batch entry, the steps that the convolution keeps.
enum ChannelInput { kConvBias, kXBias, kZBias, kDtBias, kD, kFirstTap };
/// The inputs of an output: its bias, and its weight in the norm that it goes through next.
enum OutputInput { kOutBias, kNextNorm, kOutputInputs };
/// The number of layers whose inputs are in shared memory at a time.
constexpr int kInputBuffers = 2;

/// Consecutive rows or channels.
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

/// Byte offsets in shared memory. Values of channels are laid out as in value_index().
struct SharedLayout {
  int barriers;        // full and empty barriers of every stage
  int input_barriers;  // full and empty barriers of every buffer of inputs
  int stages;          // the stages of the ring
  int activations;     // [row][column], which products multiply with
  int sums;            // the warps' sums, for two tiles
  int squares;         // [row][word], the sums of squares received with the stream
  int norm_scale;      // of every row, the factor of its products' sums
  int in;              // own channels' x before the convolution
  int x;               // own channels' x after the convolution
  int gates;           // own channels' silu(z)
  int y;               // own channels' y
  int projections;     // dt, B and C of all rows
  int residual;        // own channels of the stream
  int scale;           // of every row, see Scale
  int inputs;          // two buffers for inputs of own channels and outputs: see BlockInputs
  int dt_proj;         // own rows of dt_proj
};

/// Offsets of the data that blocks exchange, in words of 8 bytes: see words.cuh.
struct ExchangeLayout {
  /// One word, the number of exchanges so far. It has the same place in every call's layout, so
  /// that calls of different sizes can use one workspace in turn.
  static constexpr int64_t kEpoch = 0;
  int64_t stream;       // [row][StreamWord]
  int64_t x;            // [row][inner]; for two-byte weights a word has two values
  int64_t projections;  // [projection][padded row]
  int64_t y;            // as x
  int64_t words;
};

/// Returns 2^32/number, rounded up, for a number of at least 2. For a small i, the upper half of i
/// times the result is i / number.
SELECTIVE_SCAN_HD uint32_t inverse_of(int number) {
  return 0xffffffff / number + 1;
}

/// The number of word pairs, or of 16-byte words, in a row of an exchange.
struct RowPairs {
  int count;
  uint32_t inverse;  // inverse_of(count)
};

struct StepPlan {
  int blocks = 0;
  int padded_rows = 0;         // 8 or 16
  bool pairs_entries = false;  // lanes hold the states of two batch entries at a time
  int stages = 0;
  int activation_pitch = 0;  // elements from row to row
  RowPairs stream_pairs{};
  RowPairs inner_pairs{};
  int channel_inputs = 0;  // numbers per channel, see ChannelInput
  float inverse_dim = 0;
  float eps = 0;
  SharedLayout shared{};
  ExchangeLayout exchange{};
  LaunchShape shape{};

  int64_t workspace_bytes() const {
    return exchange.words * static_cast<int64_t>(sizeof(uint64_t));
  }
};

/// The kernel's arguments.
struct StepArgs {
  StepParams params;  // whose `layer` points to host memory
  StepPlan plan;
  void* workspace;
  StepLayer layers[kMostLayers];
};

/// Makes the plan of a call, or returns why the kernel cannot run a call of these sizes.
Refusal plan_step(const StepParams& params, const Device& device, StepPlan& plan);

}  // namespace selective_scan::cuda::step
