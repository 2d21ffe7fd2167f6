// How each array is moved: decided on the host, where alignment is known.
#pragma once

#include "../../core/params.h"
#include "../kit/geometry.h"

namespace selective_scan::cuda::general {

/// How a warp moves its part of an array.
enum class RowMode : int8_t {
  kElements,  // one by one: any strides, any alignment
  kSteps,     // steps are contiguous: a group is one access
  kChannels,  // channels are contiguous: a step's channels are one access
};

/// One array's mode and whether its steps lie backwards in memory.
struct RowPlan {
  RowMode mode = RowMode::kElements;
  bool reversed = false;
};

/// What asynchronous copies move at once.
SELECTIVE_SCAN_HD int copy_bytes(int bytes) {
  return bytes < 16 ? bytes : 16;
}

inline RowPlan make_row_plan(const ArrayView& view, const ScanParams& params,
                             const Geometry& geometry) {
  RowPlan plan;
  if (!view.present()) return plan;
  const int64_t size = element_size(view.dtype);
  const auto aligned = [&](int64_t address, int64_t bytes) { return address % bytes == 0; };
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data));
  if (view.step == 1 || view.step == -1) {
    const int64_t bytes = copy_bytes(static_cast<int>(kBlockSteps * size));
    plan.reversed = view.step == -1;
    // A packed sequence may begin anywhere.
    if (!params.packed.present() && aligned(plan.reversed ? address + size : address, bytes) &&
        aligned(view.channel * size, bytes) && aligned(view.batch * size, bytes)) {
      plan.mode = RowMode::kSteps;
    }
  } else if (view.channel == 1) {
    const int64_t bytes = copy_bytes(static_cast<int>(geometry.warp_channels() * size));
    if (bytes >= 4 && aligned(address, bytes) && aligned(view.step * size, bytes) &&
        aligned(view.batch * size, bytes) &&
        (params.groups == 1 || aligned(geometry.group_channels * size, bytes))) {
      plan.mode = RowMode::kChannels;
    }
  }
  return plan;
}

enum class ProjectionMode : int8_t {
  kElements,  // one by one: any strides, any alignment
  kSteps,     // four steps of one state are one access
  kStates,    // four states of one step are one access
};

struct ProjectionPlan {
  ProjectionMode mode = ProjectionMode::kElements;
  bool reversed = false;
};

/// Elements of four steps, or four states, that a thread moves at a time.
constexpr int kQuad = 4;

inline ProjectionPlan make_projection_plan(const ArrayView& view, const ScanParams& params) {
  ProjectionPlan plan;
  const int64_t components = params.is_complex ? 2 : 1;
  if (params.is_complex && view.imag != 1) return plan;
  const int64_t size = element_size(view.dtype);
  const int64_t bytes = copy_bytes(static_cast<int>(kQuad * components * size));
  const auto aligned = [&](int64_t offset) { return offset % bytes == 0; };
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data));
  if (!aligned(view.batch * size) || !aligned(view.group * size)) return plan;
  if (view.step == components || view.step == -components) {
    plan.reversed = view.step < 0;
    const int64_t first = plan.reversed ? address + components * size : address;
    // A packed sequence may begin anywhere.
    const bool may_have = !params.packed.present();
    if (may_have && aligned(first) && aligned(view.state * size))
      plan.mode = ProjectionMode::kSteps;
  } else if (view.state == components && params.dstate % kQuad == 0) {
    if (aligned(address) && aligned(view.step * size)) plan.mode = ProjectionMode::kStates;
  }
  return plan;
}

/// How each input is moved.
struct InputPlans {
  RowPlan u;
  RowPlan delta;
  RowPlan z;
  ProjectionPlan B;
  ProjectionPlan C;
};

inline InputPlans make_input_plans(const ScanParams& params, const Geometry& geometry) {
  return {make_row_plan(params.u, params, geometry), make_row_plan(params.delta, params, geometry),
          make_row_plan(params.z, params, geometry), make_projection_plan(params.B, params),
          make_projection_plan(params.C, params)};
}

}  // namespace selective_scan::cuda::general
