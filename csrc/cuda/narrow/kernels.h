// The interface of the narrow kernels to their launcher.
#pragma once

#include <cuda_runtime_api.h>

#include "../kit/launch_shape.h"
#include "../sums/gradient_sums.h"
#include "plan.h"

namespace selective_scan::cuda::narrow {

/// A (batch, channel, step) array whose steps are contiguous; strides in bytes.
struct Sequence {
  char* data = nullptr;  // null: absent
  int64_t batch = 0;
  int64_t channel = 0;

  SELECTIVE_SCAN_HD bool present() const { return data != nullptr; }
};

struct ForwardArgs {
  /// The order of the rows in shared memory, in which an absent z takes no space.
  enum Row { kU, kDelta, kZ, kRows };

  ForwardParams params;
  RowLayout rows;
  int64_t tiles;  // tiles of a group's channels
  Sequence inputs[kRows];
  Sequence results[1];  // out, stored from u's place
};

struct BackwardArgs {
  enum Row { kU, kDelta, kDout, kZ, kRows };

  BackwardParams params;
  RowLayout rows;
  int64_t tiles;
  Sequence inputs[kRows];
  Sequence results[kRows];  // each input's gradient, stored from its place; none for dout
  BackwardWorkspace workspace;
};

/// The launch functions of one instantiation.
template <class Element, int kStates, bool kDense>
struct Kernels {
  static cudaError_t forward(const ForwardArgs&, const LaunchShape&, cudaStream_t);
  static cudaError_t backward(const BackwardArgs&, const LaunchShape&, cudaStream_t);
};

/// Enqueues a pass. `memory` is the scratch memory that the plan asks for.
cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void* memory,
                cudaStream_t stream);
cudaError_t run(const BackwardParams& params, const BackwardPlan& plan, void* memory,
                cudaStream_t stream);

}  // namespace selective_scan::cuda::narrow
