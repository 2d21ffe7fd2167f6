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

/// How many chunks there may be, whatever the boundaries.
inline int64_t most_packed_chunks(const PackedSequences& packed) {
  const int64_t chunks = packed.total / kChunk + packed.count;
  return chunks < packed.total ? chunks : packed.total;
}

/// Of the chunks in memory, which a header of the same size tells the number of.
inline int64_t packed_chunk_bytes(const PackedSequences& packed) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(PackedChunk));
  return packed.present() ? (1 + most_packed_chunks(packed)) * kBytes : 0;
}

/// A call with the steps of all chunks that there may be for its steps.
template <class Params>
Params in_chunks(const Params& params) {
  Params result = params;
  if (params.packed.present()) result.seqlen = most_packed_chunks(params.packed) * kChunk;
  return result;
}

}  // namespace selective_scan::cuda
