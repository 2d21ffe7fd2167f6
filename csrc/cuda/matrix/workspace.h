// The scratch memory of the scan with full state matrices.
#pragma once

#include <type_traits>

#include "../../core/matrix_params.h"
#include "../sums/gradient_sums.h"

namespace selective_scan::cuda::matrix {

/// The number of vectors that the backward pass keeps for each step of a chunk.
constexpr int64_t kKept = 4;

/// Arrays of a pass, all of the compute type; null if not needed.
struct Workspace {
  void* bases = nullptr;   // (channel, H | Q | transposed Q, row, column)
  void* kept = nullptr;    // of a chunk: (batch, channel, steps + 1, h | m | λ | H^H·λ, state)
  void* dH = nullptr;      // (batch, channel, row, column)
  int padded_states = 0;   // row length of the sums
  BackwardWorkspace sums;  // with a channel as tile, and without dA
};

template <class Params>
class WorkspaceLayout : public BackwardScratch {
 public:
  explicit WorkspaceLayout(const Params& params) {
    const int64_t order = params.dstate;
    const int64_t rows = params.batch * params.dim;
    const int64_t real_bytes = params.is_double ? 8 : 4;
    const int64_t value_bytes = real_bytes * (params.is_complex ? 2 : 1);
    padded_states_ = static_cast<int>(round_up(order, 16 / value_bytes));
    bases_ = take(true, 3 * params.dim * order * order, value_bytes);
    if constexpr (std::is_base_of_v<BackwardParams, Params>) {
      kept_ = take(true, kKept * rows * (kStateChunk + 1) * order, value_bytes);
      dH_ = take(true, rows * order * order, value_bytes);
      dBC_partials = take(params.variable_B || params.variable_C,
                          rows * params.seqlen * 2 * padded_states_, value_bytes);
      dB = take(!params.variable_B, rows * padded_states_, value_bytes);
      dC = take(!params.variable_C, rows * padded_states_, value_bytes);
      dD = take(params.dD.present(), rows, real_bytes);
      ddelta_bias = take(params.ddelta_bias.present(), rows, real_bytes);
    }
  }

  Workspace in(void* memory) const {
    return {bases_.in(memory), kept_.in(memory), dH_.in(memory), padded_states_,
            backward_workspace(*this, memory)};
  }

 private:
  ScratchArray bases_, kept_, dH_;
  int padded_states_;
};

}  // namespace selective_scan::cuda::matrix
