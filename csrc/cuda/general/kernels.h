// The kernels as the launcher sees them: one table entry per scalar type, states per lane, method.
#pragma once

#include <cuda_runtime_api.h>

#include "../kit/geometry.cuh"
#include "shared_layout.h"

namespace selective_scan::cuda {

/// Where a long sequence is cut into segments that run at the same time. A summary run finds, for
/// every segment but the last of its direction, how it maps what enters it to what leaves it, x →
/// factor·x + offset; combining these gives what enters each segment, and the full run starts from
/// there. Arrays (segment, batch, channel, padded state) of the states' type; null where there is
/// one segment, but for what a tile's parts hand on: see streamed/block_order.cuh.
struct SegmentStates {
  void* factors = nullptr;
  void* offsets = nullptr;  // after combining: what enters the segment
};

/// Scratch memory of the backward pass, all of the compute type; null where not needed.
struct BackwardWorkspace {
  void* dBC_partials = nullptr;  // dB, dC: (slice, tile of a round, batch, group, step, B|C, state)
  int slices = 1;                // of the padded states
  // Sums over the steps of a segment: (segment, batch, channel, padded state)
  void* dA = nullptr;
  void* dB = nullptr;  // of a constant B
  void* dC = nullptr;
  // Likewise (segment, batch, channel, part), real
  void* dD = nullptr;
  void* ddelta_bias = nullptr;
  int channel_parts = 1;
  SegmentStates segments;
};

/// A launch of one instantiation. Everything is ready: geometry chosen, workspace laid out.
template <class T, int kStates, int kLaneBits, Method kMethod>
struct Scan {
  static cudaError_t forward(const ForwardParams& params, const Geometry& geometry,
                             const SegmentStates& segments, cudaStream_t stream);
  static cudaError_t backward(const BackwardParams& params, const Geometry& geometry,
                              const BackwardWorkspace& workspace, cudaStream_t stream);
};

/// Turns the summaries of the segments into what enters each: `initial` enters the first one, or
/// the last one if `backwards`.
template <class T>
cudaError_t combine_segments(const ScanParams& params, const ArrayView& initial,
                             const Geometry& geometry, int padded_states, bool backwards,
                             const SegmentStates& segments, cudaStream_t stream);

/// Adds up the partial sums of the backward pass in a fixed order and stores the gradients.
template <class T>
cudaError_t reduce_gradients(const BackwardParams& params, const Geometry& geometry,
                             int padded_states, const BackwardWorkspace& workspace,
                             cudaStream_t stream);

}  // namespace selective_scan::cuda
