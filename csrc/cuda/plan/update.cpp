#include "update.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "../kit/config.h"

namespace selective_scan::cuda {
namespace {

/// About as many as a large device has at work at once.
constexpr int64_t kManyBlocks = 1536;
constexpr int64_t kMostRows = 4;  // of a block

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
  // The heads' channels are as one head's.
  const auto is_flat = [&](const ArrayView& view) {
    return !view.present() || params.heads == 1 || view.group == params.dim * view.channel;
  };
  const auto is_dense = [&](const ArrayView& view) {
    return !view.present() || (view.channel == 1 && is_flat(view));
  };
  const auto is_parameter = [&](const ArrayView& view) {
    return is_dense(view) && (is_input(view) || view.dtype == DType::kFloat32);
  };
  const ArrayView* const inputs[] = {&params.x, &params.dt, &params.z, &params.out};
  // Offsets in bytes have 32 bits, but for those of slots.
  constexpr double kLimit = 0x1p31;
  const auto is_near = [&](const ArrayView& view, int64_t count, int64_t stride, int64_t rows) {
    const double last =
        static_cast<double>(count) * stride + static_cast<double>(rows) * view.batch;
    return stride >= 0 && view.batch >= 0 && last * element_size(view.dtype) < kLimit;
  };
  const int64_t channels = params.heads * params.dim;
  return !params.is_complex && !params.is_double && params.steps == 1 && !plan.many_packs &&
         vectors.state && vectors.A && vectors.B && vectors.C &&
         params.A.dtype == DType::kFloat32 && is_input(params.B) && is_input(params.C) &&
         (params.state.dtype == DType::kFloat32 || params.state.dtype == input) &&
         std::all_of(std::begin(inputs), std::end(inputs),
                     [&](const ArrayView* view) {
                       return is_input(*view) && is_dense(*view) &&
                              is_near(*view, channels, view->channel, params.batch);
                     }) &&
         is_flat(params.state) && is_flat(params.A) && is_parameter(params.D) &&
         is_parameter(params.dt_bias) && is_near(params.state, channels, params.state.channel, 1) &&
         is_near(params.A, channels, params.A.channel, 1) &&
         is_near(params.B, params.groups, params.B.group, params.batch) &&
         is_near(params.C, params.groups, params.C.group, params.batch) && params.slots > 0 &&
         params.slots < kLimit && params.batch <= kMaxRows;
}

/// What a decoder calls at every step, of calls that are plain: kDenseStates to a channel, channels
/// of one group that fill their blocks, states and A without gaps, every optional input, softplus.
/// Rows may lie apart as slices of wider ones do: x, dt and out alike, B and C alike.
bool is_dense(const UpdateParams& params, const UpdatePlan& plan) {
  const int64_t channels = params.heads * params.dim;
  const int64_t block_channels = kUpdateThreads >> plan.lane_bits;
  const auto is_alike = [&](const ArrayView& view, const ArrayView& other) {
    return params.batch == 1 || view.batch == other.batch;
  };
  return plan.is_plain && params.dstate == kDenseStates && channels % block_channels == 0 &&
         params.groups == 1 && params.state.channel == kDenseStates &&
         params.A.channel == kDenseStates && params.z.present() && params.D.present() &&
         params.dt_bias.present() && params.D.dtype == params.dt_bias.dtype && params.dt_softplus &&
         !params.destinations.present() && is_alike(params.x, params.dt) &&
         is_alike(params.x, params.out) && is_alike(params.B, params.C);
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
  // One, unless there are more blocks than a device has at work at once.
  plan.rows = std::max(std::clamp<int64_t>(plan.tiles * params.batch / kManyBlocks, 1, kMostRows),
                       ceil_div(params.batch, kMaxRows));
  plan.vectors = {has_vectors(params.state, params, plan.lane_states),
                  has_vectors(params.A, params, plan.lane_states),
                  has_vectors(params.B, params, plan.lane_states),
                  has_vectors(params.C, params, plan.lane_states)};
  plan.is_plain = is_plain(params, plan);
  plan.is_dense = is_dense(params, plan);
  plan.shape.blocks = plan.tiles;
  plan.shape.rows = plan.is_plain ? params.batch : ceil_div(params.batch, plan.rows);
  plan.shape.threads = kUpdateThreads;
  plan.shape.is_dependent = true;
  return plan;
}

}  // namespace selective_scan::cuda
