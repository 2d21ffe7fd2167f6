// How a kernel is launched.
#pragma once

#include <cstdint>

namespace selective_scan::cuda {

/// A grid can have so many blocks along its first dimension, and along the others.
constexpr int64_t kMaxBlocks = 0x7fffffff;
constexpr int64_t kMaxRows = 0xffff;

struct LaunchShape {
  int64_t blocks = 1;
  int threads = 0;
  int shared_bytes = 0;
  bool is_dependent = false;  // on the kernel in front of it
  int64_t rows = 1;           // of `blocks` blocks each
  int64_t layers = 1;         // of rows
  /// All blocks are on the GPU at the same time, or the launch fails.
  bool is_cooperative = false;
};

}  // namespace selective_scan::cuda
