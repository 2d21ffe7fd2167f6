// The dstate 1 kernels as their launcher sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "../kit/launch_shape.h"
#include "../sums/gradient_sums.h"
#include "layout.h"

namespace selective_scan::cuda::dstate1 {

/// How the (batch, channel, step) arrays of a problem lie in memory; all have one element type and
/// the same strides of channels and steps.
template <class Element>
struct Vectors {};  // rows aligned to 16 bytes, of steps side by side; B and C have the same type
template <class Element>
struct HalfVectors {};  // the same, aligned to 8 bytes; of two bytes
template <class Element>
struct DenseRows {};  // whole rows one behind the other, aligned to 4 steps; B and C likewise
template <int kBytes>
struct Scattered {};  // any strides, of elements of that size

/// A (batch, channel, step) array; strides in bytes.
struct Sequence {
  char* data = nullptr;  // null: absent
  int64_t batch = 0;

  SELECTIVE_SCAN_HD bool present() const { return data != nullptr; }
};

/// What these arrays share; strides in bytes. Offsets within a tile of channels fit 32 bits.
struct SequenceStrides {
  DType dtype = DType::kFloat32;
  int64_t channel = 0;
  int step = 0;
  bool channels_are_closer = false;  // in memory, than steps
};

struct ForwardArgs {
  ForwardParams params;
  SequenceStrides strides;
  Sequence inputs[ForwardRows::kAll];
  Sequence out;
  int windows;     // of a group's channels
  int work_items;  // batch · groups · windows
};

struct BackwardArgs {
  BackwardParams params;
  SequenceStrides strides;
  Sequence inputs[BackwardRows::kAll];
  Sequence gradients[BackwardRows::kAll];  // of these; dout has none
  int warps;                               // of a block
  int tiles;                               // of a group's channels
  int work_items;                          // batch · groups · tiles
  BackwardWorkspace workspace;
};

/// Each kind of window has kernels for some storages: see instantiations.py.
template <class Storage, class Shape>
struct Kernels {
  static cudaError_t forward(const ForwardArgs& args, const LaunchShape& shape,
                             cudaStream_t stream);
  static cudaError_t backward(const BackwardArgs& args, const LaunchShape& shape,
                              cudaStream_t stream);
};

struct ForwardPlan;  // plan.h
struct BackwardPlan;

/// Enqueues a pass. `memory` is the scratch memory that the plan asks for.
cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void* memory,
                cudaStream_t stream);
cudaError_t run(const BackwardParams& params, const BackwardPlan& plan, void* memory,
                cudaStream_t stream);

}  // namespace selective_scan::cuda::dstate1
