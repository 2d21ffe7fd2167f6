// Time cut into segments that are worked on at the same time.
#pragma once

#include <cuda_runtime_api.h>

#include "../plan/scratch.h"
#include "geometry.cuh"

namespace selective_scan::cuda {

/// A long sequence is cut into segments that run at the same time. A summary run finds, for every
/// segment but the last of its direction, how it maps what enters it to what leaves it, x →
/// factor·x + offset; combining these gives what enters each segment, and the full run starts from
/// there. Arrays are (segment, batch, channel, padded state) of the states' type; null where there
/// is one segment, but for what a tile's parts hand on: see streamed/block_order.cuh.
struct SegmentStates {
  void* factors = nullptr;
  void* offsets = nullptr;  // after combining: what enters the segment
};

inline SegmentStates segment_states(const ForwardScratch& scratch, void* memory) {
  return {scratch.factors.in(memory), scratch.offsets.in(memory)};
}

/// Turns the summaries of the segments into what enters each: `initial` enters the first one, or
/// the last one if `backwards`; into packed sequences their own states enter.
template <class T>
cudaError_t combine_segments(const ScanParams& params, const ArrayView& initial,
                             const Geometry& geometry, int padded_states, bool backwards,
                             const SegmentStates& segments, cudaStream_t stream);

/// Stores the map of all steps, where it alone is wanted, once segments are combined: its offset is
/// what enters the empty segment behind them, its factor the product of theirs.
template <class T>
cudaError_t store_map(const ForwardParams& params, int64_t segments, int padded_states,
                      const SegmentStates& states, cudaStream_t stream);

/// Copies the gradient of the initial state, where it alone is wanted: it is what comes back to the
/// segment in front, see add_empty_segment().
template <class T>
cudaError_t copy_state_gradient(const BackwardParams& params, int padded_states,
                                const SegmentStates& segments, cudaStream_t stream) {
  const ArrayView& target = params.dinitial_state;
  return cudaMemcpy2DAsync(target.data, target.channel * element_size(target.dtype),
                           segments.offsets, padded_states * sizeof(T), params.dstate * sizeof(T),
                           params.batch * params.dim, cudaMemcpyDeviceToDevice, stream);
}

}  // namespace selective_scan::cuda
