// The numbers that decide which path runs a call of the selective scan, and how it divides the
// work, where the figures of the device alone do not tell: they were measured.
//
// There is a table for each generation of GPUs that was measured; others take the nearest one's.
// benchmarks/compare_paths.py shows, on the GPU at hand, whether what they choose for users' calls
// is the best path or within 10 % of it.
#pragma once

#include <cstdint>

#include "device.h"

namespace selective_scan::cuda {

/// Those of Hopper, measured on an H200. The table of another generation names what differs.
struct Figures {
  /// Which path is the better choice: see plan.cpp, and slices.cpp for copies.
  struct Choice {
    /// Sequences of fewer steps are short.
    int64_t short_steps = 1024;

    /// narrow takes calls with so many of its warps a multiprocessor.
    int64_t narrow_warps = 3;

    /// dstate1 gives each warp one channel where warps of eight would be fewer a multiprocessor
    /// than these, forward and backward, and a sequence has at least so many steps times the square
    /// of their number. More warps have more work in all, and what they gain grows with the steps.
    /// Likewise four warps share a channel.
    double dstate1_long_warps[2] = {16, 4};
    double dstate1_long_steps = 64;
    double dstate1_shared_steps = 256;
    /// Backward, what warps that share channels wait for takes as long as the work of so many.
    double dstate1_wait = 30;
    /// dstate1 has no segments: fewer rows than these, of all batch entries, it takes up to so many
    /// steps of each warp that shares a channel.
    int64_t dstate1_rows = 192;
    int64_t dstate1_most_steps = 8192;

    /// prompt takes sequences of so many steps, or of so many times the channels that a
    /// multiprocessor has.
    int64_t prompt_steps = 3072;
    int64_t prompt_channel_steps = 680;
    /// prompt's lanes have one state each where a multiprocessor then has no more scanning warps.
    int prompt_scanners = 8;

    /// streamed, which has no segments of constant B and C, takes sequences that are not short if
    /// it has so many warps a multiprocessor.
    double constant_warps = 1;

    /// streamed takes packed sequences that have so many steps on average, and so many elements in
    /// all; this is by count, not measured.
    int64_t packed_steps = 4;
    int64_t packed_elements = int64_t{1} << 17;

    /// The launches of copies cost too much for fewer elements, their memory for more. The floor
    /// takes so much longer that they pay from fewer on, and rows that are no vectors cost more
    /// forward.
    int64_t fewest_copied_forward = int64_t{1} << 19;
    int64_t fewest_copied_backward = int64_t{1} << 20;
    int64_t fewest_copied_for_floor = int64_t{1} << 17;
    int64_t most_copied = int64_t{1} << 28;
  } choice;

  struct Segments {
    /// Summary and start of a shorter segment cost the floor, and packed sequences, more than what
    /// runs at the same time saves.
    int64_t steps = 512;
    /// So many blocks a multiprocessor finish together.
    int64_t blocks = 4;
    /// Segments of packed sequences differ in length: so many for each place that blocks have on
    /// the device at a time let places end together.
    int64_t packed_waves_forward = 8;
    int64_t packed_waves_backward = 12;
  } segments;

  /// By this estimate streamed_forward.cpp takes the number of warps and of segments. The unit of
  /// its times is what a warp's share of a busy multiprocessor takes for one chunk.
  struct StreamedForward {
    /// The first warps wait so long, and each warp hides this part of it.
    double wait = 4.4;
    double hidden = 0.4;
    /// A block has its own B and C to wait for.
    double ring = 0.25;
    /// A block begins with a delay, which those that run with it share.
    double delay = 12;
    /// A block begins with a scheduler of its own, so that some schedulers have more warps: this
    /// part of its warps counts as if all had as many as the fullest.
    double fullest = 0.67;

    /// To find out what segments do takes this part of the time for the scan, and a delay.
    double summary_share = 0.8;
    double summary_delay = 40;
    /// Segments lose this part of the time where there is one wave of them, less where there are
    /// more.
    double unevenness = 0.08;
    /// Each warp of a block costs this part of the time.
    double coupling = 0.01;
    /// Kernels that have fewer warps at hand lose this part of the time.
    double sparse = 0.02;
    /// With so many warps a multiprocessor segments do not pay.
    double many_warps = 6;
    /// A segment has no fewer chunks.
    int64_t segment_chunks = 8;
  } streamed_forward;

  /// With these streamed_backward.cpp chooses warps and tiles.
  struct StreamedBackward {
    /// With w warps, a multiple of four, a multiprocessor issues at w / (w + half_rate_warps) of
    /// its full rate, and fewer take as long as the fullest scheduler does. So the unit of
    /// estimated times is the time of a chunk over w + half_rate_warps.
    int half_rate_warps = 6;
    /// A block begins with a delay, and segments with another one, of the kernels that summarize
    /// and combine them.
    double delay = 14;
    double segments_delay = 18;
    /// A chunk takes so many times the time with its summary.
    double summarized = 1.27;
    /// Tiles of fewer steps are done too soon for a block to wait for another one.
    int64_t ordered_steps = 256;
    /// To split some tiles does not pay where whole ones keep so many multiprocessors busy.
    double good_balance = 0.92;
    /// Split tiles take so many times the time, for more blocks begin and end.
    double split_cost = 1.05;
  } streamed_backward;
};

struct Generation {
  int major;  // of the compute capability
  Figures figures;
};
constexpr Generation kGenerations[] = {{9, {}}};

constexpr const Figures& figures_of(const Device& device) {
  const Generation* nearest = kGenerations;
  const auto distance = [&](const Generation& it) {
    return it.major < device.major ? device.major - it.major : it.major - device.major;
  };
  for (const Generation& it : kGenerations) {
    if (distance(it) < distance(*nearest)) nearest = &it;
  }
  return nearest->figures;
}

}  // namespace selective_scan::cuda
