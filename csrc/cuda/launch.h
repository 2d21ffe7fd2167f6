// Entry points of the CUDA kernels: all that the dispatcher knows of them.
//
// Every pass is enqueued on `stream` of the current device, is safe under CUDA graph capture and
// gives the same bits on every run: what several threads add to one sum they add in a fixed order.
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

/// The selective scan. Where no kernels can run a call, or those that SELECTIVE_SCAN_CUDA_KERNELS
/// names cannot, a std::runtime_error says why. With an exchange, that tells what enters.
cudaError_t scan_forward(const ForwardParams& params, const ScratchMemory& memory,
                         cudaStream_t stream, const StateExchange* exchange = nullptr);
cudaError_t scan_backward(const BackwardParams& params, const ScratchMemory& memory,
                          cudaStream_t stream, const StateExchange* exchange = nullptr);

/// What plans know of the current device, and the paths of the scan that it has kernels of, such as
/// "major=7 multiprocessors=40 [...] paths=dstate1,floor".
cudaError_t describe_device(std::string& text);

/// Chunked prefill: the selective scan of packed sequences over a pool of states. Where checkpoints
/// are wanted, `states` is there to be written to.
cudaError_t scan_prefill(const PrefillParams& params, const ScratchMemory& memory,
                         cudaStream_t stream);

/// The scan with full state matrices.
constexpr int64_t kMaxMatrixDstate = 64;
cudaError_t scan_forward(const MatrixForwardParams& params, const ScratchMemory& memory,
                         cudaStream_t stream);
cudaError_t scan_backward(const MatrixBackwardParams& params, const ScratchMemory& memory,
                          cudaStream_t stream);

/// The general diagonal scan. Into how many segments of time the kernels split every row on the
/// current device.
int64_t num_segments(const DiagonalBackwardParams& params);
cudaError_t diagonal_scan_forward(const DiagonalForwardParams& params, const ScratchMemory& memory,
                                  cudaStream_t stream);
cudaError_t diagonal_scan_backward(const DiagonalBackwardParams& params,
                                   const ScratchMemory& memory, cudaStream_t stream);

/// The depthwise causal convolution. batch and dim are at least 1. seqlen may be 0: then final
/// states are the initial ones, or 0, and likewise backwards; sums are 0.
cudaError_t causal_conv1d_forward(const ConvForwardParams& params, cudaStream_t stream);
cudaError_t causal_conv1d_backward(const ConvBackwardParams& params, const ScratchMemory& memory,
                                   cudaStream_t stream);
/// The forward pass over a pool of states.
cudaError_t causal_conv1d_prefill(const ConvPrefillParams& params, cudaStream_t stream);
/// Batch, dim and the steps are at least 1.
cudaError_t causal_conv1d_update(const ConvUpdateParams& params, cudaStream_t stream);

/// The adaptive unitary scan: one slab, whose theta has state stride 1.
constexpr int64_t kMaxUnitaryDstate = 256;
cudaError_t unitary_scan_forward(const UnitaryForwardParams& params, cudaStream_t stream);
cudaError_t unitary_scan_backward(const UnitaryBackwardParams& params, cudaStream_t stream);

/// The state update, of dstate up to kMaxDstate. It takes indices of slots that there are not for
/// padding.
cudaError_t update_states(const UpdateParams& params, cudaStream_t stream);

/// The RMS norm of rows of so many channels at the most, in front of which a residual is added.
constexpr int64_t kMostNormChannels = 8192;
cudaError_t norm_forward(const NormForwardParams& params, cudaStream_t stream);
cudaError_t norm_backward(const NormBackwardParams& params, const ScratchMemory& memory,
                          cudaStream_t stream);

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
