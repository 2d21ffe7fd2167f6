// Figures of the CUDA kernels, each named once.
#pragma once

#include "../../core/config.h"
#include "../../core/discretization/method.h"

namespace selective_scan::cuda {

/// The method of the published models, which alone has kernels for every kind of call. Calls by any
/// other take the streamed path with up to 16 real states and variable B and C, or the floor.
constexpr Method kCommonMethod = Method::kZoh;
constexpr bool has_all_kernels(Method method) {
  return method == kCommonMethod;
}

/// Largest dstate the kernels take, but for complex128 states where a block has less shared memory
/// than on Hopper.
constexpr int64_t kMaxDstate = 256;

constexpr int kWarpBits = 5;
constexpr int kWarpSize = 1 << kWarpBits;
constexpr unsigned kFullMask = 0xffffffffu;

/// Steps staged in shared memory at once; saved states lie at the boundaries of these chunks.
constexpr int kChunk = static_cast<int>(kStateChunk);

/// Steps that a lane takes from shared memory in one access and keeps in registers.
constexpr int kBlockSteps = 4;
constexpr int kBlocksPerChunk = kChunk / kBlockSteps;

/// Distance between the rows of a [channel][step] array in shared memory. The padding keeps rows
/// aligned to 16 bytes and spreads a column over the banks.
constexpr int kRowStride = kChunk + 4;
/// This is the pitch of rows that are read by single steps.
constexpr int kElementRow = kChunk + 1;

constexpr int kMaxWarps = 12;
constexpr int kMaxThreads = kMaxWarps * kWarpSize;

/// Of the blocks that a multiprocessor is to have at a time, those that it has threads for, which
/// are 1536 or more but on Turing. For __launch_bounds__.
constexpr int fitting_blocks(int threads, int blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  constexpr int kThreads = 1024;
#else
  constexpr int kThreads = 1536;
#endif
  return threads * blocks > kThreads ? kThreads / threads : blocks;
}

/// Of a multiprocessor; each has every fourth warp of a block.
constexpr int kSchedulers = 4;

}  // namespace selective_scan::cuda
