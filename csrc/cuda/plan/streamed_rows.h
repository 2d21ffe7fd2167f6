// How the streamed kernels of both passes move (batch, channel, step) arrays.
#pragma once

#include <array>

#include "../streamed/row_array.h"
#include "arrays.h"

namespace selective_scan::cuda::streamed {

constexpr Refusal no_other_methods(const ScanParams& params) {
  return {"by a method other than zoh A must be real, B and C variable and dstate at most 16",
          params.dstate};
}
constexpr Refusal not_packed(const ScanParams& params) {
  return {"of packed sequences A must be real, B and C variable and dstate at most 16",
          params.dstate};
}
constexpr Refusal kNoInputDelta = {
    "where the input has steps of its own, the method must be zoh, A real, B and C variable, "
    "dstate at most 16 and sequences not packed"};

constexpr int64_t kLargestStride = int64_t{1} << 24;  // times kWarpSize fits 32 bits

/// Determines how kernels that move chunks of `items` channels access the arrays. Returns false if
/// they cannot address one of them.
template <size_t kCount>
bool plan_rows(const ScanParams& params, int items,
               const std::array<const ArrayView*, kCount>& views, LaneMap& map,
               std::array<RowArray, kCount>& rows) {
  const bool along_steps = cuda::all_of(
      views, [&](const ArrayView& view) { return has_step_vectors(params, view, items); });
  map = along_steps ? LaneMap::kSteps : LaneMap::kChannels;
  for (size_t i = 0; i < kCount; ++i) {
    const ArrayView& view = *views[i];
    if (!view.present()) continue;
    const int64_t size = element_size(view.dtype);
    rows[i] = {static_cast<char*>(view.data),
               view.batch * size,
               view.channel * size,
               view.step * size,
               view.dtype,
               along_steps || has_channel_vectors(params, view, items)};
    // If lanes read u against the order of memory, they do so for all arrays.
    rows[i].has_step_vectors =
        has_step_vectors(params, view, items) && view.step == (views[0]->step < 0 ? -1 : 1);
    const bool fits = rows[i].channel >= 0 && rows[i].channel < kLargestStride;
    if (!rows[i].has_vectors && !fits) return false;
  }
  return true;
}

}  // namespace selective_scan::cuda::streamed
