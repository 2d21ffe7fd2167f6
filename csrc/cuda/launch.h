// Entry points of the CUDA kernels: all that the dispatcher knows of them.
//
// launch() enqueues a pass on `stream` of the current device, which is safe under CUDA graph
// capture and gives the same bits on every run: what several threads add to one sum they add in a
// fixed order. `memory` is asked for scratch memory, if a pass needs any.
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

// The most states of a channel; step_needs() tells what the step takes.
constexpr int64_t kMaxMatrixDstate = 64;
constexpr int64_t kMaxUnitaryDstate = 256;
/// The most channels of a row that is normed.
constexpr int64_t kMostNormChannels = 8192;

/// The selective scan. Where no kernels can run a call, or those that SELECTIVE_SCAN_CUDA_KERNELS
/// names cannot, a std::runtime_error says why. With an exchange, that tells what enters.
cudaError_t launch(const ForwardParams& params, const ScratchMemory& memory, cudaStream_t stream,
                   const StateExchange* exchange = nullptr);
cudaError_t launch(const BackwardParams& params, const ScratchMemory& memory, cudaStream_t stream,
                   const StateExchange* exchange = nullptr);
/// The scan with full state matrices.
cudaError_t launch(const MatrixForwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
cudaError_t launch(const MatrixBackwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
/// Chunked prefill: the selective scan of packed sequences over a pool of states. Where checkpoints
/// are wanted, `states` is there to be written to.
cudaError_t launch(const PrefillParams& params, const ScratchMemory& memory, cudaStream_t stream);
/// The state update, of dstate up to kMaxDstate. It takes indices of slots that there are not for
/// padding.
cudaError_t launch(const UpdateParams& params, const ScratchMemory& memory, cudaStream_t stream);

/// The general diagonal scan, for which the kernels split every row into so many segments of time.
cudaError_t launch(const DiagonalForwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
cudaError_t launch(const DiagonalBackwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
int64_t num_segments(const DiagonalBackwardParams& params);
/// The adaptive unitary scan: one slab, whose theta has state stride 1.
cudaError_t launch(const UnitaryForwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
cudaError_t launch(const UnitaryBackwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);

/// The depthwise causal convolution. batch and dim are at least 1. seqlen may be 0: then final
/// states are the initial ones, or 0, and likewise backwards; sums are 0.
cudaError_t launch(const ConvForwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
cudaError_t launch(const ConvBackwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
/// The forward pass over a pool of states.
cudaError_t launch(const ConvPrefillParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
/// Batch, dim and the steps are at least 1.
cudaError_t launch(const ConvUpdateParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);

/// The RMS norm of rows of up to kMostNormChannels, in front of which a residual is added.
cudaError_t launch(const NormForwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);
cudaError_t launch(const NormBackwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream);

/// What plans know of the current device, and the paths of the scan that it has kernels of, such as
/// "major=7 multiprocessors=40 [...] paths=dstate1,floor".
cudaError_t describe_device(std::string& text);

/// A few tokens through a stack of layers. `refusal` says why the current device cannot run a call
/// of these sizes, if it cannot. The workspace is zeroed when it is new, and no two calls that may
/// overlap share it. It and the matrices are aligned to kStepAlignment bytes. Indices of slots that
/// there are not stand for padding.
constexpr int64_t kStepAlignment = 16;
struct StepNeeds {
  Refusal refusal;
  int64_t workspace_bytes = 0;
};
cudaError_t step_needs(const StepParams& params, StepNeeds& needs);
cudaError_t step_through_layers(const StepParams& params, void* workspace, cudaStream_t stream);

/// Arrays in other types.
cudaError_t convert(const Conversions& conversions, cudaStream_t stream);

}  // namespace selective_scan::cuda
