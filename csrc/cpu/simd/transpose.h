// Shuffles of vectors, and operations made of them: transpositions, and sums over the lanes.
#pragma once

#include <utility>

#include "vector.h"

namespace selective_scan::cpu {

/// Lane i of the result is lane Index::at(i) of a, or of b where that is at least the width.
template <class Index, class T, class K, size_t... kLanes>
SELECTIVE_SCAN_HD Vec<T, K> shuffle(Vec<T, K> a, Vec<T, K> b, std::index_sequence<kLanes...>) {
#if defined(__clang__)
  return Vec<T, K>::from(__builtin_shufflevector(a.native, b.native, Index::at(kLanes)...));
#else
  using Indices = typename Bits<T, K>::Native;
  return Vec<T, K>::from(
      __builtin_shuffle(a.native, b.native, Indices{static_cast<bits_t<T>>(Index::at(kLanes))...}));
#endif
}

/// Exchanges the off-diagonal entries of the 2 x 2 blocks of lanes that two rows `kDistance` apart
/// form: one step of a transposition.
template <int kDistance, class T, class K>
SELECTIVE_SCAN_HD void exchange(Vec<T, K>& a, Vec<T, K>& b) {
  constexpr int kWidth = Vec<T, K>::kWidth;
  struct First {
    static constexpr int at(int i) { return i & kDistance ? kWidth + (i ^ kDistance) : i; }
  };
  struct Second {
    static constexpr int at(int i) { return i & kDistance ? kWidth + i : i ^ kDistance; }
  };
  constexpr auto kLanes = std::make_index_sequence<kWidth>();
  const Vec<T, K> first = shuffle<First>(a, b, kLanes);
  b = shuffle<Second>(a, b, kLanes);
  a = first;
}

/// True if 128 bits, the unit of shuffles, hold four numbers. Interleaving two vectors then takes
/// one instruction for each, while exchange<1> may take more.
template <class T, class K>
constexpr bool kInterleaves = sizeof(T) == 4 && Vec<T, K>::kWidth >= 4;

/// Interleaves the halves of every 128 bits of a and b: (a0 b0 a1 b1 ...) and (a2 b2 a3 b3 ...).
template <class T, class K>
SELECTIVE_SCAN_HD void interleave(Vec<T, K>& a, Vec<T, K>& b) {
  constexpr int kWidth = Vec<T, K>::kWidth;
  struct Low {
    static constexpr int at(int i) { return (i & 1) * kWidth + (i & ~3) + (i & 3) / 2; }
  };
  struct High {
    static constexpr int at(int i) { return Low::at(i) + 2; }
  };
  constexpr auto kLanes = std::make_index_sequence<kWidth>();
  const Vec<T, K> low = shuffle<Low>(a, b, kLanes);
  b = shuffle<High>(a, b, kLanes);
  a = low;
}

/// Transposes a square of vectors: rows[i][j] becomes rows[j][i].
template <int kDistance = 1, class T, class K>
SELECTIVE_SCAN_HD void transpose(Vec<T, K>* rows) {
  constexpr int kWidth = Vec<T, K>::kWidth;
  if constexpr (kDistance == 1 && kInterleaves<T, K>) {
    for (int i = 0; i < kWidth; i += 4) {
      interleave(rows[i], rows[i + 1]);
      interleave(rows[i + 2], rows[i + 3]);
      exchange<2>(rows[i], rows[i + 2]);
      exchange<2>(rows[i + 1], rows[i + 3]);
      std::swap(rows[i + 1], rows[i + 2]);
    }
    transpose<4>(rows);
  } else if constexpr (kDistance < kWidth) {
    for (int i = 0; i < kWidth; ++i) {
      if (!(i & kDistance)) exchange<kDistance>(rows[i], rows[i | kDistance]);
    }
    transpose<2 * kDistance>(rows);
  }
}

/// Returns the sum of the lanes of rows[i] in lane i: a transposition that adds as it goes.
template <int kDistance = 1, class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> sum_of_each(Vec<T, K>* rows) {
  constexpr int kWidth = Vec<T, K>::kWidth;
  if constexpr (kDistance < kWidth) {
    for (int i = 0; i < kWidth; i += 2 * kDistance) {
      if constexpr (kDistance == 1 && kInterleaves<T, K>) {
        interleave(rows[i], rows[i + 1]);
      } else {
        exchange<kDistance>(rows[i], rows[i + kDistance]);
      }
      rows[i] = rows[i] + rows[i + kDistance];
    }
    return sum_of_each<2 * kDistance>(rows);
  } else {
    return rows[0];
  }
}

}  // namespace selective_scan::cpu
