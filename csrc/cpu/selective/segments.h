// Cuts sequences into segments of time if there are too few channels.
//
// As long as there are enough vectors of channels for all threads, lanes are channels, and a thread
// takes some vectors. Sequences are cut into segments in two cases. If a group has so few channels
// that most lanes would idle, segments are the lanes. If there are few vectors of channels, a
// vector walks segment after segment, and idle threads may begin with later ones.
//
// The state after a segment is its affine map of the state before it, so it has the same bits
// whoever computes the map and when: Kernels::forward_maps ahead of the scan, at most at the scan's
// cost (a third of it on the way back, where saved states spare the states' part), or the scan
// itself as it goes (Block::finds_map), for an operation or two per state. The cuts depend on the
// shape and the vectors' width alone, so results do not depend on the number of threads.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace selective_scan::cpu {

/// Returns the segmentation of a call, without memory for its arrays. It is `present` if lanes
/// would idle, or if threads would in a pass that gives each of them at least `chain_channels`
/// channels.
Segmentation segmentation_of(const ScanParams& params, const Partition& partition, int64_t lanes,
                             int64_t chain_channels);

/// Returns whether the lanes of a vector are channels of different groups.
bool lanes_are_groups(const ScanParams& params, int64_t lanes);

/// Takes the memory for the segmentation's arrays.
void take_arrays(Segmentation& segmentation, const ScanParams& params, Arena& arena);

/// Computes the states of one channel after segments `begin` to `end` - 1, from their maps and the
/// state before the first of them.
void join_segments(const ForwardParams& params, const Segmentation& segmentation, int64_t batch,
                   int64_t channel, int64_t begin, int64_t end);

/// Computes and stores the factor of one channel's map over all steps, from those of the segments.
void store_map_factor(const ForwardParams& params, const Segmentation& segmentation, int64_t batch,
                      int64_t channel);

/// Computes the gradients of the states before segments, which are counted from the last one back.
void join_segments(const BackwardParams& params, const Segmentation& segmentation, int64_t batch,
                   int64_t channel, int64_t begin, int64_t end);

}  // namespace selective_scan::cpu
