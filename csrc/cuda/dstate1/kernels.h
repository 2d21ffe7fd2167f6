// The interface of the dstate 1 kernels to their launcher.
#pragma once

#include <cuda_runtime_api.h>

#include "../kit/launch_shape.h"
#include "../sums/gradient_sums.h"
#include "layout.h"

namespace selective_scan::cuda::dstate1 {

/// The storages, which are layouts of a problem's (batch, channel, step) arrays. All arrays have
/// one element type and the same strides of channels and steps.
template <class Element>
struct Vectors {};  // rows of contiguous steps, aligned to 16 bytes; B and C have the same type
template <class Element>
struct HalfVectors {};  // the same, aligned to 8 bytes; 2-byte elements
template <class Element>
struct DenseRows {};  // whole rows without gaps, aligned to 4 steps; B and C have the same type
template <int kBytes>
struct Scattered {};  // any strides, elements of kBytes bytes

/// A (batch, channel, step) array; strides in bytes.
struct Sequence {
  char* data = nullptr;  // null: absent
  int64_t batch = 0;

  SELECTIVE_SCAN_HD bool present() const { return data != nullptr; }
};

/// The properties that these arrays share; strides in bytes. Offsets within a tile of channels fit
/// 32 bits.
struct SequenceStrides {
  DType dtype = DType::kFloat32;
  int64_t channel = 0;
  int step = 0;
  bool channels_are_closer = false;  // in memory than steps are
};

struct ForwardArgs {
  ForwardParams params;
  SequenceStrides strides;
  Sequence inputs[ForwardRows::kAll];
  Sequence out;
  int windows;     // per group
  int work_items;  // batch · groups · windows
};

struct BackwardArgs {
  BackwardParams params;
  SequenceStrides strides;
  Sequence inputs[BackwardRows::kAll];
  Sequence gradients[BackwardRows::kAll];  // of the inputs; dout has none
  int warps;                               // per block
  int tiles;                               // per group
  BackwardWorkspace workspace;
};

/// An array of the backward scan of several states, in which each has strides of its own.
struct StridedSequence : Sequence {
  SequenceStrides strides;
};

struct StatesArgs {
  BackwardParams params;
  StridedSequence inputs[BackwardRows::kAll];
  StridedSequence gradients[BackwardRows::kAll];  // of the inputs; dout has none
  int tile_channels;
  int tiles;          // per group
  int padded_states;  // of partial sums
  BackwardWorkspace workspace;
};

/// The launches for one storage and shape of windows. Each shape has kernels for some storages: see
/// instantiations.py.
template <class Storage, class Shape>
struct Kernels {
  static cudaError_t forward(const ForwardArgs&, const LaunchShape&, cudaStream_t);
  static cudaError_t backward(const BackwardArgs&, const LaunchShape&, cudaStream_t);
};

/// The launch of the backward scan of several states, with elements of kBytes bytes.
template <int kBytes>
struct States {
  static cudaError_t backward(const StatesArgs& args, const LaunchShape& shape,
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
