// Entry points of the CUDA kernels: all that the dispatcher knows of them.
//
// Every pass is enqueued on `stream` of the current device, is safe under CUDA graph capture and
// gives the same bits on every run: what several threads add to one sum they add in a fixed order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "../core/conv_params.h"
#include "../core/conversion.h"
#include "../core/diagonal_params.h"
#include "../core/matrix_params.h"
#include "../core/prefill_params.h"
#include "../core/step_params.h"
#include "../core/unitary_params.h"
#include "../core/update_params.h"
#include "kit/config.h"

namespace selective_scan::cuda {

/// Gives a pass scratch memory whenever it asks: that many bytes, aligned to 256, whose content
/// does not matter. What is enqueued on the same stream behind the pass may have it again. No
/// kernel allocates.
using ScratchMemory = std::function<void*(int64_t bytes)>;

/// The selective scan. Where no kernels can run a call, or those that SELECTIVE_SCAN_CUDA_KERNELS
/// names cannot, a std::runtime_error says why.
cudaError_t scan_forward(const ForwardParams& params, const ScratchMemory& memory,
                         cudaStream_t stream);
cudaError_t scan_backward(const BackwardParams& params, const ScratchMemory& memory,
                          cudaStream_t stream);

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
/// current device, and what workspace, aligned to 256 bytes, they need.
int64_t num_segments(const DiagonalBackwardParams& params);
int64_t workspace_bytes(const DiagonalForwardParams& params);
int64_t workspace_bytes(const DiagonalBackwardParams& params);
cudaError_t diagonal_scan_forward(const DiagonalForwardParams& params, void* workspace,
                                  cudaStream_t stream);
cudaError_t diagonal_scan_backward(const DiagonalBackwardParams& params, void* workspace,
                                   cudaStream_t stream);

/// The depthwise causal convolution. The workspace is aligned to 256 bytes; its content does not
/// matter. batch and dim are at least 1. seqlen may be 0: then final states are the initial ones,
/// or 0, and likewise backwards; sums are 0.
int64_t workspace_bytes(const ConvForwardParams& params);
int64_t workspace_bytes(const ConvBackwardParams& params);
cudaError_t causal_conv1d_forward(const ConvForwardParams& params, void* workspace,
                                  cudaStream_t stream);
cudaError_t causal_conv1d_backward(const ConvBackwardParams& params, void* workspace,
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

/// A few tokens through a stack of layers. The workspace is aligned to 256 bytes, zeroed once, and no
/// two calls that may overlap share it. Where the kernel cannot run a call, a std::runtime_error
/// says why.
int64_t step_workspace_bytes(const StepParams& params);
cudaError_t step_through_layers(const StepParams& params, void* workspace, cudaStream_t stream);

/// Arrays in other types.
cudaError_t convert(const Conversions& conversions, cudaStream_t stream);

}  // namespace selective_scan::cuda
