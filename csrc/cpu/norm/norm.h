// The RMS norm of one task's rows. A row is staged in the compute type, padded with zeros to whole
// vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "../simd/tile.h"
#include "../work.h"
#include "kernels.h"

namespace selective_scan::cpu {

template <class R>
SELECTIVE_SCAN_HD scalar_t<R> sum_of_lanes(R values) {
  scalar_t<R> sum = 0;
  for (int lane = 0; lane < R::kWidth; ++lane) sum += values.lane(lane);
  return sum;
}

/// Returns the factor by which an RMS norm multiplies `count` numbers, given the sum of their
/// squares.
template <class T>
SELECTIVE_SCAN_HD T norm_scale(T squares, int64_t count, double eps) {
  const T mean = squares / static_cast<T>(count);
  return T(1) / __builtin_sqrt(mean + static_cast<T>(eps));
}

template <class R>
class RowNorm {
  using T = typename R::Scalar;
  static constexpr int64_t kWidth = R::kWidth;

  struct Scratch {
    Arena arena;
    T* weight;
    T* total;
    T* other;  // the residual, or dnormed
    T* dtotal;

    SELECTIVE_SCAN_HD Scratch(const NormParams& params, void* base)
        : arena{static_cast<char*>(base)} {
      for (T** row : {&weight, &total, &other, &dtotal}) {
        *row = arena.take<T>(round_up(params.channels, kWidth));
      }
    }
  };

  static Section section(const ArrayView& view, const NormParams& params, int64_t row) {
    return {element_at(view, row * view.batch), view.dtype, 1, params.channels, 0, 1};
  }
  /// Reads a row; that of an absent array has one value everywhere.
  static void load(const ArrayView& view, const NormParams& params, int64_t row, T* values,
                   T if_absent = T(0)) {
    if (view.present()) {
      load_tile<R>(section(view, params, row), values, 0);
    } else {
      for (int64_t i = 0; i < params.channels; i += kWidth) R(if_absent).store(values + i);
    }
  }
  static void store(const ArrayView& view, const NormParams& params, int64_t row, const T* values) {
    if (view.present()) store_tile<R>(section(view, params, row), values, 0);
  }

  static int64_t scratch_bytes(const NormParams& params) {
    return Scratch(params, nullptr).arena.bytes;
  }

  static void forward(const NormForwardParams& params, const NormTask& task, void* scratch_base) {
    const Scratch scratch(params, scratch_base);
    load(params.weight, params, 0, scratch.weight, T(1));
    for (int64_t row = task.first_row; row < task.first_row + task.rows; ++row) {
      load(params.hidden, params, row, scratch.total);
      load(params.residual, params, row, scratch.other);
      R squares(T(0));
      for (int64_t i = 0; i < params.channels; i += kWidth) {
        const R total = R::load(scratch.total + i) + R::load(scratch.other + i);
        total.store(scratch.total + i);
        squares = squares + total * total;
      }
      const R scale(norm_scale(sum_of_lanes(squares), params.channels, params.eps));
      store(params.total, params, row, scratch.total);
      for (int64_t i = 0; i < params.channels; i += kWidth) {
        const R normed = R::load(scratch.total + i) * (scale * R::load(scratch.weight + i));
        normed.store(scratch.total + i);
      }
      store(params.normed, params, row, scratch.total);
    }
  }

  static void backward(const NormBackwardParams& params, const NormTask& task, void* scratch_base,
                       void* part) {
    const Scratch scratch(params, scratch_base);
    load(params.weight, params, 0, scratch.weight);
    T* const dweight = static_cast<T*>(part);
    if (dweight != nullptr) {
      memset(dweight, 0, round_up(params.channels, kWidth) * sizeof(T));
    }
    for (int64_t row = task.first_row; row < task.first_row + task.rows; ++row) {
      load(params.total, params, row, scratch.total);
      load(params.dnormed, params, row, scratch.other);
      load(params.dtotal, params, row, scratch.dtotal);
      R squares(T(0)), products(T(0));
      for (int64_t i = 0; i < params.channels; i += kWidth) {
        const R total = R::load(scratch.total + i);
        squares = squares + total * total;
        products = products + R::load(scratch.other + i) * R::load(scratch.weight + i) * total;
      }
      const T scale_value = norm_scale(sum_of_lanes(squares), params.channels, params.eps);
      const R scale(scale_value);
      const R pull(scale_value * scale_value * scale_value * sum_of_lanes(products) /
                   static_cast<T>(params.channels));
      for (int64_t i = 0; i < params.channels; i += kWidth) {
        const R total = R::load(scratch.total + i), scaled = R::load(scratch.other + i) * scale;
        if (dweight != nullptr) {
          (R::load(dweight + i) + scaled * total).store(dweight + i);
        }
        const R gradient = scaled * R::load(scratch.weight + i) - pull * total;
        (gradient + R::load(scratch.dtotal + i)).store(scratch.dtotal + i);
      }
      store(params.dresidual, params, row, scratch.dtotal);
      store(params.dhidden, params, row, scratch.dtotal);
    }
  }

 public:
  static constexpr NormKernels kernels{&scratch_bytes, &forward, &backward};
};

}  // namespace selective_scan::cpu
