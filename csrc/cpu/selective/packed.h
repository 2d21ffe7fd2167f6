// Packed sequences: each is scanned as in a call of its own, and so gets the same bits.
#pragma once

#include <cstdint>

#include "../../core/params.h"

namespace selective_scan::cpu {

/// Returns the parameters of a call on one of the packed sequences alone.
ForwardParams params_of(const ForwardParams& packed, int64_t sequence);
BackwardParams params_of(const BackwardParams& packed, int64_t sequence);

/// Returns the parameters for some steps of a call on one sequence that saves no states.
ForwardParams steps_of(const ForwardParams& call, int64_t begin, int64_t steps);

/// Writes zeros at the steps that belong to no sequence.
void clear_padding(const ForwardParams& packed);
void clear_padding(const BackwardParams& packed);

}  // namespace selective_scan::cpu
