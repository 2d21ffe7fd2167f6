// Writes variable B and C in the form that packed_bc_layout.h tells of.
#pragma once

#include <cuda_runtime_api.h>

#include "packed_bc_layout.h"

namespace selective_scan::cuda {

/// Words that are to be 0 before kernels behind the conversion use them.
struct ClearedWords {
  int* words = nullptr;
  int count = 0;
};

/// Writes B and C of a scan in fp32 to `stream`, aligned to 16 bytes. A kernel launched behind this
/// one may be a dependent launch (see dependent_launch.cuh). 16 real states are the least that a
/// slice has. Of packed sequences in chunks (in_chunks()) it writes these too, and where they are
/// cut.
cudaError_t convert_projections(const ScanParams& params, int padded_states, void* stream_memory,
                                cudaStream_t stream, const PackedCuts& cuts = {}, int slices = 1,
                                ClearedWords cleared = {});

}  // namespace selective_scan::cuda
