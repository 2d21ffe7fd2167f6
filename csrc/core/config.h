// Constants that several parts share, and integer division rounded up.
#pragma once

#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define SELECTIVE_SCAN_HD __host__ __device__ __forceinline__
#elif !defined(__GNUC__) && !defined(__clang__)
#error "selective_scan needs GCC, Clang, mingw-w64 or clang-cl: MSVC has no vector extensions."
#else
// Always inlined: one header is compiled for several instruction sets in one library, and an
// out-of-line copy merged by the linker could carry instructions that the processor lacks.
#define SELECTIVE_SCAN_HD inline __attribute__((always_inline))
#endif

namespace selective_scan {

/// a / b rounded up, for a >= 0 and b > 0.
template <class A, class B>
SELECTIVE_SCAN_HD constexpr auto ceil_div(A a, B b) {
  return (a + b - 1) / b;
}

/// Returns the smallest multiple of `multiple` that is at least `value`.
template <class A, class B>
SELECTIVE_SCAN_HD constexpr auto round_up(A value, B multiple) {
  return ceil_div(value, multiple) * multiple;
}

/// The forward pass saves the state after every kStateChunk steps (but not after the last chunk);
/// the backward pass recomputes the states in between. This limits the saved states to
/// batch·dim·dstate·seqlen / kStateChunk values.
constexpr int64_t kStateChunk = 32;

/// Returns the number of states saved along a sequence: those at the inner chunk boundaries.
SELECTIVE_SCAN_HD int64_t num_saved_states(int64_t seqlen) {
  return seqlen > 0 ? (seqlen - 1) / kStateChunk : 0;
}

/// Returns the index of a packed sequence's first saved state among those that num_saved_states()
/// of all steps counts. Consecutive sequences share no saved state.
SELECTIVE_SCAN_HD int64_t first_saved_state(int64_t first_step) {
  return first_step / kStateChunk;
}

/// The kStateChunk of the adaptive unitary scan, whose angles are recomputed in slabs of whole
/// chunks.
constexpr int64_t kUnitaryStateChunk = 64;

SELECTIVE_SCAN_HD int64_t num_saved_unitary_states(int64_t seqlen) {
  return seqlen > 0 ? (seqlen - 1) / kUnitaryStateChunk : 0;
}

}  // namespace selective_scan
