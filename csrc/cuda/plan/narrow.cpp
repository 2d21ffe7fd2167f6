// The narrow path: which calls it takes, and how it divides their channels.

#include "../narrow/plan.h"

#include <algorithm>

#include "arrays.h"

namespace selective_scan::cuda::narrow {
namespace {

/// The numbers of states that have kernels.
constexpr int kPaddedStates[] = {1, 2, kMostStates};

constexpr int kMostResidentBlocks = 32;  // per multiprocessor

Refusal refuse(const ScanParams& params) {
  if (const Refusal refusal = refuse_other_kinds(params)) return refusal;
  if (params.dstate > kMostStates) return {"dstate must be at most 8", params.dstate};
  if (params.seqlen < 1 || params.seqlen > kMaxSteps) {
    return {"seqlen must be positive and less than 2^28", params.seqlen};
  }
  return {};
}

/// Returns how rows are moved: by the widest accesses that all of them allow. `access` is 0 if
/// there are none.
template <class Params>
RowLayout find_layout(const Params& params, int channels) {
  const auto size = static_cast<int>(element_size(params.u.dtype));
  const auto have_vectors = [&](int bytes) {
    return all_of(rows_of(params), [&](const ArrayView& view) {
      return view.step == 1 && has_step_vectors(params, view, bytes / size);
    });
  };
  for (const int bytes : {16, 8, 4}) {
    if (have_vectors(bytes)) return RowLayout::chunks(channels, size, bytes);
  }
  const auto is_forward = [](const ArrayView& view) { return view.step == 1; };
  if (params.seqlen <= kMostDenseSteps && all_of(rows_of(params), is_forward) &&
      are_dense(params, rows_of(params))) {
    return RowLayout::dense(channels, size, static_cast<int>(params.seqlen));
  }
  return {};
}

/// Calls function.operator()<kStates>().
template <class Function>
int for_states(int padded_states, const Function& function) {
  return padded_states == 1   ? function.template operator()<1>()
         : padded_states == 2 ? function.template operator()<2>()
                              : function.template operator()<kMostStates>();
}

template <class Params, class AnyPlan>
Refusal divide(const Params& params, AnyPlan& plan) {
  if (const Refusal refusal = refuse(params)) return refusal;
  const auto is_alike = [&](const ArrayView& view) { return view.dtype == params.u.dtype; };
  if (!all_of(rows_of(params), is_alike) || !is_alike(params.B) || !is_alike(params.C)) {
    return {"u, delta, z, B, C, out and their gradients must have one dtype"};
  }
  plan.padded_states = *std::find_if(std::begin(kPaddedStates), std::end(kPaddedStates),
                                     [&](int states) { return states >= params.dstate; });
  plan.warp_channels =
      for_states(plan.padded_states, []<int kStates>() { return WarpShape<kStates>::kChannels; });
  plan.rows = find_layout(params, plan.warp_channels);
  if (plan.rows.access == 0) {
    return {"rows must lie along time, aligned to 4 bytes, or be short ones without gaps"};
  }
  // One state has kernels only for dense rows.
  static_assert(WarpShape<1>::kChannels == WarpShape<2>::kChannels);
  if (!plan.rows.is_dense) plan.padded_states = std::max(plan.padded_states, 2);
  plan.tiles = ceil_div(params.dim / params.groups, plan.warp_channels);
  const int64_t blocks = params.batch * params.groups * plan.tiles;
  if (blocks > kMaxBlocks) return {"a grid of blocks cannot have that many channels", params.dim};
  plan.shape = {blocks, kWarpSize};
  return {};
}

/// Keeps the rows of one chunk only, if all warps can then run at a time and with two chunks they
/// cannot: other warps hide the waits of a warp. A block needs `own_bytes` of shared memory besides
/// the rows of `arrays` arrays.
template <class AnyPlan>
Refusal choose_stages(const Device& device, int own_bytes, int arrays, AnyPlan& plan) {
  const auto waves = [&](int stages) {
    plan.rows.stages = stages;
    plan.shape.shared_bytes = own_bytes + stages * arrays * plan.rows.bytes;
    if (plan.shape.shared_bytes > device.block_shared_bytes) return kMaxBlocks;
    const int64_t resident =
        std::min(kMostResidentBlocks, device.blocks_by_shared_memory(plan.shape.shared_bytes));
    return ceil_div(plan.shape.blocks, device.multiprocessors * resident);
  };
  const int most = plan.rows.stages;
  const int64_t with_one = waves(1);
  if (with_one == kMaxBlocks) return kNotEnoughSharedMemory;
  const int64_t with_most = waves(most);
  if (with_most == kMaxBlocks || (with_most > 1 && with_one == 1)) waves(1);
  return {};
}

}  // namespace

Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan) {
  if (params.wanted == ForwardWanted::kMapAlone) return kNotMapAlone;
  if (const Refusal refusal = divide(params, plan)) return refusal;
  const int own_bytes =
      for_states(plan.padded_states, []<int kStates>() { return kProjectionBytes<kStates>; });
  return choose_stages(device, own_bytes, params.z.present() ? 3 : 2, plan);
}

Refusal make_plan(const BackwardParams& params, const Device& device, BackwardPlan& plan) {
  if (params.wanted == BackwardWanted::kStateAlone) return kNotStateAlone;
  if (const Refusal refusal = divide(params, plan)) return refusal;
  const int own_bytes =
      for_states(plan.padded_states, []<int kStates>() { return BackwardLayout<kStates>::kRows; });
  const int arrays = params.z.present() ? 4 : 3;
  if (const Refusal refusal = choose_stages(device, own_bytes, arrays, plan)) return refusal;
  BackwardScratch& scratch = plan.scratch;
  scratch.dBC_partials = scratch.take(
      true, plan.tiles * params.batch * params.groups * params.seqlen * 2 * plan.padded_states,
      sizeof(float));
  const int64_t rows = params.batch * params.dim;
  scratch.take_sums(params, rows * plan.padded_states, sizeof(float), rows, sizeof(float));
  return {};
}

}  // namespace selective_scan::cuda::narrow
