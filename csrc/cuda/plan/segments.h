// Cutting time into segments that run at the same time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../../core/params.h"
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

/// Of a segment's steps the part that is summarized: of packed sequences what lies behind the last
/// beginning in it, or before the first end, if these lie at random.
inline double summarized_part(const ScanParams& params, int64_t segment_steps) {
  if (!params.packed.present()) return 1;
  const double beginnings = static_cast<double>(segment_steps) *
                            static_cast<double>(params.packed.count) /
                            static_cast<double>(params.packed.total);
  return beginnings > 0 ? (1 - std::exp(-beginnings)) / beginnings : 1;
}

}  // namespace selective_scan::cuda
