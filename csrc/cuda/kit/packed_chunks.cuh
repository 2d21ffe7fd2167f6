// The chunks of packed sequences in memory.
#pragma once

#include <cuda_runtime_api.h>

#include "packed_chunks.h"

namespace selective_scan::cuda {

/// The chunks in the order of the scan, sequence after sequence, and the segments that they are cut
/// into.
class PackedChunks {
 public:
  /// The memory must be aligned to 16 bytes.
  explicit SELECTIVE_SCAN_HD PackedChunks(const void* memory)
      : memory_(static_cast<const int4*>(memory)) {}

  SELECTIVE_SCAN_HD bool present() const { return memory_ != nullptr; }

  /// Returns the number of chunks.
  __device__ __forceinline__ int count() const { return __ldg(memory_).x; }

  /// Returns a chunk; entries past count() are empty.
  __device__ __forceinline__ PackedChunk operator[](int64_t chunk) const {
    const int4 words = __ldg(memory_ + 1 + chunk);
    PackedChunk result;
    result.first_step = words.x;
    result.sequence = words.y;
    result.saved = words.z;
    result.steps = static_cast<int16_t>(words.w & 0xffff);
    result.is_first = (words.w >> 16 & 0xff) != 0;
    result.is_last = words.w >> 24 != 0;
    return result;
  }

  /// Returns the segment of this rank by length, the longest first. `most` is most_packed_chunks().
  __device__ __forceinline__ PackedSegment segment(int64_t rank, int64_t most) const {
    const int4 words = __ldg(memory_ + 1 + most + rank);
    return {words.x, words.y, words.z, words.w};
  }
  /// Returns the segment of this rank by the part that is summarized, the longest first.
  __device__ __forceinline__ PackedSegment summarized_segment(int64_t rank, int64_t most) const {
    return segment(segment(rank, most).summarized, most);
  }

 private:
  const int4* memory_;
};

/// Writes packed_chunk_bytes() bytes: the chunks and the segments.
cudaError_t write_packed_chunks(const PackedSequences& packed, const PackedCuts& cuts, void* memory,
                                cudaStream_t stream);

}  // namespace selective_scan::cuda
