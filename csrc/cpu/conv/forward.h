// The forward pass of the causal convolution for a block of channels.
#pragma once

#include "../simd/vector_math.h"
#include "block.h"

namespace selective_scan::cpu {

template <class R>
class ConvForward {
  using Block = ConvBlock<R>;
  using T = typename R::Scalar;

 public:
  static void run(const ConvForwardParams& params, const ConvSplit& split, const ConvTask& task) {
    const Block block(params, split, task.block);
    alignas(64) typename Block::Taps taps;
    alignas(64) T bias[Block::kMaxLanes];
    alignas(64) typename Block::Tile tile;
    block.load_taps(taps, bias);
    block.for_each_run(split, task, [&](const Run& run, int64_t first, int64_t stop) {
      if (run.is_padding) {
        block.zero(tile, split.tile_steps);
      } else {
        block.load_history(run, task.batch, first, tile);
      }
      walk(params, split, block, task.batch, first, stop, run.is_padding, taps, bias, tile);
    });
  }

  /// Computes the steps [first, stop) of a batch entry. The tile begins with x at the width - 1
  /// steps before or, for padding, holds zeros.
  template <class Params>
  static void walk(const Params& params, const ConvSplit& split, const Block& block, int64_t batch,
                   int64_t first, int64_t stop, bool is_padding, const T* taps, const T* bias,
                   T* tile) {
    const Convolve convolve = kConvolve[params.width - 1][params.silu];
    for (int64_t step = first; step < stop; step += split.tile_steps) {
      const int64_t steps = lesser_of(split.tile_steps, stop - step);
      if (!is_padding) {
        block.load(params.x, batch, step, steps, tile + block.history * block.pitch);
        convolve(taps, bias, steps, block.pitch, tile);
      }
      block.store(params.out, batch, step, steps, tile);
      if (!is_padding) block.move_to_front(tile, steps, block.history);
    }
  }

  /// Writes the final states of a sequence.
  static void end(const ConvForwardParams& params, const ConvSplit& split, int64_t sequence,
                  int64_t block_index) {
    const Block block(params, split, block_index);
    const Run run = run_of(params, sequence);
    const int64_t batch = params.cu_seqlens.present() ? 0 : sequence;
    alignas(64) typename Block::Taps tile;
    block.load_history(run, batch, run.end, tile);
    block.store(params.final_states, sequence, 0, block.history, tile);
  }

 private:
  /// Computes the output from x at each step and the width - 1 steps before it, in consecutive
  /// rows. Each output replaces the oldest row that it needs.
  using Convolve = void (*)(const T* taps, const T* bias, int64_t steps, int64_t pitch, T* tile);

  template <int kWidth, bool kSilu>
  static void convolve(const T* taps, const T* bias, int64_t steps, int64_t pitch, T* tile) {
    for (int64_t lane = 0; lane < pitch; lane += R::kWidth) {
      R weight[kWidth], x[kWidth];
      for (int k = 0; k < kWidth; ++k) weight[k] = R::load(taps + k * pitch + lane);
      T* row = tile + lane;
      for (int k = 1; k < kWidth; ++k) x[k] = R::load(row + (k - 1) * pitch);
      const R offset = R::load(bias + lane);
      for (int64_t step = 0; step < steps; ++step, row += pitch) {
        for (int k = 1; k < kWidth; ++k) x[k - 1] = x[k];
        x[kWidth - 1] = R::load(row + (kWidth - 1) * pitch);
        R sum = offset;
        for (int k = 0; k < kWidth; ++k) sum = sum + weight[k] * x[k];
        if constexpr (kSilu) sum = sum * VectorMath::sigmoid(sum);
        sum.store(row);
      }
    }
  }

  static constexpr auto kConvolve = conv_instances<Convolve>(
      []<int kWidth, bool kSilu>() { return &ConvForward::template convolve<kWidth, kSilu>; });
};

}  // namespace selective_scan::cpu
