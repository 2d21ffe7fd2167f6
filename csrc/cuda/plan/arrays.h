// Properties of arrays that plans depend on.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <limits>

#include "../../core/params.h"

namespace selective_scan::cuda {

/// Rows of up to this many steps may be staged in shared memory as a whole.
constexpr int64_t kMostDenseSteps = 256;

/// The (batch, channel, step) arrays of a pass.
inline std::array<const ArrayView*, 5> rows_of(const ForwardParams& params) {
  return {&params.u, &params.delta, &params.z, &params.out, &params.input_delta};
}
inline std::array<const ArrayView*, 9> rows_of(const BackwardParams& params) {
  return {&params.u,      &params.delta, &params.z,           &params.dout,        &params.du,
          &params.ddelta, &params.dz,    &params.input_delta, &params.dinput_delta};
}

/// Returns whether `holds` is true for all present arrays.
template <class Rows, class Holds>
bool all_of(const Rows& rows, const Holds& holds) {
  return std::all_of(rows.begin(), rows.end(),
                     [&](const ArrayView* view) { return !view->present() || holds(*view); });
}

/// Returns whether all present arrays have the element type of u.
template <class Rows>
bool have_one_dtype(const ScanParams& params, const Rows& rows) {
  return all_of(rows, [&](const ArrayView& view) { return view.dtype == params.u.dtype; });
}

/// Returns whether all vectors along steps, or along channels, begin at multiples of `bytes`,
/// provided that the one at address `lowest` does. Strides of dimensions of size 1 do not matter,
/// except that of steps along channels: lanes also form the addresses of steps that do not exist.
inline bool is_aligned(const ScanParams& params, const ArrayView& view, uintptr_t lowest,
                       int64_t bytes, bool along_steps) {
  const int64_t size = element_size(view.dtype);
  const auto aligned = [&](int64_t count, int64_t stride) {
    return count == 1 || stride * size % bytes == 0;
  };
  return lowest % static_cast<uintptr_t>(bytes) == 0 && aligned(params.batch, view.batch) &&
         aligned(params.groups, view.group) && aligned(params.dstate, view.state) &&
         (along_steps ? aligned(params.dim, view.channel) : view.step * size % bytes == 0);
}

/// Returns whether any `items` consecutive steps form one aligned vector, or several of 16 bytes.
/// False for packed sequences, which may begin anywhere.
inline bool has_step_vectors(const ScanParams& params, const ArrayView& view, int64_t items) {
  const int64_t size = element_size(view.dtype);
  if (params.packed.present()) return false;
  if ((view.step != 1 && view.step != -1) || params.seqlen % items != 0) return false;
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  const uintptr_t lowest =
      view.step < 0 ? address - static_cast<uintptr_t>((items - 1) * size) : address;
  return is_aligned(params, view, lowest, std::min<int64_t>(items * size, 16), true);
}

/// Returns the same for `items` consecutive channels of a group.
inline bool has_channel_vectors(const ScanParams& params, const ArrayView& view, int64_t items) {
  return view.channel == 1 && view.step != -1 && params.dim / params.groups % items == 0 &&
         is_aligned(params, view, reinterpret_cast<uintptr_t>(view.data),
                    std::min<int64_t>(items * element_size(view.dtype), 16), false);
}

/// Returns whether the rows of a group are contiguous, in either direction of time, and any 8 of
/// them form a block of memory that is aligned to 16 bytes.
template <class Rows>
bool are_dense(const ScanParams& params, const Rows& rows) {
  const int64_t size = element_size(params.u.dtype);
  return size == 2 && params.dim / params.groups % 8 == 0 &&
         all_of(rows, [&](const ArrayView& view) {
           const int64_t lowest = view.step < 0 ? (params.seqlen - 1) * size : 0;
           return std::abs(view.step) == 1 && view.channel == params.seqlen &&
                  (reinterpret_cast<uintptr_t>(view.data) - static_cast<uintptr_t>(lowest)) % 16 ==
                      0 &&
                  (params.batch == 1 || view.batch * size % 16 == 0);
         });
}

struct Extent {
  int64_t count;
  int64_t stride;
};

/// Returns whether the largest offset, over elements of `size` bytes, fits 32 bits.
inline bool fits_32_bits(std::initializer_list<Extent> extents, int64_t size) {
  int64_t left = std::numeric_limits<int32_t>::max();
  for (const auto& [count, stride] : extents) {
    const int64_t bytes = std::abs(stride) * size;
    if (count > 0 && bytes > left / count) return false;
    left -= count * bytes;
  }
  return true;
}

}  // namespace selective_scan::cuda
