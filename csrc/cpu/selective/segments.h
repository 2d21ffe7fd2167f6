// Sequences in segments of time, where channels are too few.
//
// Lanes are channels and a thread takes some vectors of them as long as there are enough for all
// threads. Sequences are cut into segments where a group has so few channels that most lanes would
// idle: then segments are the lanes. Or where there are few vectors of channels: then a vector
// walks segment after segment, and idle threads may begin with later ones.
//
// The state behind a segment is that before it, by the segment's affine map, so it has the same
// bits whoever finds the map and when: Kernels::forward_maps ahead of the scan, at most of its cost
// (a third of it on the way back, where saved states spare the states' part), or the scan itself
// on its way (Block::finds_map), for an operation or two per state. How sequences are cut follows
// from the shape and the vectors' width alone. So results do not depend on the number of threads.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace selective_scan::cpu {

/// `present` where lanes would idle, or threads in a pass that gives each of them at least
/// `chain_channels` channels; without memory for its arrays yet.
Segmentation segmentation_of(const ScanParams& params, const Partition& partition, int64_t lanes,
                             int64_t chain_channels);

/// Whether the lanes of a vector are channels of as many groups.
bool lanes_are_groups(const ScanParams& params, int64_t lanes);

/// Takes the memory for its arrays.
void take_arrays(Segmentation& segmentation, const ScanParams& params, Arena& arena);

/// Finds the states of one channel behind segments `begin` to `end` - 1, from their maps and the
/// state before them.
void join_segments(const ForwardParams& params, const Segmentation& segmentation, int64_t batch,
                   int64_t channel, int64_t begin, int64_t end);

/// Stores the factor of the map of all steps of one channel, from those of the segments.
void store_map_factor(const ForwardParams& params, const Segmentation& segmentation, int64_t batch,
                      int64_t channel);

/// The gradients of the states before segments, which count from the last one back.
void join_segments(const BackwardParams& params, const Segmentation& segmentation, int64_t batch,
                   int64_t channel, int64_t begin, int64_t end);

}  // namespace selective_scan::cpu
