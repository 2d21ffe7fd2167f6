// Cutting time into segments that run at the same time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../core/params.h"
#include "../kit/geometry.h"
#include "../kit/packed_chunks.h"
#include "figures.h"

namespace selective_scan::cuda {

/// Cuts time into `wanted` segments or, where these would be short, into fewer.
inline void cut_time(int64_t seqlen, int64_t wanted, const Figures::Segments& figures,
                     Geometry& geometry) {
  const int64_t segments = std::min(wanted, seqlen / figures.steps);
  if (segments < 2) return;
  geometry.segment_steps = round_up(ceil_div(seqlen, segments), kChunk);
  geometry.segments = ceil_div(seqlen, geometry.segment_steps);
  geometry.work_items *= geometry.segments;
}

/// Nobody needs what leaves the last segment in a pass's order, so that kernels make no summary of
/// it. Where what leaves all steps is all that is wanted, the map of the states or the gradient of
/// the initial one, an empty segment comes last: behind all steps, or in front of them.
inline void add_empty_segment(int64_t seqlen, Geometry& geometry) {
  if (geometry.segments == 1) geometry.segment_steps = round_up(seqlen, kChunk);
  geometry.work_items += geometry.work_items / geometry.segments;
  ++geometry.segments;
}

/// The steps behind that segment: arrays begin so much before their memory, where nothing is read.
inline BackwardParams behind_front_segment(BackwardParams params, const Geometry& geometry) {
  params.seqlen += geometry.segment_steps;
  for (ArrayView* array :
       {&params.u, &params.delta, &params.B, &params.C, &params.z, &params.dout}) {
    if (!array->present()) continue;
    array->data = static_cast<char*>(array->data) -
                  geometry.segment_steps * array->step * element_size(array->dtype);
  }
  return params;
}

/// `share`: how many chunks a place has where places share them evenly. A sequence with no more may
/// stay whole: it is among the first to begin, and short ones fill up what it leaves. Backwards
/// they leave more to fill up.
inline PackedCuts packed_cuts(int64_t segments, int64_t segment_chunks, int64_t share,
                              bool backwards) {
  const int64_t longest = backwards ? 3 * share / 4 : share;
  return {segments, segment_chunks, std::max(segment_chunks, longest), backwards};
}

}  // namespace selective_scan::cuda
