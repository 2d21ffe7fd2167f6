// Packed sequences: each is scanned as the call that has it alone would be, and so has its bits.
#pragma once

#include <cstdint>

#include "../../core/params.h"

namespace selective_scan::cpu {

/// The parameters of the call that has one of the packed sequences alone.
ForwardParams params_of(const ForwardParams& packed, int64_t sequence);
BackwardParams params_of(const BackwardParams& packed, int64_t sequence);

/// The parameters of some steps of a call of one sequence, which saves no states.
ForwardParams steps_of(const ForwardParams& call, int64_t begin, int64_t steps);

/// Writes zeros at the steps of no sequence.
void clear_padding(const ForwardParams& packed);
void clear_padding(const BackwardParams& packed);

}  // namespace selective_scan::cpu
