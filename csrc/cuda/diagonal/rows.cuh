// The diagonal scan of rows that are contiguous in time: one warp per chain.
//
// A lane takes kItems consecutive steps of each tile of kWarpSize·kItems steps and composes their
// affine maps h -> product·h + offset. A scan by shuffles then gives it the state before its steps,
// and it walks through them. kGroup tiles are loaded before the first one is used; groups whose
// steps all exist have separate code. There is no shared memory, and no synchronization beyond the
// warp.
//
// Loads and stores are vectors of 16 bytes. The first tile therefore begins up to kItems - 1 steps
// before its row, at an aligned address. Steps outside the chain are identities, and lanes that
// have such steps access theirs one by one.
#pragma once

#include "../kit/shuffle.cuh"
#include "chain.cuh"

namespace selective_scan::cuda::diagonal {

/// The number of a tile's steps that a lane takes: what fits one or two vectors of 16 bytes.
template <class T, class Storage>
struct RowShape {
  static constexpr int kItems = sizeof(T) == 16 ? 2 : 4;
};
template <bool kReversed>
struct RowShape<float, Stored<Half, kReversed>> {
  static constexpr int kItems = 8;
};
template <bool kReversed>
struct RowShape<float, Stored<BFloat16, kReversed>> {
  static constexpr int kItems = 8;
};
constexpr int kMaxItems = 8;

/// Returns the composition of the maps of a chain's lanes, up to and including each lane's.
template <class T>
__device__ AffineMap<T> scan_lanes(int lane, AffineMap<T> map) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const AffineMap<T> before{shuffle_up(map.product, distance), shuffle_up(map.offset, distance)};
    if (lane >= distance) map = Compose()(before, map);
  }
  return map;
}

template <class Step, class Params, class Storage>
class RowChain : public Chain<Step, Params, Storage> {
  using Base = Chain<Step, Params, Storage>;
  using T = typename Step::Value;
  using Elements = Access<T, Storage>;
  static constexpr int kItems = RowShape<T, Storage>::kItems;
  static constexpr int kGroup = !kIsKnown<Storage>                       ? 1
                                : Step::kBackward || kItems == kMaxItems ? 2
                                                                         : 4;
  static constexpr int kTile = kWarpSize * kItems;
  using Items = T[kItems];

 public:
  __device__ RowChain(const Params& params, const Segmentation& split, int64_t row, int64_t segment,
                      int lane)
      : Base(params, row, segment), lane_(lane) {
    const int shift = common_shift();
    vectorised_ = shift >= 0;
    this->place(split, vectorised_ ? shift : 0, vectorised_ ? kItems : 1);
  }

  /// Returns the map of the whole chain; writes nothing.
  __device__ AffineMap<T> map() const {
    AffineMap<T> total = AffineMap<T>::identity();
    for_each_group([&]<bool kIsWhole>(int64_t first) {
      Items a[kGroup], x[kGroup];
      load_group<kIsWhole>(first, a, x);
      for_each_tile<kIsWhole>(first, [&](int g) {
        const AffineMap<T> map = scan_lanes(lane_, this->map_of(a[g], x[g]));
        total = Compose()(total, AffineMap<T>{shuffle(map.product, kWarpSize - 1),
                                              shuffle(map.offset, kWarpSize - 1)});
      });
    });
    return total;
  }

  __device__ void scan(T state) const {
    T da_sum{};
    for_each_group([&]<bool kIsWhole>(int64_t first) {
      Items a[kGroup], x[kGroup];
      [[maybe_unused]] Items h[kGroup];
      load_group<kIsWhole>(first, a, x);
      if constexpr (Step::kBackward) load_previous_group<kIsWhole>(first, h);
      for_each_tile<kIsWhole>(first, [&](int g) {
        const int64_t position = lane_position(first, g);
        const T after = scan_lanes(lane_, this->map_of(a[g], x[g]))(state);
        T own = shuffle_up(after, 1);
        if (lane_ == 0) own = state;
        state = shuffle(after, kWarpSize - 1);
#pragma unroll
        for (int i = 0; i < kItems; ++i) x[g][i] = Step::advance(a[g][i], x[g][i], own);
        store(this->out_, position, x[g]);
        if constexpr (Step::kBackward) {
#pragma unroll
          for (int i = 0; i < kItems; ++i) h[g][i] = x[g][i] * conj(h[g][i]);
          if (!this->params_.sum_da) {
            store(this->da_, position, h[g]);
          } else {
#pragma unroll
            for (int i = 0; i < kItems; ++i) {
              if (this->contains(position + i)) da_sum += h[g][i];
            }
          }
        }
      });
    });
    if constexpr (Step::kBackward) {
      da_sum = sum_over_lanes(da_sum);
      if (lane_ == 0) this->finish(state, da_sum);
    }
  }

 private:
  /// Calls visit.operator()<kIsWhole>(first) for every group of tiles. kIsWhole: all of its steps
  /// exist.
  template <class Visit>
  __device__ __forceinline__ void for_each_group(const Visit& visit) const {
    constexpr int kSteps = kGroup * kTile;
    for (int64_t first = this->origin_; first < this->end_; first += kSteps) {
      if (is_whole(first, kSteps)) {
        visit.template operator()<true>(first);
      } else {
        visit.template operator()<false>(first);
      }
    }
  }
  /// Calls visit(g) for the tiles of a group that have steps; a short chain has one.
  template <bool kIsWhole, class Visit>
  __device__ __forceinline__ void for_each_tile(int64_t first, const Visit& visit) const {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      if (!kIsWhole && first + g * kTile >= this->end_) break;
      visit(g);
    }
  }

  /// Returns the misalignment that all arrays share, or -1 if vectors cannot be used.
  __device__ int common_shift() const {
    const auto shift_of = [](const Cursor& cursor) {
      const unsigned bytes = Elements::bytes(cursor) * cursor.components();
      return cursor.is_contiguous() ? cursor.misalignment(kItems, bytes) : -1;
    };
    const int shift = shift_of(this->x_);
    const auto agrees = [&](const Cursor& cursor) { return shift_of(cursor) == shift; };
    bool all = shift >= 0 && agrees(this->out_) && (this->a_.step == 0 || agrees(this->a_));
    if constexpr (Step::kBackward) {
      all = all && agrees(states_now()) && (this->params_.sum_da || agrees(this->da_));
    }
    return all ? shift : -1;
  }

  /// Returns a cursor to h at the position itself; h_previous points one step further.
  __device__ Cursor states_now() const {
    Cursor now = this->previous_;
    now.data -= now.step * Elements::bytes(now);
    return now;
  }

  __device__ int64_t lane_position(int64_t first, int g) const {
    return first + (static_cast<int64_t>(g) * kWarpSize + lane_) * kItems;
  }

  /// Returns whether `steps` steps are all inside the chain and can be accessed as vectors.
  __device__ bool is_whole(int64_t position, int steps = kItems) const {
    return vectorised_ && position >= this->begin_ && position + steps <= this->end_;
  }

  /// Loads a lane's steps one by one. Steps outside the chain become `outside`.
  __device__ void load(const Cursor& cursor, int64_t position, int64_t end, T outside,
                       Items& out) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) out[i] = outside;
    if (position >= end) return;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (position + i >= this->begin_ && position + i < end) {
        out[i] = Elements::load(cursor, position + i);
      }
    }
  }

  template <bool kIsWhole>
  __device__ void load_group(int64_t first, Items (&a)[kGroup], Items (&x)[kGroup]) const {
    const bool has_steps = this->a_.step != 0;
    const auto load_tile = [&](const Cursor& cursor, bool may_be_vector, int64_t position,
                               T outside, Items& out) {
      if ((kIsWhole || is_whole(position)) && may_be_vector) {
        Elements::load_vector(cursor, position, out);
      } else {
        load(cursor, position, this->end_, outside, out);
      }
    };
    for_each_tile<kIsWhole>(first, [&](int g) {
      load_tile(this->x_, true, lane_position(first, g), T{}, x[g]);
      load_tile(this->a_, has_steps, lane_position(first, g), one<T>(), a[g]);
    });
  }

  /// Loads the states before the steps. If vectors can be used, it loads the states after the steps
  /// and moves them by one.
  template <bool kIsWhole>
  __device__ void load_previous_group(int64_t first, Items (&h)[kGroup]) const {
    const int64_t last = this->row_end_ - 1;
    const Cursor now = states_now();
    for_each_tile<kIsWhole>(first, [&](int g) {
      const int64_t position = lane_position(first, g);
      if (kIsWhole || is_whole(position)) {
        Items after;
        Elements::load_vector(now, position, after);
#pragma unroll
        for (int i = 0; i + 1 < kItems; ++i) h[g][i] = after[i + 1];
        const int64_t next = position + kItems;
        h[g][kItems - 1] = next <= last ? Elements::load(now, next) : T{};
      } else {
        load(this->previous_, position, this->end_ < last ? this->end_ : last, T{}, h[g]);
      }
      if (position <= last && position + kItems > last) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (position + i == last) h[g][i] = this->load_initial_state();
        }
      }
    });
  }

  __device__ void store(const Cursor& cursor, int64_t position, const Items& values) const {
    if (is_whole(position)) {
      Elements::store_vector(cursor, position, values);
    } else if (position < this->end_) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (this->contains(position + i)) Elements::store(cursor, position + i, values[i]);
      }
    }
  }

  int lane_;
  bool vectorised_;
};

}  // namespace selective_scan::cuda::diagonal
