// Entry points of the CPU kernels, by the parameters of a call; step/launch.h has that of s6_step.
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

/// Bytes of scratch memory that a call needs; no kernel allocates.
int64_t workspace_bytes(const ForwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const BackwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const MatrixForwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const MatrixBackwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const PrefillParams& params, const ThreadPool& pool);
/// 0 where a thread's stack has room for its scratch memory, as it has for most calls.
int64_t workspace_bytes(const UpdateParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const DiagonalForwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const DiagonalBackwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const ConvBackwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const NormForwardParams& params, const ThreadPool& pool);
int64_t workspace_bytes(const NormBackwardParams& params, const ThreadPool& pool);
/// These need none: the other convolutions, and a slab of the adaptive unitary scan.
inline int64_t workspace_bytes(const ConvParams&, const ThreadPool&) {
  return 0;
}
inline int64_t workspace_bytes(const UnitaryScanParams&, const ThreadPool&) {
  return 0;
}

/// Runs a call. The workspace is aligned to 64 bytes and its content does not matter. Results do
/// not depend on pool.num_threads: what they are computed from follows from the shape alone, in a
/// fixed order.
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
/// The boundaries of cu_seqlens are in order and in range.
void launch(const ConvForwardParams& params, void* workspace, const ThreadPool& pool);
void launch(const ConvBackwardParams& params, void* workspace, const ThreadPool& pool);
void launch(const ConvPrefillParams& params, void* workspace, const ThreadPool& pool);
void launch(const ConvUpdateParams& params, void* workspace, const ThreadPool& pool);
/// One slab; theta has channel stride 1.
void launch(const UnitaryForwardParams& params, void* workspace, const ThreadPool& pool);
void launch(const UnitaryBackwardParams& params, void* workspace, const ThreadPool& pool);

/// Into how many segments of time the kernels split every row of a diagonal scan, unless sequences
/// are packed; a function of the shape alone.
int64_t num_segments(const DiagonalScanParams& params);

/// Channels of a group that theta of the adaptive unitary scan is padded to; lanes beyond a group's
/// channels hold zeros.
constexpr int64_t kUnitaryLanes = 16;

}  // namespace selective_scan::cpu
