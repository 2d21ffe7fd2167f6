#include "update.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "../kit/config.h"

namespace selective_scan::cuda {
namespace {

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

bool is_plain(const UpdateParams& params, const UpdatePlan& plan) {
  const UpdatePlan::Vectors& vectors = plan.vectors;
  const DType input = params.x.dtype;
  const auto is_input = [&](const ArrayView& view) {
    return !view.present() || view.dtype == input;
  };
  // There are 32 bits for offsets in bytes, channels and rows.
  constexpr double kLimit = 0x1p30;
  const auto is_near = [&](const ArrayView& view, int64_t rows) {
    const double last = static_cast<double>(rows - 1) * view.batch +
                        static_cast<double>(params.heads - 1) * view.group +
                        static_cast<double>(params.dim - 1) * view.channel +
                        static_cast<double>(params.dstate) * view.state;
    return view.batch >= 0 && view.group >= 0 && view.channel >= 0 &&
           last * element_size(view.dtype) < kLimit;
  };
  const ArrayView* const of_rows[] = {&params.x,   &params.dt, &params.z,
                                      &params.out, &params.B,  &params.C};
  const ArrayView* const of_channels[] = {&params.state, &params.A, &params.D, &params.dt_bias};
  const auto all_near = [&](const auto& views, int64_t rows) {
    return std::all_of(std::begin(views), std::end(views),
                       [&](const ArrayView* view) { return is_near(*view, rows); });
  };
  return !params.is_complex && !params.is_double && params.steps == 1 && !plan.many_packs &&
         vectors.state && vectors.B && vectors.C && params.A.state >= 0 &&
         params.A.dtype == DType::kFloat32 && is_input(params.dt) && is_input(params.z) &&
         is_input(params.B) && is_input(params.C) && is_input(params.out) &&
         (params.state.dtype == DType::kFloat32 || params.state.dtype == input) &&
         static_cast<double>(params.heads) * params.dim < kLimit && params.batch < kLimit &&
         all_near(of_rows, params.batch) && all_near(of_channels, 1) && params.slots < kLimit &&
         params.state.batch * element_size(params.state.dtype) < kLimit;
}

}  // namespace

UpdatePlan plan_update(const UpdateParams& params) {
  UpdatePlan plan;
  plan.lane_states = 16 / state_bytes(params);
  const int64_t packs = ceil_div(params.dstate, plan.lane_states);
  plan.many_packs = packs > kWarpSize;
  const auto lanes = std::bit_ceil(static_cast<unsigned>(std::min<int64_t>(packs, kWarpSize)));
  plan.lane_bits = std::countr_zero(lanes);
  plan.tiles = ceil_div(params.heads * params.dim, int64_t{kUpdateThreads} >> plan.lane_bits);
  plan.vectors = {has_vectors(params.state, params, plan.lane_states),
                  has_vectors(params.A, params, plan.lane_states),
                  has_vectors(params.B, params, plan.lane_states),
                  has_vectors(params.C, params, plan.lane_states)};
  plan.is_plain = is_plain(params, plan);
  plan.shape.blocks = plan.tiles;
  plan.shape.rows = std::min(params.batch, kMaxRows);
  plan.shape.threads = kUpdateThreads;
  plan.shape.is_dependent = true;
  return plan;
}

}  // namespace selective_scan::cuda
