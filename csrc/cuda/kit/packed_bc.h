// Variable B and C in the form that warps read best: fp32, every step's states side by side, in the
// order of the scan.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../core/params.h"
#include "config.h"

namespace selective_scan::cuda {

/// An array (batch·group, step, B states | C states) of float or Complex<float>. States are padded
/// to `padded_states` and steps to whole chunks of kChunk, with zeros; so is the half of a
/// projection that is constant. Where states are cut into slices, it is (batch·group, chunk, slice,
/// step of the chunk, B states of the slice | C states).
struct PackedBC {
  int64_t chunks;   // of a sequence
  int chunk_bytes;  // these are contiguous, one chunk after another

  PackedBC(const ScanParams& params, int padded_states)
      : chunks(ceil_div(params.seqlen, kChunk)),
        chunk_bytes(kChunk * 2 * padded_states * (params.is_complex ? 2 : 1) *
                    static_cast<int>(sizeof(float))) {}

  SELECTIVE_SCAN_HD int64_t sequence_bytes() const { return chunks * chunk_bytes; }
  int64_t bytes(const ScanParams& params) const {
    return params.batch * params.groups * sequence_bytes();
  }
};

/// Words that are to be 0 before kernels behind the conversion use them.
struct ClearedWords {
  int* words = nullptr;
  int count = 0;
};

/// Writes B and C of a scan in fp32 to `stream`, aligned to 16 bytes. A kernel launched behind this
/// one may be a dependent launch (see dependent_launch.cuh). 16 real states are the least that a
/// slice has.
cudaError_t convert_projections(const ScanParams& params, int padded_states, void* stream_memory,
                                cudaStream_t stream, int slices = 1, ClearedWords cleared = {});

}  // namespace selective_scan::cuda
