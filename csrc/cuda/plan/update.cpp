#include "update.h"

#include <algorithm>
#include <bit>

#include "../kit/config.h"

namespace selective_scan::cuda {
namespace {

/// Threads of a multiprocessor that are at work at once; see the kernel's launch bounds.
constexpr int64_t kResidentThreads = 1024;
/// Rows that a block takes so that all blocks are at work at once, at the most; where more would be
/// needed there are several waves of blocks, each with so many rows that the last one is short.
constexpr int64_t kMostRows = 16;
constexpr int64_t kRowsOfManyWaves = 8;

/// Bytes of a state in memory that suit the arithmetic: those of 16 bits may be read as they are,
/// all others count as the compute type.
int state_bytes(const UpdateParams& params) {
  if (params.is_double) return params.is_complex ? 16 : 8;
  if (params.is_complex) return 8;
  return static_cast<int>(element_size(params.state.dtype));
}

bool has_vectors(const ArrayView& view, const UpdateParams& params, int lane_states) {
  const int64_t reals = params.is_complex ? 2 : 1;
  const int64_t size = element_size(view.dtype);
  const int64_t access = std::min<int64_t>(lane_states * reals * size, 16);
  const auto is_aligned = [&](int64_t stride) { return stride * size % access == 0; };
  return view.state == reals && params.dstate % lane_states == 0 &&
         reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(access) == 0 &&
         is_aligned(view.batch) && is_aligned(view.step) && is_aligned(view.group) &&
         is_aligned(view.channel);
}

int64_t rows_of_a_block(int64_t threads_of_a_row, int64_t batch, const Device& device) {
  const int64_t resident = kResidentThreads * device.multiprocessors;
  const auto even = [](int64_t rows) { return rows > 1 ? round_up(rows, int64_t{2}) : rows; };
  int64_t rows = even(ceil_div(threads_of_a_row * batch, resident));
  if (rows > kMostRows) rows = kRowsOfManyWaves;
  return even(ceil_div(batch, ceil_div(batch, rows)));  // blocks of equal work
}

}  // namespace

UpdatePlan plan_update(const UpdateParams& params, const Device& device) {
  UpdatePlan plan;
  plan.lane_states = 16 / state_bytes(params);
  const int64_t packs = ceil_div(params.dstate, plan.lane_states);
  plan.many_packs = packs > kWarpSize;
  const auto lanes = std::bit_ceil(static_cast<unsigned>(std::min<int64_t>(packs, kWarpSize)));
  plan.lane_bits = std::countr_zero(lanes);
  plan.tiles = ceil_div(params.heads * params.dim, int64_t{kUpdateThreads} >> plan.lane_bits);
  plan.rows = rows_of_a_block(plan.tiles * kUpdateThreads, params.batch, device);
  plan.vectors = {has_vectors(params.state, params, plan.lane_states),
                  has_vectors(params.A, params, plan.lane_states),
                  has_vectors(params.B, params, plan.lane_states),
                  has_vectors(params.C, params, plan.lane_states)};
  plan.shape.blocks = plan.tiles * ceil_div(params.batch, plan.rows);
  plan.shape.threads = kUpdateThreads;
  return plan;
}

}  // namespace selective_scan::cuda
