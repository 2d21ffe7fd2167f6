// The backward pass of the causal convolution for a block of channels.
//
// A segment is walked from its first step to its last, as in the forward pass. At each step the sum
// before the activation is recomputed. Its gradient g[t] and the g of the width - 1 steps before
// give the gradient of x width - 1 steps earlier. If a sequence continues after the segment, g is
// computed for width - 1 more steps, which enter no sum here; if it ends, g is 0 there.
#pragma once

#include "../simd/vector_math.h"
#include "block.h"

namespace selective_scan::cpu {

template <class R>
class ConvBackward {
  using Block = ConvBlock<R>;
  using T = typename R::Scalar;

 public:
  static void run(const ConvBackwardParams& params, const ConvSplit& split, const ConvTask& task,
                  void* parts) {
    ConvBackward(params, split, task).run(static_cast<T*>(parts));
  }

  /// Copies dfinal_states of a sequence without steps to the gradient of its initial states.
  static void end(const ConvBackwardParams& params, const ConvSplit& split, int64_t sequence,
                  int64_t block_index) {
    const Run run = run_of(params, sequence);
    if (run.begin < run.end) return;
    const Block block(params, split, block_index);
    alignas(64) typename Block::Taps tile;
    if (params.dfinal_states.present()) {
      block.load(params.dfinal_states, sequence, 0, block.history, tile);
    } else {
      block.zero(tile, block.history);
    }
    block.store(params.dinitial_states, sequence, 0, block.history, tile);
  }

 private:
  ConvBackward(const ConvBackwardParams& params, const ConvSplit& split, const ConvTask& task)
      : params_(params), split_(split), task_(task), block_(params, split, task.block) {}

  void run(T* parts) {
    block_.load_taps(taps_, bias_);
    block_.zero(dtaps_, params_.width);
    block_.zero(dbias_, 1);
    block_.for_each_run(split_, task_, [&](const Run& run, int64_t first, int64_t stop) {
      if (run.is_padding) {
        block_.zero(g_, split_.tile_steps);
        for (int64_t step = first; step < stop; step += split_.tile_steps) {
          const int64_t steps = lesser_of(split_.tile_steps, stop - step);
          block_.store(params_.dx, task_.batch, step, steps, g_);
        }
      } else {
        walk(run, first, stop);
      }
    });
    for (int64_t k = 0; k <= params_.width; ++k) {
      const T* sums = k < params_.width ? dtaps_ + k * block_.pitch : dbias_;
      T* part = parts + k * params_.dim + block_.first_channel;
      for (int64_t lane = 0; lane < block_.lanes; ++lane) part[lane] = sums[lane];
    }
  }

  void walk(const Run& run, int64_t first, int64_t stop) {
    const int64_t history = block_.history, pitch = block_.pitch;
    const Differentiate differentiate = kDifferentiate[params_.width - 1][params_.silu];
    block_.load_history(run, task_.batch, first, x_);
    block_.zero(g_, history);
    // The sums to keep, and the discarded sums of the steps after the segment.
    const Sums sums{dtaps_, dbias_}, others{unused_dtaps_, unused_dbias_};
    for (int64_t step = first; step < stop + history; step += split_.tile_steps) {
      const int64_t steps = lesser_of(split_.tile_steps, stop + history - step);
      const int64_t given = clamped(run.end - step, steps);
      const int64_t counted = clamped(stop - step, given);
      T* x = x_ + history * pitch;
      T* dout = g_ + history * pitch;
      block_.load(params_.x, task_.batch, step, given, x);
      block_.zero(x + given * pitch, steps - given);
      if (params_.dout.present()) {
        block_.load(params_.dout, task_.batch, step, given, dout);
        block_.zero(dout + given * pitch, steps - given);
      } else {
        block_.zero(dout, steps);
      }
      differentiate(taps_, bias_, counted, pitch, x_, g_, sums);
      if (counted < steps) {
        const int64_t done = counted * pitch;
        differentiate(taps_, bias_, steps - counted, pitch, x_ + done, g_ + done, others);
      }
      add_final_gradient(run, step, steps);
      store_gradient(run, first, stop, step, steps);
      block_.move_to_front(x_, steps, history);
      block_.move_to_front(g_, steps, history);
    }
  }

  static SELECTIVE_SCAN_HD int64_t clamped(int64_t value, int64_t high) {
    return greater_of(0, lesser_of(value, high));
  }

  /// Adds dfinal_states to dx. The rows of g_ hold dx from `step - history` on.
  void add_final_gradient(const Run& run, int64_t step, int64_t steps) {
    if (run.states == Run::kNone || !params_.dfinal_states.present()) return;
    // The final state's steps end with the sequence: row i of the state belongs to step
    // run.end - history + i, which is row run.end - step + i of the tile.
    const int64_t begin = clamped(run.end - step, steps);
    const int64_t end = clamped(run.end - step + block_.history, steps);
    if (begin == end) return;
    alignas(64) typename Block::Taps states;
    block_.load(params_.dfinal_states, run.states, step + begin - run.end, end - begin, states);
    T* rows = g_ + begin * block_.pitch;
    for (int64_t i = 0; i < (end - begin) * block_.pitch; i += R::kWidth) {
      (R::load(rows + i) + R::load(states + i)).store(rows + i);
    }
  }

  /// Stores dx of the segment's own steps and, if a sequence begins here, of the steps before it.
  void store_gradient(const Run& run, int64_t first, int64_t stop, int64_t step,
                      int64_t steps) const {
    const int64_t from = step - block_.history;
    const int64_t begin = clamped(first - from, steps), end = clamped(stop - from, steps);
    block_.store(params_.dx, task_.batch, from + begin, end - begin, g_ + begin * block_.pitch);
    if (run.states == Run::kNone || first > run.begin || !params_.dinitial_states.present()) return;
    const int64_t position = from - run.begin + block_.history;
    block_.store(params_.dinitial_states, run.states, position, begin, g_);
  }

  struct Sums {
    T* dtaps;
    T* dbias;
  };
  /// `x` holds x of the width - 1 steps before and of each step, in consecutive rows. `g` holds g
  /// of the width - 1 steps before, then dout. On return the rows of `g` hold dx from width - 1
  /// steps earlier on, followed by g of the last width - 1 steps.
  using Differentiate = void (*)(const T* taps, const T* bias, int64_t steps, int64_t pitch,
                                 const T* x, T* g, const Sums& sums);

  template <int kWidth, bool kSilu>
  static void differentiate(const T* taps, const T* bias, int64_t steps, int64_t pitch, const T* x,
                            T* g, const Sums& sums) {
    constexpr int kLast = kWidth - 1;
    for (int64_t lane = 0; lane < pitch; lane += R::kWidth) {
      R weight[kWidth], dweight[kWidth], xs[kWidth], gs[kWidth];
      const T* x_row = x + lane;
      T* g_row = g + lane;
      for (int k = 0; k < kWidth; ++k) {
        weight[k] = R::load(taps + k * pitch + lane);
        dweight[k] = R::load(sums.dtaps + k * pitch + lane);
      }
      for (int k = 1; k < kWidth; ++k) {
        xs[k] = R::load(x_row + (k - 1) * pitch);
        gs[k] = R::load(g_row + (k - 1) * pitch);
      }
      const R offset = R::load(bias + lane);
      R dbias = R::load(sums.dbias + lane);
      for (int64_t step = 0; step < steps; ++step, x_row += pitch, g_row += pitch) {
        for (int k = 1; k < kWidth; ++k) {
          xs[k - 1] = xs[k];
          gs[k - 1] = gs[k];
        }
        xs[kLast] = R::load(x_row + kLast * pitch);
        R gradient = R::load(g_row + kLast * pitch);
        if constexpr (kSilu) {
          R sum = offset;
          for (int k = 0; k < kWidth; ++k) sum = sum + weight[k] * xs[k];
          gradient = gradient * silu_derivative(sum, VectorMath::sigmoid(sum));
        }
        gs[kLast] = gradient;
        R dx = weight[0] * gradient;
        for (int k = 1; k < kWidth; ++k) dx = dx + weight[k] * gs[kLast - k];
        for (int k = 0; k < kWidth; ++k) dweight[k] = dweight[k] + gradient * xs[k];
        dbias = dbias + gradient;
        dx.store(g_row);
      }
      for (int k = 1; k < kWidth; ++k) gs[k].store(g_row + (k - 1) * pitch);
      for (int k = 0; k < kWidth; ++k) dweight[k].store(sums.dtaps + k * pitch + lane);
      dbias.store(sums.dbias + lane);
    }
  }

  static constexpr auto kDifferentiate =
      conv_instances<Differentiate>([]<int kWidth, bool kSilu>() {
        return &ConvBackward::template differentiate<kWidth, kSilu>;
      });

  const ConvBackwardParams& params_;
  const ConvSplit& split_;
  const ConvTask& task_;
  const Block block_;
  alignas(64) typename Block::Taps taps_;
  alignas(64) T bias_[Block::kMaxLanes];
  alignas(64) typename Block::Taps dtaps_;
  alignas(64) T dbias_[Block::kMaxLanes];
  alignas(64) typename Block::Taps unused_dtaps_;
  alignas(64) T unused_dbias_[Block::kMaxLanes];
  alignas(64) typename Block::Tile x_;
  alignas(64) typename Block::Tile g_;
};

}  // namespace selective_scan::cpu
