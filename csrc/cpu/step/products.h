// Products of a matrix with a few rows of activations, which take most of a token's time.
//
// With one row of activations each weight is used once, so memory is the bound: weights are read in
// order, a block of several matrix rows at a time, and prefetched one block ahead. With several
// rows of activations a weight is reused from the first-level cache, or from a register.
//
// An output is one sum in one vector, from the first input to the last, whatever else is computed
// with it: its bits depend neither on the other rows nor on the thread that computes it.
#pragma once

#include <cstdint>

#include "../../core/element.h"
#include "../simd/tile.h"
#include "../simd/transpose.h"
#include "../simd/vector.h"

namespace selective_scan::cpu {

/// Rows of activations, `pitch` apart.
template <class T>
struct Activations {
  T* data = nullptr;
  int64_t pitch = 0;

  SELECTIVE_SCAN_HD T* row(int64_t index) const { return data + index * pitch; }
};

/// A contiguous matrix (output, input), and the bias that is added to its products.
struct Matrix {
  const void* weights = nullptr;
  DType dtype = DType::kFloat32;
  int64_t inputs = 0;
  const void* bias = nullptr;  // (output), optional
  DType bias_dtype = DType::kFloat32;
};

template <class R>
class Product {
  using T = typename R::Scalar;
  static constexpr int kWidth = R::kWidth;

 public:
  Matrix matrix;
  Activations<const T> in;
  Activations<T> out;
  int64_t rows = 0;
  bool adds = false;  // to the contents of `out`

  /// Computes outputs [first, first + count) into the columns of `out` from `column` on.
  void run(int64_t first, int64_t count, int64_t column) const {
    visit_dtype(matrix.dtype, [&](auto* element) {
      using Element = std::remove_pointer_t<decltype(element)>;
      // With an fp64 matrix all arithmetic is fp64.
      if constexpr (sizeof(Element) <= sizeof(T)) {
        for (int64_t done = 0; done < count; done += kWidth) {
          const Group<Element> group(*this, first + done, count - done, column + done);
          int64_t row = 0;
          for (; row + 4 <= rows; row += 4) group.template run<4>(row);
          for (; row + 2 <= rows; row += 2) group.template run<2>(row);
          for (; row < rows; ++row) group.template run<1>(row);
        }
      }
    });
  }

 private:
  /// As many outputs as a vector has lanes, or the remaining ones.
  template <class Element>
  class Group {
    using Convert = Converter<R, Element>;

   public:
    Group(const Product& product, int64_t first, int64_t left, int64_t column)
        : product_(product),
          inputs_(product.matrix.inputs),
          weights_(static_cast<const Element*>(product.matrix.weights) + first * inputs_),
          outputs_(left < kWidth ? left : kWidth),
          is_last_(left <= kWidth),
          column_(column),
          bias_(T(0)) {
      const Matrix& matrix = product.matrix;
      if (!matrix.bias) return;
      visit_dtype(matrix.bias_dtype, [&](auto* element) {
        using BiasElement = std::remove_pointer_t<decltype(element)>;
        bias_ = Converter<R, BiasElement>::load_part(
            static_cast<const BiasElement*>(matrix.bias) + first, outputs_);
      });
    }

    template <int kRows>
    void run(int64_t row) const {
      R sums[kRows][kWidth];
      constexpr int kOutputs = kOutputsAtOnce<kRows>;
      for (int output = 0; output < kWidth; output += kOutputs) {
        if (output < outputs_) {
          add_products<kRows, kOutputs>(row, output, sums);
        } else {
          for (int i = 0; i < kRows; ++i) {
            for (int j = 0; j < kOutputs; ++j) sums[i][output + j] = R(T(0));
          }
        }
      }
      for (int i = 0; i < kRows; ++i) finish(row + i, sum_of_each(sums[i]));
    }

   private:
    /// The number of sums in registers, next to a vector of weights per sum or one of activations.
    static constexpr int kSums = R::kBytes == 64 ? 16 : 8;
    template <int kRows>
    static constexpr int kOutputsAtOnce = [] {
      const int most = kSums / kRows < 8 ? kSums / kRows : 8;
      return most < kWidth ? most : kWidth;
    }();
    /// The number of vectors of a weight row in a cache line.
    static constexpr int kVectorsAtOnce = [] {
      constexpr int kBytes = kWidth * static_cast<int>(sizeof(Element));
      return kBytes < 64 ? 64 / kBytes : 1;
    }();

    template <int kRows, int kOutputs>
    SELECTIVE_SCAN_HD void add_products(int64_t row, int output, R (*sums)[kWidth]) const {
      // Outputs past the last one use the last one's weights.
      const Element* weights[kOutputs];
      for (int j = 0; j < kOutputs; ++j) {
        const int64_t which = output + j < outputs_ ? output + j : outputs_ - 1;
        weights[j] = weights_ + which * inputs_;
      }
      const T* in[kRows];
      for (int i = 0; i < kRows; ++i) in[i] = product_.in.row(row + i);
      const bool has_next = row == 0 && (output + kOutputs < outputs_ || !is_last_);
      const int64_t ahead = has_next ? kOutputs * inputs_ * int64_t{sizeof(Element)} : 0;

      R sum[kRows][kOutputs];
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kOutputs; ++j) sum[i][j] = R(T(0));
      }
      const auto add = [&](const auto& load_weights, const auto& load_in) {
        R x[kRows];
        for (int i = 0; i < kRows; ++i) x[i] = load_in(in[i]);
        for (int j = 0; j < kOutputs; ++j) {
          const R w = load_weights(weights[j]);
          for (int i = 0; i < kRows; ++i) sum[i][j] = multiply_add(w, x[i], sum[i][j]);
        }
      };
      const auto add_vector = [&](int64_t input) {
        add([&](const Element* w) { return Convert::load(w + input); },
            [&](const T* x) { return R::load(x + input); });
      };
      constexpr int64_t kStep = kVectorsAtOnce * kWidth;
      int64_t input = 0;
      for (; input + kStep <= inputs_; input += kStep) {
        for (int j = 0; j < kOutputs; ++j) prefetch(weights[j] + input, ahead);
        for (int vector = 0; vector < kVectorsAtOnce; ++vector) {
          add_vector(input + vector * kWidth);
        }
      }
      for (; input + kWidth <= inputs_; input += kWidth) add_vector(input);
      if (const int64_t left = inputs_ - input; left > 0) {
        add([&](const Element* w) { return Convert::load_part(w + input, left); },
            [&](const T* x) { return Converter<R, T>::load_part(x + input, left); });
      }
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kOutputs; ++j) sums[i][output + j] = sum[i][j];
      }
    }

    void finish(int64_t row, R sum) const {
      T* target = product_.out.row(row) + column_;
      sum = sum + bias_;
      if (product_.adds) sum = Converter<R, T>::load_part(target, outputs_) + sum;
      Converter<R, T>::store_part(sum, target, outputs_);
    }

    const Product& product_;
    const int64_t inputs_;
    const Element* const weights_;
    const int64_t outputs_;
    const bool is_last_;
    const int64_t column_;
    R bias_;
  };
};

}  // namespace selective_scan::cpu
