// Linear algebra of one warp with one Hessenberg matrix.
//
// Vectors are spread over the lanes: a lane has the entries n = lane + 32·i. Matrices are (row,
// column) in shared memory, rows an odd number of values apart, so that lanes along rows and along
// columns both meet different banks.
#pragma once

#include "../kit/elements.cuh"
#include "../kit/launch_tools.h"
#include "../kit/math.cuh"
#include "../kit/shuffle.cuh"
#include "../launch.h"
#include "workspace.h"

namespace selective_scan::cuda::matrix {

template <class R>
__device__ R size_of(R a) {
  return a < R(0) ? -a : a;
}
template <class R>
__device__ R size_of(Complex<R> a) {
  return size_of(a.re) + size_of(a.im);
}

/// 1/a, also where |a|² is out of range.
template <class R>
__device__ R inverse_of(R a) {
  return R(1) / a;
}
template <class R>
__device__ Complex<R> inverse_of(Complex<R> a) {
  const R scale = R(1) / size_of(a);
  const Complex<R> b = scale * a;
  return (scale / norm(b)) * conj(b);
}

template <class T>
__device__ T sum_over_warp(T value) {
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
    value += shuffle_xor<kWarpSize>(value, mask);
  }
  return value;
}

/// A vector: what one lane has of it.
template <class T, int kOwn>
struct Entries {
  T v[kOwn];

  /// Entry n, for all lanes.
  __device__ T at(int n) const {
    T value = v[0];
    if constexpr (kOwn == 2) value = n < kWarpSize ? v[0] : v[1];
    return shuffle<kWarpSize>(value, n % kWarpSize);
  }
  __device__ void set(int n, T value) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (threadIdx.x + i * kWarpSize == n) v[i] = value;
    }
  }
};

SELECTIVE_SCAN_HD int pitch_of(int order) {
  return order | 1;
}
SELECTIVE_SCAN_HD int matrix_values(int order) {
  return order * pitch_of(order);
}

/// Calls visit(i, n) for the entries n = lane + 32·i that are there.
template <int kOwn, class Visit>
__device__ void for_own(int order, const Visit& visit) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int n = threadIdx.x + i * kWarpSize;
    if (n < order) visit(i, n);
  }
}

template <class T, int kOwn>
class System {
  using R = real_t<T>;
  using Vector = Entries<T, kOwn>;

 public:
  /// Copies H from a dense matrix. Both are of matrix_values().
  __device__ System(int order, const T* source, T* H, T* U)
      : order_(order), pitch_(pitch_of(order)), H_(H), U_(U) {
    for (int row = 0; row < order; ++row) {
      for_own<kOwn>(order, [&](int, int n) { H_[row * pitch_ + n] = source[row * order + n]; });
    }
    __syncwarp();
  }

  /// H·x + addend
  __device__ Vector product(const Vector& x, const Vector& addend) const {
    Vector result = addend;
    for (int j = 0; j < order_; ++j) {
      const T value = x.at(j);
      for_own<kOwn>(order_, [&](int i, int n) {
        result.v[i] = multiply_add(H_[n * pitch_ + j], value, result.v[i]);
      });
    }
    return result;
  }
  /// H^H·x
  __device__ Vector adjoint_product(const Vector& x) const {
    Vector result{};
    for (int row = 0; row < order_; ++row) {
      const T value = x.at(row);
      for_own<kOwn>(order_, [&](int i, int n) {
        result.v[i] = multiply_add(conj(H_[row * pitch_ + n]), value, result.v[i]);
      });
    }
    return result;
  }

  /// I − s·H by elimination with exchanges of neighbouring rows. All lanes agree on each.
  __device__ void factor(R s) {
    __syncwarp();
    Vector above = row_of_system(s, 0);
    for (int k = 0; k + 1 < order_; ++k) {
      const Vector below = row_of_system(s, k + 1);
      const T first_above = above.at(k), first_below = below.at(k);
      const bool exchanged = size_of(first_below) > size_of(first_above);
      const T inverse = inverse_of(exchanged ? first_below : first_above);
      const T multiplier = -((exchanged ? first_above : first_below) * inverse);
      for_own<kOwn>(order_, [&](int i, int n) {
        const T pivot = exchanged ? below.v[i] : above.v[i];
        const T other = exchanged ? above.v[i] : below.v[i];
        U_[k * pitch_ + n] = pivot;
        above.v[i] = multiply_add(multiplier, pivot, other);
      });
      inverse_.set(k, inverse);
      multiplier_.set(k, multiplier);
      exchanged_.set(k, exchanged);
    }
    inverse_.set(order_ - 1, inverse_of(above.at(order_ - 1)));
    __syncwarp();
  }

  /// x becomes (I − s·H)^-1·x.
  __device__ void solve(Vector& x) const {
    T current = x.at(0);
    for (int k = 0; k + 1 < order_; ++k) {
      const T next = x.at(k + 1);
      const bool exchanged = exchanged_.at(k);
      const T pivot = exchanged ? next : current;
      x.set(k, pivot);
      current = multiply_add(multiplier_.at(k), pivot, exchanged ? current : next);
    }
    x.set(order_ - 1, current);
    for (int k = order_ - 1; k >= 0; --k) {
      const T value = x.at(k) * inverse_.at(k);
      x.set(k, value);
      for_own<kOwn>(
          k, [&](int i, int n) { x.v[i] = multiply_add(-U_[n * pitch_ + k], value, x.v[i]); });
    }
  }

  /// x becomes (I − s·H)^-H·x.
  __device__ void solve_adjoint(Vector& x) const {
    for (int k = 0; k < order_; ++k) {
      const T value = x.at(k) * conj(inverse_.at(k));
      x.set(k, value);
      for_own<kOwn>(order_, [&](int i, int n) {
        if (n > k) x.v[i] = multiply_add(-conj(U_[k * pitch_ + n]), value, x.v[i]);
      });
    }
    T current = x.at(order_ - 1);
    for (int k = order_ - 2; k >= 0; --k) {
      const T sum = multiply_add(conj(multiplier_.at(k)), current, x.at(k));
      const bool exchanged = exchanged_.at(k);
      x.set(k + 1, exchanged ? sum : current);
      current = exchanged ? current : sum;
    }
    x.set(0, current);
  }

  /// A step from `before` (csrc/cpu/matrix/basis.h says why it is solved twice): the slope at the
  /// midpoint, of which after = before + Δ·slope.
  __device__ Vector slope(R delta, const Vector& before, const Vector& input) {
    const R half = R(0.5) * delta;
    factor(half);
    Vector slope = product(before, input);
    solve(slope);
    Vector residual = product(moved(before, half, slope), input);
    subtract(residual, slope);
    solve(residual);
    return moved(slope, R(1), residual);
  }
  /// Likewise with H^H.
  __device__ Vector adjoint_slope(R delta, const Vector& g) {
    const R half = R(0.5) * delta;
    factor(half);
    Vector slope = adjoint_product(g);
    solve_adjoint(slope);
    Vector residual = adjoint_product(moved(g, half, slope));
    subtract(residual, slope);
    solve_adjoint(residual);
    return moved(slope, R(1), residual);
  }

  /// start + distance·direction
  static __device__ Vector moved(const Vector& start, R distance, const Vector& direction) {
    Vector result;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) result.v[i] = start.v[i] + distance * direction.v[i];
    return result;
  }

 private:
  static __device__ void subtract(Vector& a, const Vector& b) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) a.v[i] = a.v[i] - b.v[i];
  }

  __device__ Vector row_of_system(R s, int row) const {
    Vector entries{};
    for_own<kOwn>(order_, [&](int i, int n) {
      const T product = s * H_[row * pitch_ + n];
      entries.v[i] = n == row ? R(1) - product : -product;
    });
    return entries;
  }

  int order_;
  int pitch_;
  T* H_;
  T* U_;                 // right of the diagonal alone
  Vector inverse_{};     // of U's diagonal
  Vector multiplier_{};  // of row k that is added to the one below
  Entries<int, kOwn> exchanged_{};
};

/// A channel of a batch entry, and the basis of the channel: A = Q·H·Q^H.
template <class T, int kOwn>
struct Row {
  using R = real_t<T>;
  using Vector = Entries<T, kOwn>;

  int order;
  int64_t batch;
  int64_t channel;
  int64_t group;
  const T* H;
  const T* Q;
  const T* Q_transposed;

  __device__ Row(const ScanParams& params, const Workspace& workspace, int64_t index)
      : order(static_cast<int>(params.dstate)),
        batch(index / params.dim),
        channel(index % params.dim),
        group(channel / (params.dim / params.groups)),
        H(static_cast<const T*>(workspace.bases) + 3 * channel * order * order),
        Q(H + order * order),
        Q_transposed(Q + order * order) {}

  __device__ int64_t offset(const ArrayView& view) const {
    return batch * view.batch + channel * view.channel;
  }
  __device__ Vector load(const ArrayView& view, int64_t offset) const {
    Vector x{};
    for_own<kOwn>(order,
                  [&](int i, int n) { x.v[i] = load_component<T>(view, offset + n * view.state); });
    return x;
  }
  __device__ void store(const ArrayView& view, int64_t offset, const Vector& x) const {
    for_own<kOwn>(order,
                  [&](int i, int n) { store_component(view, offset + n * view.state, x.v[i]); });
  }
  /// B or C at a step, out of the basis.
  __device__ Vector projection(const ArrayView& view, bool is_variable, int64_t step) const {
    return load(view, is_variable ? batch * view.batch + group * view.group + step * view.step
                                  : channel * view.channel);
  }

  /// Q·x
  __device__ Vector by_Q(const Vector& x) const {
    return sum_of_rows(Q_transposed, x, [](T entry) { return entry; });
  }
  /// Q^H·x and Q^T·x
  __device__ Vector by_adjoint_Q(const Vector& x) const {
    return sum_of_rows(Q, x, [](T entry) { return conj(entry); });
  }
  __device__ Vector by_transposed_Q(const Vector& x) const {
    return sum_of_rows(Q, x, [](T entry) { return entry; });
  }

  /// A state in the basis; as it is where there are no steps.
  __device__ Vector load_state(const ScanParams& params, const ArrayView& view) const {
    const Vector x = load(view, offset(view));
    return params.seqlen > 0 ? by_adjoint_Q(x) : x;
  }
  __device__ void store_state(const ScanParams& params, const ArrayView& view,
                              const Vector& x) const {
    store(view, offset(view), params.seqlen > 0 ? by_Q(x) : x);
  }
  /// Saved states, of the boundary behind `chunk`.
  __device__ T* saved(const ScanParams& params, int64_t chunk) const {
    const int64_t index = (batch * num_saved_states(params.seqlen) + chunk) * params.dim + channel;
    return static_cast<T*>(params.states) + index * order;
  }
  __device__ Vector load_values(const T* values) const {
    Vector x{};
    for_own<kOwn>(order, [&](int i, int n) { x.v[i] = values[n]; });
    return x;
  }
  __device__ void store_values(T* values, const Vector& x) const {
    for_own<kOwn>(order, [&](int i, int n) { values[n] = x.v[i]; });
  }

 private:
  template <class Form>
  __device__ Vector sum_of_rows(const T* matrix, const Vector& x, const Form& form) const {
    Vector result{};
    for (int k = 0; k < order; ++k) {
      const T value = x.at(k);
      for_own<kOwn>(order, [&](int i, int n) {
        result.v[i] = multiply_add(form(matrix[k * order + n]), value, result.v[i]);
      });
    }
    return result;
  }
};

template <class T, int kOwn>
__device__ Entries<T, kOwn> conjugate(Entries<T, kOwn> x) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) x.v[i] = conj(x.v[i]);
  return x;
}

/// Re(Σ a·b)
template <class T, int kOwn>
__device__ real_t<T> real_product(const Entries<T, kOwn>& a, const Entries<T, kOwn>& b) {
  real_t<T> sum = real_of_product_conj(a.v[0], conj(b.v[0]));
  if constexpr (kOwn == 2) sum += real_of_product_conj(a.v[1], conj(b.v[1]));
  return sum_over_warp(sum);
}
/// Re(Σ conj(a)·b)
template <class T, int kOwn>
__device__ real_t<T> real_inner_product(const Entries<T, kOwn>& a, const Entries<T, kOwn>& b) {
  real_t<T> sum = real_of_product_conj(a.v[0], b.v[0]);
  if constexpr (kOwn == 2) sum += real_of_product_conj(a.v[1], b.v[1]);
  return sum_over_warp(sum);
}

/// A sequence's element of this lane in a chunk that starts with step `first`, of the compute type;
/// 0 beyond the end.
template <class R>
__device__ R load_step(const ArrayView& view, int64_t offset, int64_t first, int64_t seqlen) {
  const int64_t step = first + threadIdx.x;
  return step < seqlen ? load_component<R>(view, offset + step * view.step) : R(0);
}
template <class R>
__device__ void store_step(const ArrayView& view, int64_t offset, int64_t first, int64_t seqlen,
                           R value) {
  const int64_t step = first + threadIdx.x;
  if (step < seqlen) store_component(view, offset + step * view.step, value);
}

/// What y = Σ C·h is multiplied by.
template <class T>
constexpr double kOutputScale = is_complex_v<T> ? 2 : 1;

/// Calls visit with a null pointer of the compute type and the entries of a lane as a constant.
template <class Visit>
cudaError_t with_types(const ScanParams& params, const Visit& visit) {
  if (params.dstate > kMaxMatrixDstate) return cudaErrorInvalidValue;
  const auto with_own = [&](auto* type) {
    return params.dstate <= kWarpSize ? visit(type, std::integral_constant<int, 1>())
                                      : visit(type, std::integral_constant<int, 2>());
  };
  if (params.is_double) {
    return params.is_complex ? with_own(static_cast<Complex<double>*>(nullptr))
                             : with_own(static_cast<double*>(nullptr));
  }
  return params.is_complex ? with_own(static_cast<Complex<float>*>(nullptr))
                           : with_own(static_cast<float*>(nullptr));
}

}  // namespace selective_scan::cuda::matrix
