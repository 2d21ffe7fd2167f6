// The reasons for which a path cannot run a call.
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "../kit/config.h"
#include "device.h"

namespace selective_scan::cuda {

/// Why a path cannot run a call. It costs nothing until the text is built.
struct Refusal {
  const char* reason = nullptr;  // null: the path can run it
  int64_t got = -1;              // the call's value, if it is a number

  explicit operator bool() const { return reason != nullptr; }
};

/// The refusal of kernels that need asynchronous copies on a device without them.
constexpr Refusal refusal_of_older(const Device& device) {
  return {"the GPU's compute capability must be 8.0 or later", device.major};
}

/// The refusal of paths that only have kernels for kCommonMethod with real A and variable B and C,
/// if the call is of another kind.
inline Refusal refuse_other_kinds(const ScanParams& params) {
  if (params.is_complex || params.is_double) return {"A must be real and arithmetic fp32"};
  if (!has_all_kernels(params.method)) return {"the method must be zoh"};
  if (!params.variable_B || !params.variable_C) return {"B and C must both be variable"};
  return {};
}

constexpr Refusal kNotEnoughSharedMemory{"blocks of this GPU have not enough shared memory"};

/// The refusal of a path without kernels that compute only the gradient of the initial state.
constexpr Refusal kNotStateAlone{"gradients other than the initial state's must be wanted"};

/// The refusal of a path without kernels that compute only the map of all steps.
constexpr Refusal kNotMapAlone{"out or states must be wanted"};

}  // namespace selective_scan::cuda
