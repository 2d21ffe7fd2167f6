// The memory between the kernels of the scan with full state matrices.
#pragma once

#include <cstdint>

#include "../../core/matrix_params.h"

namespace selective_scan::cuda::matrix {

/// Vectors that the backward pass keeps of each step of a chunk.
constexpr int64_t kKept = 3;

/// Parts of a pass's memory, all of the compute type; null where not needed.
struct Workspace {
  void* bases = nullptr;  // (channel, H or Q or the transposed Q, row, column)
  void* kept = nullptr;   // of a chunk: (batch, channel, step and one more, h or λ or H^H·λ, state)
  void* dH = nullptr;     // (batch, channel, row, column)
  void* dB_parts =
      nullptr;  // variable: (batch, channel, step, state); else (batch, channel, state)
  void* dC_parts = nullptr;
  void* dD_parts = nullptr;  // (batch, channel), real
  void* ddelta_bias_parts = nullptr;
};

/// Hands out the parts in a row; over a null base it only measures.
class WorkspaceLayout {
 public:
  WorkspaceLayout(const ScanParams& params, bool is_backward, void* memory)
      : memory_(static_cast<char*>(memory)),
        real_bytes_(params.is_double ? 8 : 4),
        value_bytes_(real_bytes_ * (params.is_complex ? 2 : 1)) {
    const int64_t order = params.dstate;
    const int64_t rows = params.batch * params.dim;
    workspace.bases = take(3 * params.dim * order * order, value_bytes_);
    if (!is_backward) return;
    workspace.kept = take(kKept * rows * (kStateChunk + 1) * order, value_bytes_);
    workspace.dH = take(rows * order * order, value_bytes_);
    workspace.dB_parts = take(rows * order * (params.variable_B ? params.seqlen : 1), value_bytes_);
    workspace.dC_parts = take(rows * order * (params.variable_C ? params.seqlen : 1), value_bytes_);
    workspace.dD_parts = take(rows, real_bytes_);
    workspace.ddelta_bias_parts = take(rows, real_bytes_);
  }

  Workspace workspace;
  int64_t bytes = 0;

 private:
  void* take(int64_t count, int64_t size) {
    void* part = memory_ ? memory_ + bytes : nullptr;
    bytes += round_up(count * size, 256);
    return part;
  }

  char* memory_;
  int64_t real_bytes_;
  int64_t value_bytes_;
};

}  // namespace selective_scan::cuda::matrix
