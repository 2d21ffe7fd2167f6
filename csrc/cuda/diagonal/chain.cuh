// The chain that a kernel of the diagonal scan works on: a row, or one segment of time of a row if
// rows are few.
#pragma once

#include "../../core/affine_map.h"
#include "../../core/diagonal_step.h"
#include "access.cuh"

namespace selective_scan::cuda::diagonal {

template <class Storage>
constexpr bool kIsKnown = true;
template <>
inline constexpr bool kIsKnown<AnyStorage> = false;

/// How rows are divided among threads and, if they are few, into segments of time.
struct Segmentation {
  bool is_columns;   // time is not the contiguous dimension
  int64_t segments;  // of a row; packed sequences count as segments, undivided
  int64_t steps;     // steps of a segment
};

/// Returns value / divisor. A 64-bit division takes four times as many instructions as a 32-bit
/// one.
__device__ inline int64_t quotient(int64_t value, int64_t divisor) {
  if (divisor == 1) return value;
  if (((value | divisor) >> 32) == 0) {
    return static_cast<uint32_t>(value) / static_cast<uint32_t>(divisor);
  }
  return value / divisor;
}

template <class Step, class Params, class Storage>
class Chain {
  using T = typename Step::Value;
  using Elements = Access<T, Storage>;

 public:
  __device__ Chain(const Params& params, int64_t row, int64_t segment)
      : params_(params),
        row_(row),
        segment_(segment),
        a_(params.a),
        x_(input(params)),
        out_(output(params)),
        da_(gradient(params)),
        previous_(states(params)) {
    int64_t rest = row;
    for (int dim = params.row_dims - 1; dim >= 0; --dim) {
      const int64_t outer = dim == 0 ? 0 : quotient(rest, params.row_sizes[dim]);
      const int64_t index = rest - outer * params.row_sizes[dim];
      const auto move = [&](Cursor& cursor, const DiagonalArray& array) {
        cursor.data += index * array.row[dim] * Elements::bytes(cursor);
      };
      move(a_, params.a);
      move(x_, input(params));
      move(out_, output(params));
      if constexpr (Step::kBackward) {
        move(da_, gradient(params));
        move(previous_, states(params));
      }
      rest = outer;
    }
  }

  /// Returns the state before the first position of the row.
  __device__ T start() const { return Step::kBackward ? T{} : load_initial_state(); }

 protected:
  /// Finds where the chain begins and ends. The row's first tile begins `shift` steps before the
  /// row, and tiles begin at multiples of `items` steps from there.
  __device__ void place(const Segmentation& split, int shift, int items) {
    if (params_.packed.present()) {
      begin_ = params_.packed.begin(segment_);
      end_ = row_end_ = params_.packed.end(segment_);
      origin_ = begin_ - (begin_ + shift) % items;
      return;
    }
    row_end_ = params_.seqlen;
    origin_ = segment_ * split.steps - shift;
    begin_ = origin_ < 0 ? 0 : origin_;
    const int64_t end = origin_ + split.steps;
    end_ = segment_ == split.segments - 1 || end > params_.seqlen ? params_.seqlen : end;
  }

  __device__ bool contains(int64_t position) const { return position >= begin_ && position < end_; }

  /// Returns the composition of the maps of consecutive steps.
  template <int n>
  static __device__ AffineMap<T> map_of(const T (&a)[n], const T (&x)[n]) {
    AffineMap<T> map{Step::factor(a[0]), Step::offset(a[0], x[0])};
#pragma unroll
    for (int i = 1; i < n; ++i) {
      map.product = Step::factor(a[i]) * map.product;
      Step::advance(a[i], x[i], map.offset);
    }
    return map;
  }

  __device__ T load_initial_state() const {
    if (!params_.initial_state.present()) return T{};
    return Access<T, AnyStorage>::load(cursor_of(params_.initial_state), sequence());
  }

  /// Ends a chain of the backward pass; to be called once for each.
  __device__ void finish(T state, T da_sum) const {
    if (params_.sum_da) Access<T, AnyStorage>::store(da_, segment_, da_sum);
    const bool is_last = params_.packed.present() || (end_ == row_end_ && begin_ < end_);
    if (params_.dinitial_state.present() && is_last) {
      Access<T, AnyStorage>::store(cursor_of(params_.dinitial_state), sequence(), state);
    }
  }

  const Params& params_;
  int64_t row_;
  int64_t segment_;
  Cursor a_;
  Cursor x_;         // b or dh
  Cursor out_;       // h or db
  Cursor da_;        // backward only
  Cursor previous_;  // backward only
  int64_t origin_;   // where the first tile begins, possibly before begin_
  int64_t begin_;
  int64_t end_;
  int64_t row_end_;  // the row's end, or the packed sequence's

 private:
  /// Returns the index of the chain's states: its sequence, or 0 if the row is a single sequence.
  __device__ int64_t sequence() const { return params_.packed.present() ? segment_ : 0; }

  /// Returns a cursor to the chain's row of an array without steps.
  __device__ Cursor cursor_of(const DiagonalArray& array) const {
    Cursor cursor(array);
    cursor.data += params_.row_offset(array, row_) * element_size(array.dtype);
    return cursor;
  }

  static __device__ const DiagonalArray& input(const DiagonalForwardParams& p) { return p.b; }
  static __device__ const DiagonalArray& input(const DiagonalBackwardParams& p) { return p.dh; }
  static __device__ const DiagonalArray& output(const DiagonalForwardParams& p) { return p.h; }
  static __device__ const DiagonalArray& output(const DiagonalBackwardParams& p) { return p.db; }
  // The forward pass has neither array; its cursors are never used.
  static __device__ const DiagonalArray& gradient(const DiagonalForwardParams& p) { return p.h; }
  static __device__ const DiagonalArray& gradient(const DiagonalBackwardParams& p) { return p.da; }
  static __device__ const DiagonalArray& states(const DiagonalForwardParams& p) { return p.h; }
  static __device__ const DiagonalArray& states(const DiagonalBackwardParams& p) {
    return p.h_previous;
  }
};

}  // namespace selective_scan::cuda::diagonal
