// Cutting time into segments that run at the same time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../kit/geometry.h"

namespace selective_scan::cuda {

/// Below this a segment's summary and start cost more than what runs at the same time saves.
constexpr int64_t kMinSegmentSteps = 512;

/// Blocks per multiprocessor, so that they finish together.
constexpr int64_t kSegmentBlocks = 4;

/// Cuts time into `wanted` segments or, where these would be short, into fewer.
inline void cut_time(int64_t seqlen, int64_t wanted, Geometry& geometry) {
  const int64_t segments = std::min(wanted, seqlen / kMinSegmentSteps);
  if (segments < 2) return;
  geometry.segment_steps = round_up(ceil_div(seqlen, segments), kChunk);
  geometry.segments = ceil_div(seqlen, geometry.segment_steps);
  geometry.work_items *= geometry.segments;
}

}  // namespace selective_scan::cuda
