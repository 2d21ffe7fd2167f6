// Variable B and C in the form that warps read best: fp32, the states of each step contiguous,
// steps in the order of the scan.
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "config.h"
#include "packed_chunks.h"

namespace selective_scan::cuda {

/// An array (batch·group, step, B states | C states) of float or Complex<float>. States are padded
/// with zeros to `padded_states`, and steps to whole chunks of kChunk. If states are cut into
/// slices, it is (batch·group, chunk, slice, step of the chunk, B states of the slice | C states).
/// Packed sequences are stored in chunks; PackedChunks after the array describe them.
struct PackedBC {
  int64_t chunks;   // per sequence
  int chunk_bytes;  // the chunks are contiguous, one after another

  PackedBC(const ScanParams& params, int padded_states)
      : chunks(ceil_div(params.seqlen, kChunk)),
        chunk_bytes(kChunk * 2 * padded_states * (params.is_complex ? 2 : 1) *
                    static_cast<int>(sizeof(float))) {}

  SELECTIVE_SCAN_HD int64_t sequence_bytes() const { return chunks * chunk_bytes; }
  SELECTIVE_SCAN_HD int64_t projection_bytes(const ScanParams& params) const {
    return params.batch * params.groups * sequence_bytes();
  }
  int64_t bytes(const ScanParams& params, int64_t segments = 1) const {
    return projection_bytes(params) + packed_chunk_bytes(params.packed, segments);
  }
};

}  // namespace selective_scan::cuda
