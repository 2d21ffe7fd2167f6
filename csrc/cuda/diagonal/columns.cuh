// The diagonal scan of rows whose steps are not next to each other in memory, as in a (batch,
// seqlen, channel) layout: neighbouring lanes take neighbouring rows, one each.
//
// Time is divided among the kWarps warps of a block. In every round of kWarps·kSteps steps each
// warp loads its kSteps, composes their affine maps and leaves the composition in shared memory;
// after the round's only barrier it knows the state before its steps, and walks them.
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
  static constexpr int kSteps = 32 / sizeof(T);
  static constexpr int kRound = kColumnWarps * kSteps;

 public:
  using MapExchange = Exchange<AffineMap<T>, kColumnWarps>;

  /// `active`: threads beyond the last row work on it too, and write nothing.
  __device__ ColumnChain(const Params& params, const Segmentation& split, int64_t row,
                         int64_t segment, bool active, typename MapExchange::Storage& maps)
      : Base(params, row, segment), active_(active), exchange_{maps} {
    this->place(split, 0, 1);
  }

  /// The map of the whole chain; nothing is written.
  __device__ AffineMap<T> map() {
    AffineMap<T> total = AffineMap<T>::identity();
    for (int64_t round = this->begin_; round < this->end_; round += kRound) {
      T a[kSteps], x[kSteps];
      load(this->a_, round, one<T>(), a);
      load(this->x_, round, T{}, x);
      const auto& maps = exchange_.share(map_of(a, x));
#pragma unroll
      for (int w = 0; w < kColumnWarps; ++w) total = Compose()(total, maps[w][lane()]);
    }
    return total;
  }

  __device__ void scan(T state) {
    T da_sum{};
    for (int64_t round = this->begin_; round < this->end_; round += kRound) {
      const int64_t first = round + warp() * kSteps;
      T a[kSteps], x[kSteps], h[kSteps];
      load(this->a_, round, one<T>(), a);
      load(this->x_, round, T{}, x);
      if constexpr (Step::kBackward) load_previous(round, h);
      const auto& maps = exchange_.share(map_of(a, x));
      T own = state;
#pragma unroll
      for (int w = 0; w < kColumnWarps; ++w) {
        if (w == warp()) own = state;
        state = maps[w][lane()](state);
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) x[i] = Step::advance(a[i], x[i], own);
      store(this->out_, round, x);
      if constexpr (Step::kBackward) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) h[i] = x[i] * conj(h[i]);
        if (!this->params_.sum_da) {
          store(this->da_, round, h);
        } else {
#pragma unroll
          for (int i = 0; i < kSteps; ++i) {
            if (first + i < this->end_) da_sum += h[i];
          }
        }
      }
    }
    if constexpr (Step::kBackward) finish(state, da_sum);
  }

 private:
  static __device__ int lane() { return threadIdx.x % kWarpSize; }
  static __device__ int warp() { return threadIdx.x / kWarpSize; }

  /// The warp's steps of a round; those beyond the chain are `outside`.
  __device__ void load(const Cursor& cursor, int64_t round, T outside, T (&out)[kSteps]) const {
    const int64_t first = round + warp() * kSteps;
    if (first + kSteps <= this->end_) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) out[i] = Elements::load(cursor, first + i);
    } else {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        out[i] = outside;
        if (first + i < this->end_) out[i] = Elements::load(cursor, first + i);
      }
    }
  }

  __device__ void load_previous(int64_t round, T (&h)[kSteps]) const {
    const int64_t first = round + warp() * kSteps;
    const int64_t last = this->row_end_ - 1;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      h[i] = T{};
      if (first + i < this->end_ && first + i < last) {
        h[i] = Elements::load(this->previous_, first + i);
      } else if (first + i == last) {
        h[i] = this->load_initial_state();
      }
    }
  }

  __device__ void store(const Cursor& cursor, int64_t round, const T (&values)[kSteps]) const {
    const int64_t first = round + warp() * kSteps;
    if (!active_) return;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (first + i < this->end_) Elements::store(cursor, first + i, values[i]);
    }
  }

  static __device__ AffineMap<T> map_of(const T (&a)[kSteps], const T (&x)[kSteps]) {
    AffineMap<T> map{Step::factor(a[0]), Step::offset(a[0], x[0])};
#pragma unroll
    for (int i = 1; i < kSteps; ++i) {
      map.product = Step::factor(a[i]) * map.product;
      Step::advance(a[i], x[i], map.offset);
    }
    return map;
  }

  /// The sum over the warps goes through the exchange as well.
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
