// Packed sequences as kernels take them that know whole chunks alone: every sequence begins with a
// chunk of its own, and its last one may have fewer steps.
//
// That makes of packed sequences one batch entry, longer by what the last chunks lack. Which steps
// its chunks have is written on the device, so that boundaries may change from one replay of a CUDA
// graph to the next.
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "config.h"

namespace selective_scan::cuda {

struct alignas(16) PackedChunk {
  int first_step = 0;  // in the order of the scan, as all else
  int sequence = 0;
  int saved = 0;      // the row of the saved state behind it, if it is not its sequence's last
  int16_t steps = 0;  // 0: there is no such chunk
  bool is_first = false;
  bool is_last = false;
};

/// A part of the chunks, which a block has of some channels. Those behind the chunks in memory come
/// longest first: multiprocessors that take them in this order end at the same time. Summaries have
/// an order of their own, for many have nothing to do: see PackedCuts.
struct alignas(16) PackedSegment {
  int number = 0;  // in the order of the scan
  int first_chunk = 0;
  int chunks = 0;      // there may be none
  int summarized = 0;  // the place of the one that summaries have here
};

/// This says where packed sequences are cut into segments. A cut between two sequences is free:
/// nothing has to be known of what comes before it. So the k-th segment begins with the sequence
/// that has chunk k · segment_chunks. Only one that is longer than `uncut_chunks` is cut itself,
/// into pieces of segment_chunks and one that is the longer for it: the last one, or the first one
/// if `backwards`, which is the piece that no other one has to wait for.
struct PackedCuts {
  int64_t segments = 1;
  int64_t segment_chunks = 0;
  int64_t uncut_chunks = 0;
  bool backwards = false;

  /// How much of a segment is summarized. Where a sequence ends with it, or backwards begins, that
  /// is nothing.
  SELECTIVE_SCAN_HD int summarized_chunks(const PackedSegment& segment,
                                          const PackedChunk* chunks) const {
    if (segment.chunks == 0) return 0;
    const PackedChunk* const first = chunks + segment.first_chunk;
    return (backwards ? first->is_first : first[segment.chunks - 1].is_last) ? 0 : segment.chunks;
  }

  /// What segment `number` begins with, of `count` chunks: no less than what the one before begins
  /// with.
  SELECTIVE_SCAN_HD int first_chunk(int64_t number, const PackedSequences& packed,
                                    const PackedChunk* chunks, int count) const {
    const int64_t wanted = number * segment_chunks;
    if (number == 0) return 0;
    if (number >= segments || wanted >= count) return count;
    const PackedChunk chunk = chunks[backwards ? wanted - 1 : wanted];
    const int64_t begin = packed.begin(chunk.sequence);
    const int64_t length = ceil_div(packed.end(chunk.sequence) - begin, kChunk);
    const int64_t before = (chunk.first_step - begin) / kChunk;  // chunks of the sequence
    // How far it is from there to where the sequence begins, or ends, and how many cuts lie there.
    const int64_t rest = backwards ? length - 1 - before : before;
    const int64_t most =
        length > uncut_chunks ? ceil_div(length - uncut_chunks, segment_chunks) : 0;
    const int64_t passed = rest / segment_chunks;
    const int64_t pieces = passed < most ? passed : most;
    const int64_t distance = rest - pieces * segment_chunks;
    const int64_t cut = backwards ? wanted + distance : wanted - distance;
    return cut < count ? static_cast<int>(cut) : count;
  }
};

/// A thread each of the block that cuts.
constexpr int64_t kMostPackedSegments = 1024;

/// How many chunks there may be, whatever the boundaries.
inline int64_t most_packed_chunks(const PackedSequences& packed) {
  const int64_t chunks = packed.total / kChunk + packed.count;
  return chunks < packed.total ? chunks : packed.total;
}

/// Returns the bytes of the chunks in memory, behind a header of the same size that tells their
/// number, and of the segments behind them.
inline int64_t packed_chunk_bytes(const PackedSequences& packed, int64_t segments) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(PackedChunk));
  static_assert(sizeof(PackedSegment) == kBytes);
  return packed.present() ? (1 + most_packed_chunks(packed) + segments) * kBytes : 0;
}

/// A call with the steps of all chunks that there may be for its steps.
template <class Params>
Params in_chunks(const Params& params) {
  Params result = params;
  if (params.packed.present()) result.seqlen = most_packed_chunks(params.packed) * kChunk;
  return result;
}

}  // namespace selective_scan::cuda
