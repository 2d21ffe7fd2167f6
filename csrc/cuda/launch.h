// Entry points of the CUDA kernels, which are all that the dispatcher knows of them.
//
// launch() enqueues a pass on `stream` of the current device. This is safe under CUDA graph capture
// and gives the same bits on every run: sums of several threads' values are added in a fixed order.
// A pass asks `memory` for scratch memory if it needs any.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "../core/conv_params.h"
#include "../core/conversion.h"
#include "../core/diagonal_params.h"
#include "../core/matrix_params.h"
#include "../core/norm_params.h"
#include "../core/prefill_params.h"
#include "../core/state_exchange.h"
#include "../core/step_params.h"
#include "../core/unitary_params.h"
#include "../core/update_params.h"
#include "kit/config.h"
#include "plan/refusal.h"
#include "plan/scratch.h"

namespace selective_scan::cuda {

// The most states of a channel. step_needs() gives the limits of the step.
constexpr int64_t kMaxMatrixDstate = 64;
constexpr int64_t kMaxUnitaryDstate = 256;
/// The most channels of a normed row.
constexpr int64_t kMostNormChannels = 8192;

/// The selective scan. Throws std::runtime_error if no kernels, or not those that
/// SELECTIVE_SCAN_CUDA_KERNELS names, can run the call. If an exchange is given, it provides the
/// entering state.
cudaError_t launch(const ForwardParams& params, const ScratchMemory& memory, cudaStream_t stream,
                   const StateExchange* exchange = nullptr);
cudaError_t launch(const BackwardParams& params, const ScratchMemory& memory, cudaStream_t stream,
                   const StateExchange* exchange = nullptr);
/// The scan with full state matrices.
cudaError_t launch(const MatrixForwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
cudaError_t launch(const MatrixBackwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
/// Chunked prefill: the selective scan of packed sequences over a pool of states. If checkpoints
/// are wanted, `states` is present as scratch memory.
cudaError_t launch(const PrefillParams& params, const ScratchMemory& memory, cudaStream_t stream);
/// The state update, with dstate up to kMaxDstate. Indices of slots that do not exist count as
/// padding.
cudaError_t launch(const UpdateParams& params, const ScratchMemory& memory, cudaStream_t stream);

/// The general diagonal scan. num_segments() is the number of time segments into which the backward
/// kernels split every row.
cudaError_t launch(const DiagonalForwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
cudaError_t launch(const DiagonalBackwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
int64_t num_segments(const DiagonalBackwardParams& params);
/// The adaptive unitary scan of one slab, whose theta has state stride 1.
cudaError_t launch(const UnitaryForwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
cudaError_t launch(const UnitaryBackwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);

/// The depthwise causal convolution. batch and dim are at least 1. seqlen may be 0: the final
/// states are then the initial ones, or 0; backward likewise, and sums are 0.
cudaError_t launch(const ConvForwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
cudaError_t launch(const ConvBackwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
/// The forward pass of the convolution over a pool of states.
cudaError_t launch(const ConvPrefillParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
/// The update of the convolution. Batch, dim and the steps are at least 1.
cudaError_t launch(const ConvUpdateParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);

/// The RMS norm of rows of up to kMostNormChannels channels, after an optional residual is added.
cudaError_t launch(const NormForwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
cudaError_t launch(const NormBackwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);

/// Describes the current device as plans see it, and the scan's paths that it has kernels for, as
/// in "major=7 multiprocessors=40 [...] paths=dstate1,floor".
cudaError_t describe_device(std::string& text);

/// What a step needs of its caller. `refusal` says why the current device cannot run a call of
/// these sizes, if it cannot.
struct StepNeeds {
  Refusal refusal;
  int64_t workspace_bytes = 0;
};
/// The alignment of the workspace and of the matrices, in bytes.
constexpr int64_t kStepAlignment = 16;
/// A few tokens through a stack of layers. A new workspace must be zeroed, and calls that may
/// overlap must not share one. Indices of slots that do not exist count as padding.
cudaError_t step_needs(const StepParams& params, StepNeeds& needs);
cudaError_t step_through_layers(const StepParams& params, void* workspace, cudaStream_t stream);

/// Converts arrays to other types.
cudaError_t convert(const Conversions& conversions, cudaStream_t stream);

}  // namespace selective_scan::cuda
