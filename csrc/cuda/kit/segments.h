// Segments of time that run at the same time.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "../../core/state_exchange.h"
#include "../plan/scratch.h"
#include "geometry.cuh"

namespace selective_scan::cuda {

/// The maps of a long sequence's segments, which run at the same time. A summary run computes the
/// map from the entering to the leaving state, x → factor·x + offset, of every segment but the last
/// of its direction; the last one's is only needed if the map of all steps is wanted. Combining the
/// maps gives the state that enters each segment, from which the full run starts. Arrays are
/// (segment, batch, channel, padded state) of the states' type. They are null for a single segment,
/// except for the values that a tile's parts hand over: see streamed/block_order.cuh.
struct SegmentStates {
  void* factors = nullptr;
  void* offsets = nullptr;  // after combining: the states that enter
};

inline SegmentStates segment_states(const ForwardScratch& scratch, void* memory) {
  return {scratch.factors.in(memory), scratch.offsets.in(memory)};
}

/// The summaries of a call's segments.
struct Summaries {
  const ScanParams& params;
  int64_t segments;
  int padded_states;
  bool backwards;
  SegmentStates states;

  /// Replaces the offsets by the states that enter each segment. `initial` enters the first one, or
  /// the last one if `backwards`; packed sequences take their own initial states.
  cudaError_t combine(const ArrayView& initial, cudaStream_t stream) const;

  /// Stores factor and offset, each if present, of the map of all steps, computed from the
  /// summaries of all segments. The summaries stay unchanged.
  cudaError_t store_map(const ArrayView& factor, const ArrayView& offset,
                        cudaStream_t stream) const;
};

/// Runs a pass in segments: `summarize`, which computes their maps, and `scan`, the full run. If
/// only the map of all steps is wanted, stores that instead of the full run. If an exchange is
/// given, the pass begins with the state that it returns.
template <class Params, class Summarize, class Scan>
cudaError_t run_in_segments(Params& params, int64_t segments, int padded_states,
                            const SegmentStates& states, const StateExchange* exchange,
                            cudaStream_t stream, const Summarize& summarize, const Scan& scan) {
  constexpr bool kIsBackward = std::is_same_v<Params, BackwardParams>;
  const Summaries summaries{params, segments, padded_states, kIsBackward, states};
  const auto finish = [&](const ArrayView& entering) {
    cudaError_t error = cudaSuccess;
    if (exchange != nullptr) {
      error = summaries.store_map(exchange->factor, exchange->offset, stream);
      if (error != cudaSuccess) return error;
      set_entering(params, exchange->enter());  // changes `entering`
    }
    error = summaries.combine(entering, stream);
    return error == cudaSuccess ? scan() : error;
  };
  const cudaError_t error = summarize();
  if (error != cudaSuccess) return error;
  if constexpr (kIsBackward) {
    return wants_summary_alone(params) ? summaries.store_map({}, params.dinitial_state, stream)
                                       : finish(params.dlast_state);
  } else {
    return wants_summary_alone(params)
               ? summaries.store_map(params.map_factor, params.last_state, stream)
               : finish(params.initial_state);
  }
}

}  // namespace selective_scan::cuda
