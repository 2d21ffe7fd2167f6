// What the lanes of a vector are.
//
// Usually consecutive channels, each through all steps. Where a group has so few channels that most
// lanes would idle, they are consecutive segments of one channel's sequence (segments.h), which
// start at steps of their own. The kernels are the same for both: lanes differ in the distance
// between their elements alone.
#pragma once

#include <cstdint>

#include "../simd/tile.h"
#include "../work.h"

namespace selective_scan::cpu {

/// One vector's lanes.
struct Lanes {
  int64_t channel = 0;  // of the first lane
  int64_t count = 0;
  int64_t first_step = 0;     // of the first lane
  int64_t segment_steps = 0;  // between the first steps of two lanes; 0: lanes are channels

  SELECTIVE_SCAN_HD bool are_segments() const { return segment_steps > 0; }

  /// The distance of two lanes in a sequence.
  SELECTIVE_SCAN_HD int64_t stride(const ArrayView& view) const {
    return are_segments() ? segment_steps * view.step : view.channel;
  }
  /// In an array without steps.
  SELECTIVE_SCAN_HD int64_t channel_stride(const ArrayView& view) const {
    return are_segments() ? 0 : view.channel;
  }
};

template <class R>
SELECTIVE_SCAN_HD int64_t num_vectors(const Block& block) {
  return block.segmentation.present() ? block.channels : ceil_div(block.channels, R::kWidth);
}

template <class R>
SELECTIVE_SCAN_HD Lanes lanes_of(const Block& block, int64_t vector) {
  const Segmentation& segmentation = block.segmentation;
  Lanes lanes;
  if (segmentation.present()) {
    const int64_t first = block.segment_set * R::kWidth;
    lanes.channel = block.first_channel + vector;
    lanes.count = segmentation.count - first;
    lanes.first_step = first * segmentation.steps;
    lanes.segment_steps = segmentation.steps;
  } else {
    lanes.channel = block.first_channel + vector * R::kWidth;
    lanes.count = block.channels - vector * R::kWidth;
  }
  if (lanes.count > R::kWidth) lanes.count = R::kWidth;
  return lanes;
}

/// How many steps each lane of a block has to walk.
SELECTIVE_SCAN_HD int64_t steps_of(const ScanParams& params, const Block& block) {
  return block.segmentation.present() ? block.segmentation.steps : params.seqlen;
}

/// The next steps of a vector's lanes. All have `steps`, or the last segment ends before: then
/// `whole_lanes` have, and the lane behind them has `rest`.
struct Chunk {
  int64_t offset = 0;  // from each lane's first step
  int64_t steps = 0;
  int64_t whole_lanes = 0;
  int64_t rest = 0;
};

SELECTIVE_SCAN_HD Chunk chunk_at(const ScanParams& params, const Lanes& lanes, int64_t offset) {
  Chunk chunk;
  chunk.offset = offset;
  chunk.whole_lanes = lanes.count;
  const int64_t of_lane = lanes.are_segments() ? lanes.segment_steps : params.seqlen;
  chunk.steps = of_lane - offset < kStateChunk ? of_lane - offset : kStateChunk;
  if (!lanes.are_segments()) return chunk;
  const int64_t last_lane = lanes.first_step + (lanes.count - 1) * lanes.segment_steps;
  const int64_t left = params.seqlen - last_lane - offset;
  if (left < chunk.steps) {
    chunk.whole_lanes = lanes.count - 1;
    chunk.rest = left > 0 ? left : 0;
    if (chunk.whole_lanes == 0) chunk.steps = chunk.rest;
  }
  return chunk;
}

SELECTIVE_SCAN_HD void* element_at(const ArrayView& view, int64_t offset) {
  return static_cast<char*>(view.data) + offset * element_size(view.dtype);
}

/// (step, lane) of an array with steps, from its element (batch, channel or group, first step).
SELECTIVE_SCAN_HD Section step_section(const ArrayView& view, int64_t offset, const Lanes& lanes,
                                       const Chunk& chunk) {
  const int64_t first = lanes.first_step + chunk.offset;
  return {element_at(view, offset + first * view.step),
          view.dtype,
          chunk.steps,
          chunk.whole_lanes,
          view.step,
          lanes.stride(view)};
}

/// The lane behind those of a section.
SELECTIVE_SCAN_HD Section next_lane(Section section, int64_t rows) {
  section.data = static_cast<char*>(section.data) +
                 section.lanes * section.lane_stride * element_size(section.dtype);
  section.lanes = 1;
  section.rows = rows;
  return section;
}

/// Loads the steps of all lanes; what the last segment lacks becomes 0.
template <class R>
void load_steps(const Section& section, const Lanes& lanes, const Chunk& chunk,
                typename R::Scalar* tile) {
  if (chunk.whole_lanes < lanes.count) memset(tile, 0, chunk.steps * sizeof(R));
  load_tile<R>(section, tile, R::kWidth);
  if (chunk.whole_lanes < lanes.count && chunk.rest > 0) {
    load_lane<R>(next_lane(section, chunk.rest), tile + chunk.whole_lanes, R::kWidth);
  }
}

template <class R>
void store_steps(const Section& section, const Lanes& lanes, const Chunk& chunk,
                 const typename R::Scalar* tile) {
  store_tile<R>(section, tile, R::kWidth);
  if (chunk.whole_lanes < lanes.count && chunk.rest > 0) {
    store_lane<R>(next_lane(section, chunk.rest), tile + chunk.whole_lanes, R::kWidth);
  }
}

/// Makes 0 what a segment does not have, so that nothing happens there.
template <class R>
void clear_steps_beyond(const Lanes& lanes, const Chunk& chunk, R* steps) {
  using T = typename R::Scalar;
  if (chunk.whole_lanes == lanes.count) return;
  T* tile = reinterpret_cast<T*>(steps);
  for (int64_t t = chunk.rest; t < chunk.steps; ++t) {
    tile[t * R::kWidth + chunk.whole_lanes] = T(0);
  }
}

}  // namespace selective_scan::cpu
