// The measured numbers by which plans choose a path for a call of the selective scan and divide its
// work, in so far as the figures of the device do not decide.
//
// There is one table for each generation of GPUs that was measured; other GPUs use the nearest one.
// benchmarks/compare_paths.py shows, on the GPU at hand, whether the paths that they choose for
// users' calls are the best or within 10 % of it.
#pragma once

#include <cstdint>

#include "device.h"

namespace selective_scan::cuda {

/// The numbers for Hopper, measured on an H200. The table of another generation names the
/// differences.
struct Figures {
  /// The choice of a path: see plan.cpp, and slices.cpp for copies.
  struct Choice {
    /// Sequences with fewer steps are short.
    int64_t short_steps = 1024;

    /// narrow takes calls with at least this many of its warps per multiprocessor.
    int64_t narrow_warps = 3;
    /// Backward, it also takes calls with fewer, if a lane updates its states at most this often.
    int64_t narrow_lane_updates = 200;

    /// Forward and backward: with fewer warps of eight channels than this per multiprocessor,
    /// dstate1 gives each warp one channel, provided that a sequence has at least
    /// dstate1_long_steps times the square of that number of warps. More warps do more work in
    /// total, but their gain grows with the steps. By the same rule with dstate1_shared_steps, four
    /// warps share a channel.
    double dstate1_long_warps[2] = {16, 4};
    double dstate1_long_steps = 64;
    double dstate1_shared_steps = 256;
    /// Backward, the waits of warps that share channels take as long as the work of this many
    /// warps.
    double dstate1_wait = 30;
    /// dstate1 has no segments. With fewer rows than this, over all batch entries, it only takes
    /// sequences of up to dstate1_most_steps per warp that shares a channel.
    int64_t dstate1_rows = 192;
    int64_t dstate1_most_steps = 8192;
    /// With several states, dstate1's backward pass takes sequences of up to this many steps,
    /// divided by the warps that share a channel.
    int64_t dstate1_states_steps = 2048;

    /// prompt takes sequences of up to prompt_steps, or of up to prompt_channel_steps times the
    /// channels per multiprocessor.
    int64_t prompt_steps = 3072;
    int64_t prompt_channel_steps = 680;
    /// prompt's lanes hold one state each if a multiprocessor then has at most this many scanning
    /// warps.
    int prompt_scanners = 8;

    /// streamed has no segments with constant B and C. It takes such sequences if they are short,
    /// or if it has at least this many warps per multiprocessor.
    double constant_warps = 1;

    /// streamed takes packed sequences with at least this many steps on average, and this many
    /// elements in total. These limits are by count, not measured.
    int64_t packed_steps = 4;
    int64_t packed_elements = int64_t{1} << 17;

    /// Copies cost too many launches for fewer elements than this, and too much memory for more.
    /// Calls that would run on the floor gain so much that copies pay from fewer elements on. Rows
    /// that are not vectors cost more in the forward pass.
    int64_t fewest_copied_forward = int64_t{1} << 19;
    int64_t fewest_copied_backward = int64_t{1} << 20;
    int64_t fewest_copied_for_floor = int64_t{1} << 17;
    int64_t most_copied = int64_t{1} << 28;
  } choice;

  struct Segments {
    /// Shorter segments do not pay, on the floor and for packed sequences: their summaries and
    /// starts cost more than the parallelism saves.
    int64_t steps = 512;
    /// With this many blocks per multiprocessor, the multiprocessors finish together.
    int64_t blocks = 4;
    /// Segments of packed sequences differ in length. With this many for each block that the device
    /// can hold at a time, all finish together.
    int64_t packed_waves_forward = 8;
    int64_t packed_waves_backward = 12;
  } segments;

  /// The estimate by which streamed_forward.cpp chooses the number of warps and of segments. The
  /// unit of time is what a warp's share of a busy multiprocessor takes for one chunk.
  struct StreamedForward {
    /// The first warps wait this long; each warp hides this fraction of the wait.
    double wait = 4.4;
    double hidden = 0.4;
    /// A block also waits for its B and C.
    double ring = 0.25;
    /// A block begins with a delay, which the blocks that run with it share.
    double delay = 12;
    /// Each block deals its warps anew, so some schedulers have more warps. This fraction of a
    /// block's warps counts as if all schedulers had as many as the fullest.
    double fullest = 0.67;

    /// Summarizing the segments takes this fraction of the scan's time, and a delay.
    double summary_share = 0.8;
    double summary_delay = 40;
    /// A single wave of segments loses this fraction of the time, several waves less.
    double unevenness = 0.08;
    /// Each warp of a block costs this fraction of the time.
    double coupling = 0.01;
    /// Kernels with fewer warps per multiprocessor lose this fraction of the time.
    double sparse = 0.02;
    /// From this number of warps per multiprocessor on, segments do not pay.
    double many_warps = 6;
    /// A segment has at least this many chunks.
    int64_t segment_chunks = 8;
  } streamed_forward;

  /// The estimate by which streamed_backward.cpp chooses warps and tiles.
  struct StreamedBackward {
    /// With w warps, a multiple of four, a multiprocessor issues at w / (w + half_rate_warps) of
    /// its full rate. Other numbers of warps take as long as their fullest scheduler. So the unit
    /// of time is the time of a chunk over w + half_rate_warps.
    int half_rate_warps = 6;
    /// A block begins with a delay. Segments add another one, for the kernels that summarize and
    /// combine them.
    double delay = 14;
    double segments_delay = 18;
    /// A chunk and its summary take this many times as long as the chunk alone.
    double summarized = 1.27;
    /// Tiles with fewer steps finish too soon for blocks to wait for one another.
    int64_t ordered_steps = 256;
    /// Splitting tiles does not pay if whole tiles keep this fraction of the multiprocessors busy.
    double good_balance = 0.92;
    /// Split tiles take this many times as long, because more blocks begin and end.
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
