// The entry points of the CPU kernels, by the type of a call's parameters; step/launch.h has
// s6_step's.
#pragma once

#include <cstdint>

#include "../core/conv_params.h"
#include "../core/diagonal_params.h"
#include "../core/matrix_params.h"
#include "../core/norm_params.h"
#include "../core/prefill_params.h"
#include "../core/unitary_params.h"
#include "../core/update_params.h"
#include "thread_pool.h"

namespace selective_scan::cpu {

/// Returns the bytes of scratch memory that a call needs; no kernel allocates.
int64_t workspace_bytes(const ForwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const BackwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const MatrixForwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const MatrixBackwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const PrefillParams& params, const ThreadPool& pool);
/// 0 if the scratch memory fits on a thread's stack, as for most calls.
int64_t workspace_bytes(const UpdateParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const DiagonalForwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const DiagonalBackwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const ConvBackwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const NormForwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const NormBackwardParams& params, const ThreadPool& pool);
/// The other convolutions, and a slab of the adaptive unitary scan, need none.
inline int64_t workspace_bytes(const ConvParams&, const ThreadPool&) {
  return 0;
}
inline int64_t workspace_bytes(const UnitaryScanParams&, const ThreadPool&) {
  return 0;
}

/// Runs a call. The workspace must be aligned to 64 bytes; its contents do not matter. Results do
/// not depend on pool.num_threads: the shape alone determines the terms of every result, and their
/// order is fixed.
void launch(const ForwardParams& params, void* workspace, const ThreadPool& pool);
void launch(const BackwardParams& params, void* workspace, const ThreadPool& pool);
void launch(const MatrixForwardParams& params, void* workspace, const ThreadPool& pool);
void launch(const MatrixBackwardParams& params, void* workspace, const ThreadPool& pool);
void launch(const PrefillParams& params, void* workspace, const ThreadPool& pool);
void launch(const UpdateParams& params, void* workspace, const ThreadPool& pool);
void launch(const DiagonalForwardParams& params, void* workspace, const ThreadPool& pool);
void launch(const DiagonalBackwardParams& params, void* workspace, const ThreadPool& pool);
void launch(const NormForwardParams& params, void* workspace, const ThreadPool& pool);
void launch(const NormBackwardParams& params, void* workspace, const ThreadPool& pool);
/// The boundaries of cu_seqlens must be in order and in range.
void launch(const ConvForwardParams& params, void* workspace, const ThreadPool& pool);
void launch(const ConvBackwardParams& params, void* workspace, const ThreadPool& pool);
void launch(const ConvPrefillParams& params, void* workspace, const ThreadPool& pool);
void launch(const ConvUpdateParams& params, void* workspace, const ThreadPool& pool);
/// Runs one slab; theta has channel stride 1.
void launch(const UnitaryForwardParams& params, void* workspace, const ThreadPool& pool);
void launch(const UnitaryBackwardParams& params, void* workspace, const ThreadPool& pool);

/// Returns the number of time segments into which the kernels split every row of a diagonal scan
/// without packed sequences; a function of the shape alone.
int64_t num_segments(const DiagonalScanParams& params);

/// theta of the adaptive unitary scan is padded to a multiple of this many channels per group; the
/// padding lanes hold zeros.
constexpr int64_t kUnitaryLanes = 16;

}  // namespace selective_scan::cpu
