// Constants of the CUDA kernels.
#pragma once

#include "../../core/config.h"
#include "../../core/discretization/method.h"

namespace selective_scan::cuda {

/// The method of the published models, and the only one with kernels for every kind of call. Calls
/// by other methods take the streamed path, if they have up to 16 real states and variable B and C,
/// or the floor.
constexpr Method kCommonMethod = Method::kZoh;
constexpr bool has_all_kernels(Method method) {
  return method == kCommonMethod;
}

/// The largest dstate that kernels support, except for complex128 states if blocks have less shared
/// memory than on Hopper.
constexpr int64_t kMaxDstate = 256;

constexpr int kWarpBits = 5;
constexpr int kWarpSize = 1 << kWarpBits;
constexpr unsigned kFullMask = 0xffffffffu;

/// The steps staged in shared memory at once. Saved states lie at the boundaries of these chunks.
constexpr int kChunk = static_cast<int>(kStateChunk);

/// The steps that a lane loads from shared memory in one access and keeps in registers.
constexpr int kBlockSteps = 4;
constexpr int kBlocksPerChunk = kChunk / kBlockSteps;

/// The stride between rows of a [channel][step] array in shared memory. The padding keeps rows
/// aligned to 16 bytes and spreads a column over the banks.
constexpr int kRowStride = kChunk + 4;

constexpr int kMaxWarps = 12;
constexpr int kMaxThreads = kMaxWarps * kWarpSize;

/// Returns `blocks`, the desired number of blocks per multiprocessor, or fewer if it lacks the
/// threads for them. A multiprocessor has 1536 threads or more, except on Turing. For
/// __launch_bounds__.
constexpr int fitting_blocks(int threads, int blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  constexpr int kThreads = 1024;
#else
  constexpr int kThreads = 1536;
#endif
  return threads * blocks > kThreads ? kThreads / threads : blocks;
}

/// The schedulers of a multiprocessor; each runs every fourth warp of a block.
constexpr int kSchedulers = 4;

}  // namespace selective_scan::cuda
