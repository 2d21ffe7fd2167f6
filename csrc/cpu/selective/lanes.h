// The mapping of a vector's lanes to channels, groups or segments.
//
// Lanes are usually consecutive channels of one group. If a group has so few channels that most
// lanes would idle, they are channels of consecutive groups, one per group, or consecutive segments
// of one channel's sequence (segments.h), each of which starts at its own step. The kernels are the
// same for all mappings: only the distance between the lanes' elements differs, and lanes of one
// group share B and C.
#pragma once

#include <cstdint>

#include "../simd/tile.h"
#include "../work.h"

namespace selective_scan::cpu {

/// One vector's lanes.
struct Lanes {
  const Block& block;
  int64_t channel = 0;  // of the first lane
  int64_t count = 0;
  int64_t first_step = 0;     // of the first lane
  int64_t steps = 0;          // of each
  int64_t segment_steps = 0;  // between the first steps of two lanes; 0: lanes are channels
  int64_t channels = 0;       // between the channels of two lanes
  bool are_groups = false;

  SELECTIVE_SCAN_HD bool are_segments() const { return segment_steps > 0; }
  SELECTIVE_SCAN_HD bool share_projections() const { return !are_segments() && !are_groups; }

  /// Returns the distance between two lanes in an array with steps.
  SELECTIVE_SCAN_HD int64_t stride(const ArrayView& view) const {
    return segment_steps * view.step + channel_stride(view);
  }
  /// Returns the distance between two lanes in an array without steps.
  SELECTIVE_SCAN_HD int64_t channel_stride(const ArrayView& view) const {
    return channels * view.channel;
  }
  /// Returns the distance between two lanes in a variable B or C that they do not share.
  SELECTIVE_SCAN_HD int64_t projection_stride(const ArrayView& view) const {
    return are_segments() ? segment_steps * view.step : view.group;
  }
};

template <class R>
SELECTIVE_SCAN_HD int64_t num_vectors(const Block& block) {
  if (block.segmentation.lanes_are_segments()) return block.channels;
  return block.lanes_are_groups ? block.lane_channels : ceil_div(block.channels, R::kWidth);
}

/// Returns whether lanes share variable B and C.
SELECTIVE_SCAN_HD bool shares_projections(const Block& block) {
  return !block.segmentation.lanes_are_segments() && !block.lanes_are_groups;
}

template <class R>
SELECTIVE_SCAN_HD Lanes lanes_of(const Block& block, int64_t vector) {
  const Segmentation& segmentation = block.segmentation;
  Lanes lanes{block};
  lanes.first_step = block.first_step;
  lanes.steps = block.steps;
  if (segmentation.lanes_are_segments()) {
    lanes.channel = block.first_channel + vector;
    lanes.count = segmentation.count - block.segment();
    lanes.segment_steps = segmentation.steps;
  } else if (block.lanes_are_groups) {
    lanes.channel = block.first_channel + vector;
    lanes.count = block.channels / block.lane_channels;
    lanes.channels = block.lane_channels;
    lanes.are_groups = true;
  } else {
    lanes.channels = 1;
    lanes.channel = block.first_channel + vector * R::kWidth;
    lanes.count = block.channels - vector * R::kWidth;
  }
  lanes.count = lesser_of(R::kWidth, lanes.count);
  return lanes;
}

/// The next steps of a vector's lanes. All lanes have `steps` steps, unless the last segment ends
/// earlier: then `whole_lanes` lanes have `steps`, and the lane after these has `rest`.
struct Chunk {
  const Lanes& lanes;
  int64_t first_step = 0;  // of the first lane
  int64_t steps = 0;
  int64_t whole_lanes = 0;
  int64_t rest = 0;

  SELECTIVE_SCAN_HD bool is_ragged() const { return whole_lanes < lanes.count; }
  /// Return whether the chunk is the first, or the last, of each lane.
  SELECTIVE_SCAN_HD bool is_first() const { return first_step == lanes.first_step; }
  SELECTIVE_SCAN_HD bool is_last() const {
    return first_step + kStateChunk >= lanes.first_step + lanes.steps;
  }
};

/// Returns the chunk `offset` steps after each lane's first step.
SELECTIVE_SCAN_HD Chunk chunk_at(const ScanParams& params, const Lanes& lanes, int64_t offset) {
  Chunk chunk{lanes};
  chunk.first_step = lanes.first_step + offset;
  chunk.whole_lanes = lanes.count;
  chunk.steps = lesser_of(kStateChunk, lanes.steps - offset);
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

/// Returns the section (step, lane) of an array with steps; `offset` is the element (batch, channel
/// or group, 0).
SELECTIVE_SCAN_HD Section step_section(const ArrayView& view, int64_t offset, int64_t lane_stride,
                                       const Chunk& chunk) {
  return {element_at(view, offset + chunk.first_step * view.step),
          view.dtype,
          chunk.steps,
          chunk.whole_lanes,
          view.step,
          lane_stride};
}

/// Returns the lane after those of a section.
SELECTIVE_SCAN_HD Section next_lane(Section section, int64_t rows) {
  section.data = element_at(section, section.lanes * section.lane_stride);
  section.lanes = 1;
  section.rows = rows;
  return section;
}

/// Loads the steps of all lanes; steps that the last segment lacks become 0.
template <class R>
void load_steps(const Section& section, const Chunk& chunk, typename R::Scalar* tile) {
  if (chunk.is_ragged()) memset(tile, 0, chunk.steps * sizeof(R));
  load_tile<R>(section, tile, R::kWidth);
  if (chunk.is_ragged() && chunk.rest > 0) {
    load_lane<R>(next_lane(section, chunk.rest), tile + chunk.whole_lanes, R::kWidth);
  }
}

template <class R>
void store_steps(const Section& section, const Chunk& chunk, const typename R::Scalar* tile) {
  store_tile<R>(section, tile, R::kWidth);
  if (chunk.is_ragged() && chunk.rest > 0) {
    store_lane<R>(next_lane(section, chunk.rest), tile + chunk.whole_lanes, R::kWidth);
  }
}

/// Sets the steps that a segment lacks to 0, so that they have no effect.
template <class R>
void clear_steps_beyond(const Chunk& chunk, R* steps) {
  using T = typename R::Scalar;
  if (!chunk.is_ragged()) return;
  T* tile = reinterpret_cast<T*>(steps);
  for (int64_t t = chunk.rest; t < chunk.steps; ++t) {
    tile[t * R::kWidth + chunk.whole_lanes] = T(0);
  }
}

}  // namespace selective_scan::cpu
