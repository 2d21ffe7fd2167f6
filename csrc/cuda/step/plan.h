// How a token's way through a stack of layers is divided among blocks: who has which rows of which
// matrix, what lies where in shared memory, and in the memory through which blocks exchange values.
#pragma once

#include <cstdint>

#include "../../core/step_params.h"
#include "../kit/barrier_state.h"
#include "../kit/launch_shape.h"
#include "../plan/device.h"

namespace selective_scan::cuda::step {

constexpr int kMaxLayers = 128;
constexpr int kMaxRows = 16;
constexpr int kMaxStates = 64;

constexpr int kComputeWarps = 8;
constexpr int kComputeThreads = kComputeWarps * 32;
constexpr int kThreads = kComputeThreads + 32;  // and a warp that fetches weights

/// Rows of weights that are multiplied together, a stage of the ring: kStageBytes hold kRowBytes of
/// each, 16 bytes apart so that they begin in different banks.
constexpr int kTileRows = 16;
constexpr int kRowBytes = 2048;
constexpr int kRowPitch = kRowBytes + 16;
constexpr int kStageBytes = kTileRows * kRowPitch;
constexpr int kMostStages = 8;

/// Channels are given to blocks by so many: two-byte weights of dt_proj are then copied in whole
/// words, and pairs of channels are one block's.
constexpr int kChannelUnit = 4;
/// Of two-byte matrices; dim and inner must be multiples.
constexpr int kColumnUnit = 16;

/// Consecutive rows, or channels.
struct Share {
  int first;
  int count;
};
SELECTIVE_SCAN_HD Share share_of(int64_t total, int block, int blocks) {
  const int64_t first = total * block / blocks;
  return {static_cast<int>(first), static_cast<int>(total * (block + 1) / blocks - first)};
}
SELECTIVE_SCAN_HD Share channels_of(int64_t inner, int block, int blocks) {
  const Share units = share_of(inner / kChannelUnit, block, blocks);
  return {units.first * kChannelUnit, units.count * kChannelUnit};
}

/// Byte offsets in shared memory. Arrays of activations are [row of a matrix][row].
struct SharedLayout {
  int barriers;     // full and empty of every stage
  int stages;       // of the ring
  int activations;  // [row][column], what a product multiplies with
  int sums;         // of warps, for two tiles
  int xz;           // x and z of own channels
  int x;            // of own channels, behind the convolution
  int y;            // of own channels
  int projections;  // dt, B and C of all rows
  int residual;     // of own channels of the stream
  int scale;        // of every row: 1 / √(mean r² + eps)
  int dt_proj;      // own rows of it
  int bytes;
};

/// Offsets, in words of 8 bytes, of what blocks exchange: see exchange.cuh.
struct ExchangeLayout {
  int64_t epoch;        // one word: how many exchanges there have been
  int64_t residual;     // [row][dim]
  int64_t squares;      // [row][block], of own channels of the stream
  int64_t x;            // [row][inner], of two-byte weights two values a word
  int64_t projections;  // [row][projection]
  int64_t y;            // as x
  int64_t words;
};

struct StepPlan {
  int blocks = 0;
  int padded_rows = 0;  // 8 or 16
  int stages = 0;
  int columns = 0;  // of the activations that shared memory holds at a time
  int most_channels = 0;
  int most_outputs = 0;
  SharedLayout shared{};
  ExchangeLayout exchange{};
  LaunchShape shape{};
};

/// Why the kernels cannot run a call; null: `plan` says how they do.
const char* plan_step(const StepParams& params, const Device& device, StepPlan& plan);

}  // namespace selective_scan::cuda::step
