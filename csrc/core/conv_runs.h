// Finds where the sequences of a batch entry begin and end.
#pragma once

#include <cstdint>

#include "conv_params.h"

namespace selective_scan {

/// Steps [begin, end) that see each other and no other steps.
struct Run {
  static constexpr int64_t kNone = PackedSequences::kNone;

  int64_t begin = 0;
  int64_t end = 0;
  int64_t states = kNone;   // the index of the run's states, or kNone if it has none
  bool is_padding = false;  // its steps belong to no sequence
};

/// Returns the run that contains `step`. A run of seq_idx, which has no states, may be cut: at
/// width - 1 steps before `step`, the earliest step that `step` sees, and at `limit`.
SELECTIVE_SCAN_HD Run run_at(const ConvParams& params, int64_t batch, int64_t step, int64_t limit) {
  if (params.cu_seqlens.present()) {
    const PackedSequences packed = params.packed();
    const int64_t sequence = packed.sequence_of(step);
    if (sequence != PackedSequences::kNone) {
      return {packed.begin(sequence), packed.end(sequence), sequence, false};
    }
    const int64_t first = packed.begin(0);
    return {step, step < first ? first : params.seqlen, Run::kNone, true};
  }
  if (!params.seq_idx.present()) return {0, params.seqlen, batch, false};

  const int64_t index = params.seq_idx.at(batch, step);
  Run run{step, step + 1, Run::kNone, index < 0};
  const int64_t earliest = step < params.width ? 0 : step - (params.width - 1);
  while (run.begin > earliest && params.seq_idx.at(batch, run.begin - 1) == index) --run.begin;
  while (run.end < limit && params.seq_idx.at(batch, run.end) == index) ++run.end;
  return run;
}

/// Returns the run of a sequence that has states; it may be empty.
SELECTIVE_SCAN_HD Run run_of(const ConvParams& params, int64_t sequence) {
  if (!params.cu_seqlens.present()) return {0, params.seqlen, sequence, false};
  const PackedSequences packed = params.packed();
  return {packed.begin(sequence), packed.end(sequence), sequence, false};
}

}  // namespace selective_scan
