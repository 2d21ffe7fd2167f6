// Packed sequences in the form for kernels that only know whole chunks: every sequence begins with
// a chunk of its own, and its last chunk may have fewer steps.
//
// This turns packed sequences into one batch entry that is longer by what the last chunks lack. The
// steps of its chunks are computed on the device, so boundaries may change between replays of a
// CUDA graph.
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "config.h"

namespace selective_scan::cuda {

struct alignas(16) PackedChunk {
  int first_step = 0;  // in the order of the scan
  int sequence = 0;
  int saved = 0;      // the row of the state saved after it; unused in a sequence's last chunk
  int16_t steps = 0;  // 0: there is no such chunk
  bool is_first = false;
  bool is_last = false;
};

/// A range of chunks that a block processes for some channels. In memory, the segments lie after
/// the chunks, the longest first: multiprocessors that take them in this order finish at the same
/// time. Summaries are taken in a separate order, because many segments have nothing to summarize:
/// see PackedCuts.
struct alignas(16) PackedSegment {
  int number = 0;  // in the order of the scan
  int first_chunk = 0;
  int chunks = 0;      // may be 0
  int summarized = 0;  // the position of the segment with this entry's rank among the summaries
};

/// Determines where packed sequences are cut into segments. A cut between two sequences is free: no
/// state crosses it. So the k-th segment begins with the sequence that contains chunk k ·
/// segment_chunks or, if `backwards`, after the one that contains the chunk before that. Only a
/// sequence longer than `uncut_chunks` is cut itself, into pieces of segment_chunks and a longer
/// one with the rest: the last or, if `backwards`, the first, for which no other piece waits.
struct PackedCuts {
  int64_t segments = 1;
  int64_t segment_chunks = 0;
  int64_t uncut_chunks = 0;
  bool backwards = false;

  /// Returns how many chunks of a segment are summarized. If a sequence ends with the segment, or
  /// begins with it if `backwards`, that is none.
  SELECTIVE_SCAN_HD int summarized_chunks(const PackedSegment& segment,
                                          const PackedChunk* chunks) const {
    if (segment.chunks == 0) return 0;
    const PackedChunk* const first = chunks + segment.first_chunk;
    return (backwards ? first->is_first : first[segment.chunks - 1].is_last) ? 0 : segment.chunks;
  }

  /// Returns the first of `count` chunks in segment `number`, which does not precede the previous
  /// segment's first chunk.
  SELECTIVE_SCAN_HD int first_chunk(int64_t number, const PackedSequences& packed,
                                    const PackedChunk* chunks, int count) const {
    const int64_t wanted = number * segment_chunks;
    if (number == 0) return 0;
    if (number >= segments || wanted >= count) return count;
    const PackedChunk chunk = chunks[backwards ? wanted - 1 : wanted];
    const int64_t begin = packed.begin(chunk.sequence);
    const int64_t length = ceil_div(packed.end(chunk.sequence) - begin, kChunk);
    const int64_t before = (chunk.first_step - begin) / kChunk;  // chunks of the sequence
    // The distance to the beginning (or end) of the sequence, and the number of cuts within it.
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

/// The block that cuts has one thread per segment.
constexpr int64_t kMostPackedSegments = 1024;

/// Returns the largest possible number of chunks, whatever the boundaries are.
inline int64_t most_packed_chunks(const PackedSequences& packed) {
  const int64_t chunks = packed.total / kChunk + packed.count;
  return chunks < packed.total ? chunks : packed.total;
}

/// Returns the bytes of the chunks in memory, of a header of a chunk's size before them that holds
/// their number, and of the segments after them.
inline int64_t packed_chunk_bytes(const PackedSequences& packed, int64_t segments) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(PackedChunk));
  static_assert(sizeof(PackedSegment) == kBytes);
  return packed.present() ? (1 + most_packed_chunks(packed) + segments) * kBytes : 0;
}

/// Returns a call whose seqlen is that of the largest possible number of chunks.
template <class Params>
Params in_chunks(const Params& params) {
  Params result = params;
  if (params.packed.present()) result.seqlen = most_packed_chunks(params.packed) * kChunk;
  return result;
}

}  // namespace selective_scan::cuda
