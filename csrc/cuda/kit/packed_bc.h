// Writes variable B and C in the form that packed_bc_layout.h describes.
#pragma once

#include <cuda_runtime_api.h>

#include "packed_bc_layout.h"

namespace selective_scan::cuda {

/// Words that the conversion sets to 0 for the kernels after it.
struct ClearedWords {
  int* words = nullptr;
  int count = 0;
};

/// Writes B and C of a scan in fp32 to `stream_memory`, aligned to 16 bytes. The next kernel may be
/// a dependent launch (see dependent_launch.cuh). A slice has at least 16 real states. For packed
/// sequences in chunks (in_chunks()), it also writes the chunks and the segments that they are cut
/// into.
cudaError_t convert_projections(const ScanParams& params, int padded_states, void* stream_memory,
                                cudaStream_t stream, const PackedCuts& cuts = {}, int slices = 1,
                                ClearedWords cleared = {});

}  // namespace selective_scan::cuda
