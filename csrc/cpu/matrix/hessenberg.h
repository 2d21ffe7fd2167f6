// Hessenberg matrices, one per lane of a vector: the reduction to Hessenberg form, and linear
// systems with I − s·H, which take O(N²) operations each.
//
// Matrices are arrays (row, column) of State, N times N. Lanes are independent: if one lane
// exchanges rows and its neighbor does not, each gets the bits that it would get alone.
#pragma once

#include <cmath>
#include <cstdint>

#include "../../core/complex.h"
#include "../../core/math.h"
#include "../simd/vector.h"
#include "../work.h"

namespace selective_scan::cpu {

/// The double-precision type that corresponds to State, with the same instruction set.
template <class State>
struct WideOf;
template <class T, class K>
struct WideOf<Vec<T, K>> {
  using type = Vec<double, K>;
};
template <class R>
struct WideOf<Complex<R>> {
  using type = Complex<typename WideOf<R>::type>;
};

template <class R>
SELECTIVE_SCAN_HD R root(R x) {
  for (int lane = 0; lane < R::kWidth; ++lane) x.set_lane(lane, std::sqrt(x.lane(lane)));
  return x;
}

/// Returns 1/a, also if |a|² is out of range.
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> inverse_of(Vec<T, K> a) {
  return reciprocal(a);
}
template <class R>
SELECTIVE_SCAN_HD Complex<R> inverse_of(Complex<R> a) {
  const R scale = reciprocal(size_of(a));
  return scale * reciprocal(scale * a);
}

/// Householder's reduction of A to Hessenberg form, in place: A = Q·H·Q^H. `reflector` has room for
/// `order` entries.
template <class State>
void reduce_to_hessenberg(int64_t order, State* A, State* Q, State* reflector) {
  using R = real_t<State>;
  const R zero = constant<State>(0);
  for (int64_t i = 0; i < order * order; ++i) Q[i] = State{};
  for (int64_t i = 0; i < order; ++i) Q[i * order + i] = one<State>();

  for (int64_t k = 0; k + 2 < order; ++k) {
    R below = zero;
    for (int64_t i = k + 2; i < order; ++i) below += norm(A[i * order + k]);
    const auto is_reduced = below == zero;
    const State head = A[(k + 1) * order + k];
    const R head_size = root(norm(head));
    const R length = root(norm(head) + below);
    // This sign avoids cancellation: the column becomes −length·head/|head|.
    State direction = (constant<R>(1) / head_size) * head;
    direction = select(head_size == zero, one<State>(), direction);
    for (int64_t i = k + 2; i < order; ++i) reflector[i] = A[i * order + k];
    reflector[k + 1] = head + length * direction;
    const R scale = select(is_reduced, zero, constant<R>(2) / (norm(reflector[k + 1]) + below));

    // A −= scale·v·(v^H·A), A −= scale·(A·v)·v^H, Q −= scale·(Q·v)·v^H
    for (int64_t j = k; j < order; ++j) {
      State product{};
      for (int64_t i = k + 1; i < order; ++i) product += conj(reflector[i]) * A[i * order + j];
      product = scale * product;
      for (int64_t i = k + 1; i < order; ++i) {
        A[i * order + j] = A[i * order + j] - reflector[i] * product;
      }
    }
    for (State* matrix : {A, Q}) {
      for (int64_t i = 0; i < order; ++i) {
        State* row = matrix + i * order;
        State product{};
        for (int64_t j = k + 1; j < order; ++j) product += row[j] * reflector[j];
        product = scale * product;
        for (int64_t j = k + 1; j < order; ++j) row[j] = row[j] - product * conj(reflector[j]);
      }
    }
    for (int64_t i = k + 2; i < order; ++i) A[i * order + k] = State{};
  }
}

/// The number of rows that products process at a time: enough sums to keep the multipliers busy.
constexpr int kRowsAtOnce = 4;

/// sums[r] += Σ rows[r][j]·x[j] over [first, end)
template <int kRows, class State>
SELECTIVE_SCAN_HD void add_products(const State* rows, int64_t pitch, const State* x, int64_t first,
                                    int64_t end, State (&sums)[kRows]) {
  for (int64_t j = first; j < end; ++j) {
    for (int r = 0; r < kRows; ++r) sums[r] = multiply_add(rows[r * pitch + j], x[j], sums[r]);
  }
}

/// result = H·x, where H is zero left of its subdiagonal.
template <class State>
void multiply_hessenberg(int64_t order, const State* H, const State* x, State* result) {
  const auto rows_from = [&]<int kRows>(int64_t i) {
    State sums[kRows];
    const int64_t common = i + kRows - 2 > 0 ? i + kRows - 2 : 0;
    for (int r = 0; r < kRows; ++r) {
      sums[r] = State{};
      for (int64_t j = i + r > 0 ? i + r - 1 : 0; j < common; ++j) {
        sums[r] = multiply_add(H[(i + r) * order + j], x[j], sums[r]);
      }
    }
    add_products(H + i * order, order, x, common, order, sums);
    for (int r = 0; r < kRows; ++r) result[i + r] = sums[r];
  };
  for_each_group<kRowsAtOnce>(order, rows_from);
}

/// result = H^H·x
template <class State>
void multiply_hessenberg_adjoint(int64_t order, const State* H, const State* x, State* result) {
  for (int64_t j = 0; j < order; ++j) result[j] = State{};
  const auto rows_from = [&]<int kRows>(int64_t i) {
    const State* rows = H + i * order;
    const int64_t common = i + kRows - 2 > 0 ? i + kRows - 2 : 0;
    for (int r = 0; r < kRows; ++r) {
      for (int64_t j = i + r > 0 ? i + r - 1 : 0; j < common; ++j) {
        result[j] = multiply_add(conj(rows[r * order + j]), x[i + r], result[j]);
      }
    }
    for (int64_t j = common; j < order; ++j) {
      State sum = result[j];
      for (int r = 0; r < kRows; ++r) {
        sum = multiply_add(conj(rows[r * order + j]), x[i + r], sum);
      }
      result[j] = sum;
    }
  };
  for_each_group<kRowsAtOnce>(order, rows_from);
}

/// The factors of I − s·H from elimination with exchanges of adjacent rows.
template <class State>
class HessenbergFactors {
  using R = real_t<State>;
  using Exchange = decltype(R() > R());

 public:
  SELECTIVE_SCAN_HD HessenbergFactors(Arena& arena, int64_t order)
      : order_(order),
        U_(arena.take<State>(order * order)),
        inverse_(arena.take<State>(order)),
        multiplier_(arena.take<State>(order)),
        exchanged_(arena.take<Exchange>(order)) {}

  /// Forms each row of I − s·H when it is the next to be eliminated. By then the row above it, as
  /// eliminated so far, is in its place in U.
  void factor(const State* H, R s) const {
    const int64_t n = order_;
    for (int64_t j = 0; j < n; ++j) U_[j] = entry(s, H[j], j == 0);
    for (int64_t k = 0; k + 1 < n; ++k) {
      State* above = U_ + k * n;
      State* below = above + n;
      const State* source = H + (k + 1) * n;
      const State first = entry(s, source[k], false);
      const Exchange exchanged = size_of(first) > size_of(above[k]);
      const State pivot = select(exchanged, first, above[k]);
      inverse_[k] = inverse_of(pivot);
      multiplier_[k] = -(select(exchanged, above[k], first) * inverse_[k]);
      exchanged_[k] = exchanged;
      if (any(exchanged)) {
        for (int64_t j = k + 1; j < n; ++j) {
          const State fresh = entry(s, source[j], j == k + 1);
          const State held = above[j];
          above[j] = select(exchanged, fresh, held);
          below[j] = multiply_add(multiplier_[k], above[j], select(exchanged, held, fresh));
        }
      } else {
        for (int64_t j = k + 1; j < n; ++j) {
          const State fresh = entry(s, source[j], j == k + 1);
          below[j] = multiply_add(multiplier_[k], above[j], fresh);
        }
      }
    }
    inverse_[n - 1] = inverse_of(U_[n * n - 1]);
  }

  /// Replaces x by (I − s·H)^-1·x.
  void solve(State* x) const {
    const int64_t n = order_;
    for (int64_t k = 0; k + 1 < n; ++k) {
      const State pivot = select(exchanged_[k], x[k + 1], x[k]);
      const State other = select(exchanged_[k], x[k], x[k + 1]);
      x[k] = pivot;
      x[k + 1] = multiply_add(multiplier_[k], pivot, other);
    }
    const auto rows_from = [&]<int kRows>(int64_t k) {
      const State* rows = U_ + k * n;
      State sums[kRows];
      for (int r = 0; r < kRows; ++r) sums[r] = -x[k + r];
      add_products(rows, n, x, k + kRows, n, sums);
      for (int r = kRows - 1; r >= 0; --r) {
        const State value = -(sums[r] * inverse_[k + r]);
        x[k + r] = value;
        for (int q = 0; q < r; ++q) sums[q] = multiply_add(rows[q * n + k + r], value, sums[q]);
      }
    };
    int64_t k = n;
    for (; k >= kRowsAtOnce; k -= kRowsAtOnce) {
      rows_from.template operator()<kRowsAtOnce>(k - kRowsAtOnce);
    }
    while (k > 0) rows_from.template operator()<1>(--k);
  }

  /// Replaces x by (I − s·H)^-H·x.
  void solve_adjoint(State* x) const {
    const int64_t n = order_;
    const auto rows_from = [&]<int kRows>(int64_t k) {
      const State* rows = U_ + k * n;
      State values[kRows];
      for (int r = 0; r < kRows; ++r) {
        State sum = x[k + r];
        for (int q = 0; q < r; ++q) sum = multiply_add(-conj(rows[q * n + k + r]), values[q], sum);
        values[r] = sum * conj(inverse_[k + r]);
        x[k + r] = values[r];
      }
      for (int64_t j = k + kRows; j < n; ++j) {
        State sum = x[j];
        for (int r = 0; r < kRows; ++r) {
          sum = multiply_add(-conj(rows[r * n + j]), values[r], sum);
        }
        x[j] = sum;
      }
    };
    for_each_group<kRowsAtOnce>(n, rows_from);
    for (int64_t k = n - 2; k >= 0; --k) {
      const State pivot = multiply_add(conj(multiplier_[k]), x[k + 1], x[k]);
      const State other = x[k + 1];
      x[k] = select(exchanged_[k], other, pivot);
      x[k + 1] = select(exchanged_[k], pivot, other);
    }
  }

 private:
  /// Returns an entry of I − s·H. The product is rounded on its own, so that every use rounds
  /// alike.
  static SELECTIVE_SCAN_HD State entry(R s, State h, bool is_diagonal) {
    const State product = kept_apart(s * h);
    return is_diagonal ? constant<State>(1) - product : -product;
  }

  int64_t order_;
  State* U_;           // (row, column); solving uses only entries right of the diagonal
  State* inverse_;     // reciprocals of U's diagonal
  State* multiplier_;  // the factor by which row k is added to the row below
  Exchange* exchanged_;
};

}  // namespace selective_scan::cpu
