#include "update.h"

#include <algorithm>
#include <bit>

#include "../kit/config.h"

namespace selective_scan::cuda {
namespace {

/// About as many blocks as a large device runs at a time.
constexpr int64_t kManyBlocks = 1536;
constexpr int64_t kMostRows = 4;  // per block

/// Returns the bytes of a state in a form that suits the arithmetic: 16-bit states may be read as
/// they are, all others count as the compute type.
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

/// Returns whether this is the call that a decoder makes at every step: one step of kDenseStates
/// real states by kCommonMethod in fp32; inputs of one type, and states of that type or fp32;
/// channels of one head and group that are contiguous and fill their blocks; contiguous states and
/// A that are aligned for vectors; A, D and dt_bias of that type or fp32; every optional input,
/// softplus, and no separate destinations. Rows may be slices of wider rows, as long as x, dt and
/// out have the same stride, and so do B and C.
bool is_dense(const UpdateParams& params, const UpdatePlan& plan) {
  const DType input = params.x.dtype;
  const int64_t block_channels = kUpdateThreads >> plan.lane_bits;
  // Offsets in bytes have 32 bits, except for those of slots.
  constexpr double kLimit = 0x1p31;
  const auto is_near = [&](const ArrayView& view, int64_t inside, int64_t rows) {
    const double last = static_cast<double>(inside) + static_cast<double>(rows) * view.batch;
    return view.batch >= 0 && last * element_size(view.dtype) < kLimit;
  };
  const auto is_input = [&](const ArrayView& view) {
    return view.present() && view.dtype == input && view.channel == 1 &&
           is_near(view, params.dim, params.batch);
  };
  const auto is_projection = [&](const ArrayView& view) {
    return view.dtype == input && is_near(view, params.dstate, params.batch);
  };
  const auto is_parameter = [&](const ArrayView& view) {
    return view.present() && (view.dtype == input || view.dtype == DType::kFloat32);
  };
  const auto is_of_channels = [&](const ArrayView& view) {
    return is_parameter(view) && view.channel == 1;
  };
  const auto are_states = [&](const ArrayView& view) {
    return view.channel == kDenseStates && is_near(view, params.dim * kDenseStates, 1);
  };
  const auto is_alike = [&](const ArrayView& view, const ArrayView& other) {
    return params.batch == 1 || view.batch == other.batch;
  };
  const UpdatePlan::Vectors& vectors = plan.vectors;
  return !params.is_complex && !params.is_double && params.steps == 1 && params.heads == 1 &&
         params.groups == 1 && has_all_kernels(params.method) && params.dstate == kDenseStates &&
         !params.input_delta.present() && params.dim % block_channels == 0 && params.dt_softplus &&
         !params.destinations.present() && params.slots > 0 && params.slots < kLimit &&
         params.batch <= kMaxRows && vectors.state && vectors.A && vectors.B && vectors.C &&
         are_states(params.state) && are_states(params.A) &&
         (params.state.dtype == DType::kFloat32 || params.state.dtype == input) &&
         is_parameter(params.A) && is_input(params.x) && is_input(params.dt) &&
         is_input(params.z) && is_input(params.out) && is_alike(params.x, params.dt) &&
         is_alike(params.x, params.out) && is_projection(params.B) && is_projection(params.C) &&
         is_alike(params.B, params.C) && is_of_channels(params.D) &&
         is_of_channels(params.dt_bias) && params.D.dtype == params.dt_bias.dtype;
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
  // One row, unless there are more blocks than a device runs at a time.
  plan.rows = std::max(std::clamp<int64_t>(plan.tiles * params.batch / kManyBlocks, 1, kMostRows),
                       ceil_div(params.batch, kMaxRows));
  plan.vectors = {has_vectors(params.state, params, plan.lane_states),
                  has_vectors(params.A, params, plan.lane_states),
                  has_vectors(params.B, params, plan.lane_states),
                  has_vectors(params.C, params, plan.lane_states)};
  plan.is_dense = is_dense(params, plan);
  plan.shape.blocks = plan.tiles;
  plan.shape.rows = plan.is_dense ? params.batch : ceil_div(params.batch, plan.rows);
  plan.shape.threads = kUpdateThreads;
  plan.shape.is_dependent = true;
  return plan;
}

}  // namespace selective_scan::cuda
