// Cuts time into segments that run at the same time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../kit/geometry.h"
#include "../kit/packed_chunks.h"

namespace selective_scan::cuda {

/// Cuts time into this many segments, or into fewer because segments are whole chunks.
inline void cut_time(int64_t seqlen, int64_t segments, Geometry& geometry) {
  if (segments < 2) return;
  geometry.segment_steps = round_up(ceil_div(seqlen, segments), kChunk);
  geometry.segments = ceil_div(seqlen, geometry.segment_steps);
  geometry.work_items *= geometry.segments;
}

/// `share` is the number of chunks per place if places share them evenly. A sequence with no more
/// chunks than that may stay whole: it is among the first to begin, and short ones fill the rest of
/// the time. Backward, the limit is lower because more time has to be filled.
inline PackedCuts packed_cuts(int64_t segments, int64_t segment_chunks, int64_t share,
                              bool backwards) {
  const int64_t longest = backwards ? 3 * share / 4 : share;
  return {segments, segment_chunks, std::max(segment_chunks, longest), backwards};
}

}  // namespace selective_scan::cuda
