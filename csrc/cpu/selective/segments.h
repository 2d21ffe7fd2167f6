// Sequences in segments, for groups of few channels.
//
// Lanes are channels as long as these fill the vectors. A group of few channels would leave most
// lanes idle and, with a small batch, most threads. Its sequences are cut into segments instead,
// which are the lanes, in three passes: the affine map that each segment applies to a state
// (Kernels::forward_maps), the states between the segments from these (here), and the scan itself.
// The first costs most of a forward scan and a third of a backward scan, where saved states spare
// the states' part. How sequences are cut follows from the shape and the vectors' width alone, so
// that results do not depend on the number of threads.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace selective_scan::cpu {

/// `present` where segments use the lanes better; without memory for its arrays yet.
Segmentation segmentation_of(const ScanParams& params, int64_t lanes);

/// Takes the memory for its arrays.
void take_arrays(Segmentation& segmentation, const ScanParams& params, Arena& arena);

/// Of one channel: the states between its segments, from the initial state on, and the last state.
void join_segments(const ForwardParams& params, const Segmentation& segmentation, int64_t batch,
                   int64_t channel);

/// Their gradients, from that of the last state back to that of the initial state.
void join_segments(const BackwardParams& params, const Segmentation& segmentation, int64_t batch,
                   int64_t channel);

}  // namespace selective_scan::cpu
