// Advances the causal convolution of a block of channels by a few steps and updates its state in
// place.
#pragma once

#include "forward.h"

namespace selective_scan::cpu {

template <class R>
class ConvUpdate {
  using Block = ConvBlock<R>;
  using T = typename R::Scalar;

 public:
  static void run(const ConvUpdateParams& params, const ConvSplit& split, int64_t row,
                  int64_t block_index) {
    const Block block(params, split, block_index);
    const int64_t slot = params.slot_of(row);
    const bool is_padding = slot == ConvUpdateParams::kNoSlot;
    alignas(64) typename Block::Taps taps;
    alignas(64) T bias[Block::kMaxLanes];
    alignas(64) typename Block::Tile tile;
    if (is_padding) {
      block.zero(tile, split.tile_steps);
    } else {
      block.load_taps(taps, bias);
      load_history(params, block, row, slot, tile);
      // The state is updated before out is written, since out may be x.
      change_state(params, split, block, row, slot);
    }
    ConvForward<R>::walk(params, split, block, row, 0, params.seqlen, is_padding, taps, bias, tile);
  }

 private:
  /// Calls visit(position, first, steps) for each stretch of the `count` steps from `step` on that
  /// is contiguous in the ring.
  template <class Visit>
  static SELECTIVE_SCAN_HD void for_each_stretch(int64_t state_len, int64_t step, int64_t count,
                                                 int64_t longest, const Visit& visit) {
    for (int64_t first = 0; first < count;) {
      const int64_t remainder = (step + first) % state_len;
      const int64_t position = remainder < 0 ? remainder + state_len : remainder;
      const int64_t steps = lesser_of(lesser_of(state_len - position, longest), count - first);
      visit(position, first, steps);
      first += steps;
    }
  }

  static void load_history(const ConvUpdateParams& params, const Block& block, int64_t row,
                           int64_t slot, T* tile) {
    if (!params.cache_seqlens.present()) {
      const int64_t first = params.state_len - block.history;
      return block.load(params.conv_state, slot, first, block.history, tile);
    }
    const int64_t step = params.cache_seqlens.at(row) - block.history;
    for_each_stretch(params.state_len, step, block.history, block.history,
                     [&](int64_t position, int64_t first, int64_t steps) {
                       block.load(params.conv_state, slot, position, steps,
                                  tile + first * block.pitch);
                     });
  }

  static void change_state(const ConvUpdateParams& params, const ConvSplit& split,
                           const Block& block, int64_t row, int64_t slot) {
    alignas(64) typename Block::Tile tile;
    const ArrayView& state = params.conv_state;
    const int64_t length = params.state_len, longest = split.tile_steps;
    const int64_t kept = lesser_of(params.seqlen, length);  // steps that fit into the state
    const int64_t first_kept = params.seqlen - kept;
    if (params.cache_seqlens.present()) {
      const int64_t step = params.cache_seqlens.at(row) + first_kept;
      for_each_stretch(length, step, kept, longest,
                       [&](int64_t position, int64_t first, int64_t steps) {
                         block.load(params.x, row, first_kept + first, steps, tile);
                         block.store(state, slot, position, steps, tile);
                       });
      return;
    }
    const auto move = [&](const ArrayView& from, int64_t index, int64_t source, int64_t target,
                          int64_t count) {
      for (int64_t first = 0; first < count; first += longest) {
        const int64_t steps = lesser_of(longest, count - first);
        block.load(from, index, source + first, steps, tile);
        block.store(state, slot, target + first, steps, tile);
      }
    };
    move(state, slot, kept, 0, length - kept);
    move(params.x, row, first_kept, length - kept, kept);
  }
};

}  // namespace selective_scan::cpu
