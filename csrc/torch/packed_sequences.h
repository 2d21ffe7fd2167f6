// cu_seqlens: the boundaries of sequences that lie one behind the other.
#pragma once

#include "../core/index_array.h"
#include "tensor_checks.h"

namespace selective_scan::op {

constexpr std::initializer_list<ScalarType> kIndexDtypes = {ScalarType::Int, ScalarType::Long};

/// (batch, seqlen), or an index for each sequence
IndexArray index_view(const Tensor& tensor);

/// The sequences in `total` steps whose boundaries are cu_seqlens, which were checked.
PackedSequences packed_sequences(const Tensor& cu_seqlens, int64_t total);
/// Gives those in `packed`, called `name`, (batch, ..., seqlen); checks their shapes.
PackedSequences packed_sequences(const Tensor& cu_seqlens, const char* name, const Tensor& packed);

/// Refuses boundaries that do not rise; they must be the host's to read.
void check_boundaries(const PackedSequences& packed);

}  // namespace selective_scan::op
