// The diagonal scan of rows whose steps are not contiguous in memory, as in a (batch, seqlen,
// channel) layout: neighboring lanes take neighboring rows, one row each.
//
// Time is divided among the warps of a block. In every round of kColumnWarps·kSteps steps each warp
// composes the affine maps of its kSteps steps and stores the composition to shared memory. After
// the round's only barrier it knows the state before its steps, and walks through them. Except in
// the backward pass, the next round's steps are loaded meanwhile, unconverted.
#pragma once

#include "../kit/exchange.cuh"
#include "chain.cuh"

namespace selective_scan::cuda::diagonal {

constexpr int kColumnWarps = 8;

template <class Step, class Params, class Storage>
class ColumnChain : public Chain<Step, Params, Storage> {
  using Base = Chain<Step, Params, Storage>;
  using T = typename Step::Value;
  using Elements = Access<T, Storage>;
  using Raw = typename Elements::Raw;
  static constexpr int kSteps = 32 / sizeof(T);
  /// True if the next round is loaded before this one is done. The backward pass has no registers
  /// left for that.
  static constexpr bool kFetchesAhead = !Step::kBackward;
  static constexpr int kRound = kColumnWarps * kSteps;

 public:
  using MapExchange = Exchange<AffineMap<T>, kColumnWarps>;

  /// Threads past the last row are not `active`: they repeat that row and write nothing.
  __device__ ColumnChain(const Params& params, const Segmentation& split, int64_t row,
                         int64_t segment, bool active, typename MapExchange::Storage& maps)
      : Base(params, row, segment), active_(active), exchange_{maps} {
    this->place(split, 0, 1);
  }

  /// Returns the map of the whole chain; writes nothing.
  __device__ AffineMap<T> map() {
    AffineMap<T> total = AffineMap<T>::identity();
    Raw raw_a[kSteps], raw_x[kSteps];
    fetch(this->a_, this->begin_, this->end_ - 1, raw_a);
    fetch(this->x_, this->begin_, this->end_ - 1, raw_x);
    for (int64_t round = this->begin_; round < this->end_; round += kRound) {
      T a[kSteps], x[kSteps];
      to_values(raw_a, round, one<T>(), a);
      to_values(raw_x, round, T{}, x);
      fetch(this->a_, round + kRound, this->end_ - 1, raw_a);
      fetch(this->x_, round + kRound, this->end_ - 1, raw_x);
      const auto& maps = exchange_.share(this->map_of(a, x));
#pragma unroll
      for (int w = 0; w < kColumnWarps; ++w) total = Compose()(total, maps[w][lane()]);
    }
    return total;
  }

  __device__ void scan(T state) {
    T da_sum{};
    Raw raw_a[kSteps], raw_x[kSteps];
    // A packed sequence without steps may end where the row begins.
    const int64_t last = this->end_ > 0 ? this->end_ - 1 : 0;
    const auto fetch_inputs = [&]<bool kFull>(int64_t round) {
      fetch<kFull>(this->a_, round, last, raw_a);
      fetch<kFull>(this->x_, round, last, raw_x);
    };
    // kFull: this round and the next one have all of their steps.
    const auto scan_round = [&]<bool kFull>(int64_t round) {
      if constexpr (!kFetchesAhead) fetch_inputs.template operator()<kFull>(round);
      [[maybe_unused]] Raw raw_h[kSteps];
      if constexpr (Step::kBackward) fetch(this->previous_, round, this->row_end_ - 2, raw_h);
      T a[kSteps], x[kSteps];
      to_values<kFull>(raw_a, round, one<T>(), a);
      to_values<kFull>(raw_x, round, T{}, x);
      if constexpr (kFetchesAhead) fetch_inputs.template operator()<kFull>(round + kRound);
      const auto& maps = exchange_.share(this->map_of(a, x));
      T own = state;
#pragma unroll
      for (int w = 0; w < kColumnWarps; ++w) {
        if (w == warp()) own = state;
        state = maps[w][lane()](state);
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) x[i] = Step::advance(a[i], x[i], own);
      store<kFull>(this->out_, round, x);
      if constexpr (Step::kBackward) {
        T h[kSteps];
        to_previous(raw_h, round, h);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) h[i] = x[i] * conj(h[i]);
        if (!this->params_.sum_da) {
          store<kFull>(this->da_, round, h);
        } else {
#pragma unroll
          for (int i = 0; i < kSteps; ++i) {
            if (i < steps_left(round, this->end_)) da_sum += h[i];
          }
        }
      }
    };
    int64_t round = this->begin_;
    if constexpr (kFetchesAhead) {
      fetch_inputs.template operator()<false>(round);
      for (; round + 2 * kRound < this->end_; round += kRound) {
        scan_round.template operator()<true>(round);
      }
    }
    for (; round < this->end_; round += kRound) scan_round.template operator()<false>(round);
    if constexpr (Step::kBackward) finish(state, da_sum);
  }

 private:
  static __device__ int lane() { return threadIdx.x % kWarpSize; }
  static __device__ int warp() { return threadIdx.x / kWarpSize; }

  /// Returns how many of the warp's steps of a round come before the position `end`.
  static __device__ int steps_left(int64_t round, int64_t end) {
    const int64_t left = end - (round + warp() * kSteps);
    return left < 0 ? 0 : left < kSteps ? static_cast<int>(left) : kSteps;
  }

  /// Starts to load the warp's steps of a round. Steps after the position `last` load that position
  /// again instead of branching: after a branch the compiler would wait for all loads. kFull: no
  /// steps come after `last`.
  template <bool kFull = false>
  __device__ void fetch(Cursor cursor, int64_t round, int64_t last, Raw (&raw)[kSteps]) const {
    if (!kFull && last < 0) {  // there is no state before the only step
#pragma unroll
      for (int i = 0; i < kSteps; ++i) raw[i] = Raw{};
      return;
    }
    const int64_t first = round + warp() * kSteps;
    const int left = kFull ? kSteps : steps_left(round, last);
    const int64_t stride = cursor.step * Elements::bytes(cursor);
    cursor.data += (kFull || first < last ? first : last) * stride;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      raw[i] = Elements::load_raw(cursor, 0);
      if (i < left) cursor.data += stride;
    }
  }

  /// Converts what fetch() has loaded. Steps outside the chain become `outside`.
  template <bool kFull = false>
  __device__ void to_values(const Raw (&raw)[kSteps], int64_t round, T outside,
                            T (&out)[kSteps]) const {
    const int left = kFull ? kSteps : steps_left(round, this->end_);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) out[i] = i < left ? Elements::value(raw[i]) : outside;
  }

  __device__ void to_previous(const Raw (&raw)[kSteps], int64_t round, T (&h)[kSteps]) const {
    const int64_t first = round + warp() * kSteps;
    const int64_t last = this->row_end_ - 1;
    to_values(raw, round, T{}, h);
    if (first > last || first + kSteps <= last) return;
    const T initial = this->load_initial_state();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (first + i == last) h[i] = initial;
    }
  }

  template <bool kFull>
  __device__ void store(Cursor cursor, int64_t round, const T (&values)[kSteps]) const {
    const int left = !active_ ? 0 : kFull ? kSteps : steps_left(round, this->end_);
    const int64_t stride = cursor.step * Elements::bytes(cursor);
    cursor.data += (round + warp() * kSteps) * stride;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i < left) Elements::store(cursor, 0, values[i]);
      cursor.data += stride;
    }
  }

  /// Ends the chain. The sum of da over the warps goes through the exchange as well.
  __device__ void finish(T state, T da_sum) {
    const auto& sums = exchange_.share({da_sum, T{}});
    T total{};
    for (int w = 0; w < kColumnWarps; ++w) total += sums[w][lane()].product;
    if (warp() == 0 && active_) Base::finish(state, total);
  }

  bool active_;
  MapExchange exchange_;
};

}  // namespace selective_scan::cuda::diagonal
