// Linear algebra of one warp with one Hessenberg matrix.
//
// Vectors are distributed over the lanes: a lane has the entries n = lane + 32·i. Matrices are
// (row, column) in shared memory with rows an odd number of values apart, so that lanes along rows
// and lanes along columns both access different banks.
#pragma once

#include "../kit/elements.cuh"
#include "../kit/math.cuh"
#include "../kit/shuffle.cuh"

namespace selective_scan::cuda::matrix {

template <class R>
__device__ R size_of(R a) {
  return a < R(0) ? -a : a;
}
template <class R>
__device__ R size_of(Complex<R> a) {
  return size_of(a.re) + size_of(a.im);
}

/// Returns 1/a, even if |a|² is out of range.
template <class R>
__device__ R inverse_of(R a) {
  return reciprocal(a);
}
template <class R>
__device__ Complex<R> inverse_of(Complex<R> a) {
  const R scale = reciprocal(size_of(a));
  return scale * reciprocal(scale * a);
}

__device__ inline int lane_index() {
  return static_cast<int>(threadIdx.x) % kWarpSize;
}

/// One lane's entries of a vector.
template <class T, int kOwn>
struct Entries {
  T v[kOwn];

  /// Returns entry n, to all lanes.
  __device__ T at(int n) const {
    T value = v[0];
    if constexpr (kOwn == 2) value = n < kWarpSize ? v[0] : v[1];
    return shuffle(value, n % kWarpSize);
  }
  __device__ void set(int n, T value) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (lane_index() + i * kWarpSize == n) v[i] = value;
    }
  }
};

/// Returns start + distance·direction.
template <class T, int kOwn>
__device__ Entries<T, kOwn> moved(const Entries<T, kOwn>& start, real_t<T> distance,
                                  const Entries<T, kOwn>& direction) {
  Entries<T, kOwn> result;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) result.v[i] = start.v[i] + distance * direction.v[i];
  return result;
}
template <class T, int kOwn>
__device__ Entries<T, kOwn> difference(const Entries<T, kOwn>& a, const Entries<T, kOwn>& b) {
  Entries<T, kOwn> result;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) result.v[i] = a.v[i] - b.v[i];
  return result;
}

SELECTIVE_SCAN_HD int pitch_of(int order) {
  return order | 1;
}
SELECTIVE_SCAN_HD int matrix_values(int order) {
  return order * pitch_of(order);
}

/// Calls visit(i, n) for this lane's entries n = lane + 32·i that exist.
template <int kOwn, class Visit>
__device__ void for_own(int order, const Visit& visit) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int n = lane_index() + i * kWarpSize;
    if (n < order) visit(i, n);
  }
}

/// Calls visit(i, lane, n) for the entries n = lane + 32·i with first <= n < end. All lanes visit
/// all of them. Once the loops are unrolled, i is a constant.
template <int kOwn, class Visit>
__device__ void for_all(int first, int end, const Visit& visit) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int begin = i * kWarpSize;
    const int stop = i + 1 < kOwn && end > begin + kWarpSize ? begin + kWarpSize : end;
#pragma unroll 4
    for (int n = first > begin ? first : begin; n < stop; ++n) visit(i, n - begin, n);
  }
}
/// Does the same from the last entry to the first.
template <int kOwn, class Visit>
__device__ void for_all_reversed(int first, int end, const Visit& visit) {
#pragma unroll
  for (int i = kOwn - 1; i >= 0; --i) {
    const int begin = i * kWarpSize;
    const int stop = first > begin ? first : begin;
    const int start = i + 1 < kOwn && end > begin + kWarpSize ? begin + kWarpSize : end;
#pragma unroll 4
    for (int n = start - 1; n >= stop; --n) visit(i, n - begin, n);
  }
}

/// How a row was eliminated: it was exchanged with the row below if `exchanged`, then the upper row
/// was added to the lower one `multiplier` times.
template <class T>
struct alignas(2 * sizeof(real_t<T>)) Elimination {
  T multiplier;
  int exchanged;
};

/// The factors of I − s·H. The eliminations turn it into D·U, with a diagonal D and a U that has
/// ones on its diagonal.
template <class T>
struct Factors {
  T* U;                          // (row, column), only right of the diagonal
  T* inverse;                    // inverse of D
  Elimination<T>* eliminations;  // one per row, without the last
};

/// A step through the midpoint: middle = start + rise/2 and after = start + rise, with rise =
/// Δ·H·middle + input. `product` is H·middle.
template <class T, int kOwn>
struct MidpointStep {
  Entries<T, kOwn> middle;
  Entries<T, kOwn> product;
  Entries<T, kOwn> after;
};

template <class T, int kOwn>
class System {
  using R = real_t<T>;
  using Vector = Entries<T, kOwn>;

 public:
  /// Takes a matrix in shared memory, which the block may fill later.
  __device__ System(int order, T* H) : order_(order), pitch_(pitch_of(order)), H_(H) {}

  /// Factors I − s·H by elimination with exchanges of neighboring rows. All lanes decide alike on
  /// each exchange.
  __device__ void factor(R s, const Factors<T>& factors) const {
    Vector above = row_of_system(s, 0);
    for_all<kOwn>(0, order_ - 1, [&](int part, int lane, int k) {
      const Vector below = row_of_system(s, k + 1);
      const T first_above = shuffle(above.v[part], lane);
      const T first_below = -(s * H_[(k + 1) * pitch_ + k]);
      const bool exchanged = size_of(first_below) > size_of(first_above);
      const T inverse = inverse_of(exchanged ? first_below : first_above);
      const T multiplier = -((exchanged ? first_above : first_below) * inverse);
#pragma unroll
      for (int i = part; i < kOwn; ++i) {
        const int n = own_or_none(i);
        const T pivot = exchanged ? below.v[i] : above.v[i];
        const T other = exchanged ? above.v[i] : below.v[i];
        if (n > (i == part ? k : -1)) factors.U[k * pitch_ + n] = pivot * inverse;
        above.v[i] = multiply_add(multiplier, pivot, other);
      }
      if (lane_index() == 0) {
        factors.eliminations[k] = {multiplier, exchanged};
        factors.inverse[k] = inverse;
      }
    });
    const T inverse = inverse_of(above.at(order_ - 1));
    if (lane_index() == 0) factors.inverse[order_ - 1] = inverse;
  }

  /// Takes a step of the recurrence. Elimination makes the same error in every step of the same Δ,
  /// so that errors would add up; the residual of its solution corrects them.
  __device__ MidpointStep<T, kOwn> step(R delta, const Vector& start, const Vector& input,
                                        const Factors<T>& factors) const {
    return midpoint_step(
        delta, start, input, [&](int row, int column) { return H_[row * pitch_ + column]; },
        [&](Vector& x) { solve(factors, x); });
  }
  /// Takes the same step with H^H and without an input.
  __device__ MidpointStep<T, kOwn> adjoint_step(R delta, const Vector& start,
                                                const Factors<T>& factors) const {
    return midpoint_step(
        delta, start, Vector{},
        [&](int row, int column) { return conj(H_[column * pitch_ + row]); },
        [&](Vector& x) { solve_adjoint(factors, x); });
  }

 private:
  /// Solves (I − Δ/2·H)·middle = start + input/2. The residual of the solution, r = start − middle
  /// + rise/2, then gives the correction c of `middle`. That of the rise, Δ·H·c, is 2·(c − r).
  template <class Entry, class Solve>
  __device__ MidpointStep<T, kOwn> midpoint_step(R delta, const Vector& start, const Vector& input,
                                                 const Entry& entry, const Solve& solve) const {
    MidpointStep<T, kOwn> step;
    step.middle = moved(start, R(0.5), input);
    solve(step.middle);
    step.product = product(entry, step.middle);
    const Vector rise = moved(input, delta, step.product);
    const Vector residual = moved(difference(start, step.middle), R(0.5), rise);
    Vector correction = residual;
    solve(correction);
    step.middle = moved(step.middle, R(1), correction);
    step.after = moved(moved(start, R(1), rise), R(2), difference(correction, residual));
    return step;
  }

  /// Returns the product of x with the matrix of entry(row, column).
  template <class Entry>
  __device__ Vector product(const Entry& entry, const Vector& x) const {
    Vector result{};
    for_all<kOwn>(0, order_, [&](int part, int lane, int j) {
      const T value = shuffle(x.v[part], lane);
      for_own<kOwn>(order_, [&](int i, int n) {
        result.v[i] = multiply_add(entry(n, j), value, result.v[i]);
      });
    });
    return result;
  }

  /// Replaces x by (I − s·H)^-1·x.
  __device__ void solve(const Factors<T>& factors, Vector& x) const {
    Vector pivots;
    T current = shuffle(x.v[0], 0);
    for_all<kOwn>(1, order_, [&](int part, int lane, int k) {
      const T next = shuffle(x.v[part], lane);
      const Elimination<T> elimination = factors.eliminations[k - 1];
      const T pivot = elimination.exchanged ? next : current;
      pivots.set(k - 1, pivot);
      current = multiply_add(elimination.multiplier, pivot, elimination.exchanged ? current : next);
    });
    pivots.set(order_ - 1, current);
    for_own<kOwn>(order_, [&](int i, int n) { x.v[i] = pivots.v[i] * factors.inverse[n]; });
    for_all_reversed<kOwn>(1, order_, [&](int part, int lane, int k) {
      const T value = shuffle(x.v[part], lane);
#pragma unroll
      for (int i = 0; i <= part; ++i) {
        const int n = lane_index() + i * kWarpSize;
        if (i < part || n < k) {
          x.v[i] = multiply_add(-factors.U[n * pitch_ + k], value, x.v[i]);
        }
      }
    });
  }

  /// Replaces x by (I − s·H)^-H·x.
  __device__ void solve_adjoint(const Factors<T>& factors, Vector& x) const {
    for_all<kOwn>(0, order_ - 1, [&](int part, int lane, int k) {
      const T value = shuffle(x.v[part], lane);
#pragma unroll
      for (int i = part; i < kOwn; ++i) {
        const int n = own_or_none(i);
        if (n > (i == part ? k : -1)) {
          x.v[i] = multiply_add(-conj(factors.U[k * pitch_ + n]), value, x.v[i]);
        }
      }
    });
    for_own<kOwn>(order_, [&](int i, int n) { x.v[i] = x.v[i] * conj(factors.inverse[n]); });
    Vector result{};
    T current = x.at(order_ - 1);
    for_all_reversed<kOwn>(0, order_ - 1, [&](int part, int lane, int k) {
      const Elimination<T> elimination = factors.eliminations[k];
      const T own = shuffle(x.v[part], lane);
      const T sum = multiply_add(conj(elimination.multiplier), current, own);
      result.set(k + 1, elimination.exchanged ? sum : current);
      current = elimination.exchanged ? current : sum;
    });
    result.set(0, current);
    x = result;
  }

  __device__ Vector row_of_system(R s, int row) const {
    Vector entries{};
    for_own<kOwn>(order_, [&](int i, int n) {
      const T product = s * H_[row * pitch_ + n];
      entries.v[i] = n == row ? R(1) - product : -product;
    });
    return entries;
  }

  /// Returns the index of an entry, or −1 if this lane does not have it.
  __device__ int own_or_none(int i) const {
    const int n = lane_index() + i * kWarpSize;
    return n < order_ ? n : -1;
  }

  int order_;
  int pitch_;
  T* H_;
};

template <class T, int kOwn>
__device__ Entries<T, kOwn> conjugate(Entries<T, kOwn> x) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) x.v[i] = conj(x.v[i]);
  return x;
}

/// Returns Re(Σ conj(a)·b).
template <class T, int kOwn>
__device__ real_t<T> real_inner_product(const Entries<T, kOwn>& a, const Entries<T, kOwn>& b) {
  real_t<T> sum = real_of_product_conj(a.v[0], b.v[0]);
  if constexpr (kOwn == 2) sum += real_of_product_conj(a.v[1], b.v[1]);
  return sum_over_lanes(sum);
}

/// Returns Re(Σ a·b).
template <class T, int kOwn>
__device__ real_t<T> real_product(const Entries<T, kOwn>& a, const Entries<T, kOwn>& b) {
  return real_inner_product(conjugate(a), b);
}

}  // namespace selective_scan::cuda::matrix
