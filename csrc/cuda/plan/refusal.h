// What a path says of a call that it cannot run.
#pragma once

#include <cstdint>

#include "device.h"

namespace selective_scan::cuda {

/// Why a path cannot run a call. Costs nothing until somebody asks for the words.
struct Refusal {
  const char* reason = nullptr;  // null: it can
  int64_t got = -1;              // what the call has instead, if that is a number

  explicit operator bool() const { return reason != nullptr; }
};

/// What needs asynchronous copies says this of a device that has none.
constexpr Refusal refusal_of_older(const Device& device) {
  return {"the GPU's compute capability must be 8.0 or later", device.major};
}

/// A path says this that has kernels of kCommonMethod alone.
constexpr Refusal kNotThisMethod{"the method must be zoh"};

constexpr Refusal kNotEnoughSharedMemory{"blocks of this GPU have not enough shared memory"};

/// A path says this that has no kernels for the gradient of the initial state alone.
constexpr Refusal kNotStateAlone{"gradients other than the initial state's must be wanted"};

/// A path says this that has no kernels for the map of all steps alone.
constexpr Refusal kNotMapAlone{"out or states must be wanted"};

}  // namespace selective_scan::cuda
