// Time cut into segments that are worked on at the same time.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "../../core/state_exchange.h"
#include "../plan/scratch.h"
#include "geometry.cuh"

namespace selective_scan::cuda {

/// A long sequence is cut into segments that run at the same time. A summary run finds, for every
/// segment but the last of its direction, how it maps what enters it to what leaves it, x →
/// factor·x + offset; combining these gives what enters each segment, and the full run starts from
/// there. What leaves the last one nobody needs, unless the map of all steps is wanted. Arrays are
/// (segment, batch, channel, padded state) of the states' type; null where there is one segment,
/// but for what a tile's parts hand on: see streamed/block_order.cuh.
struct SegmentStates {
  void* factors = nullptr;
  void* offsets = nullptr;  // after combining: what enters the segment
};

inline SegmentStates segment_states(const ForwardScratch& scratch, void* memory) {
  return {scratch.factors.in(memory), scratch.offsets.in(memory)};
}

/// What is made of the summaries, for states of type T.
template <class T>
struct Summaries {
  /// Turns them into what enters each segment: `initial` enters the first one, or the last one if
  /// `backwards`; into packed sequences their own states enter.
  static cudaError_t combine(const ScanParams& params, const ArrayView& initial,
                             const Geometry& geometry, int padded_states, bool backwards,
                             const SegmentStates& segments, cudaStream_t stream);

  /// Stores the map of all steps, of the summaries of all segments, which stay: its factor and its
  /// offset, each where it is present.
  static cudaError_t store_map(const ScanParams& params, const ArrayView& factor,
                               const ArrayView& offset, int64_t segments, int padded_states,
                               bool backwards, const SegmentStates& states, cudaStream_t stream);
};

/// Tells the map of all steps, and has a pass begin with what enters them.
template <class T, class Params>
cudaError_t exchange_states(const StateExchange& exchange, Params& params, int64_t segments,
                            int padded_states, const SegmentStates& states, cudaStream_t stream) {
  constexpr bool kIsBackward = std::is_same_v<Params, BackwardParams>;
  const cudaError_t error =
      Summaries<T>::store_map(params, exchange.factor, exchange.offset, segments, padded_states,
                              kIsBackward, states, stream);
  if (error == cudaSuccess) set_entering(params, exchange.enter());
  return error;
}

}  // namespace selective_scan::cuda
