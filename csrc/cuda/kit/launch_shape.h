// The shape of a kernel launch.
#pragma once

#include <cstdint>

namespace selective_scan::cuda {

/// The most blocks of a grid along its first dimension, and along each of the others.
constexpr int64_t kMaxBlocks = 0x7fffffff;
constexpr int64_t kMaxRows = 0xffff;

struct LaunchShape {
  int64_t blocks = 1;
  int threads = 0;
  int shared_bytes = 0;
  bool is_dependent = false;  // on the previous kernel in the stream
  int64_t rows = 1;           // of `blocks` blocks each
  int64_t layers = 1;         // of rows
  /// All blocks run at the same time, or the launch fails.
  bool is_cooperative = false;
};

}  // namespace selective_scan::cuda
