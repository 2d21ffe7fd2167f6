// Entry points of the CPU kernels of the depthwise causal convolution.
#pragma once

#include <cstdint>

#include "../../core/conv_params.h"
#include "../thread_pool.h"

namespace selective_scan::cpu {

int64_t workspace_bytes(const ConvForwardParams& params);
int64_t workspace_bytes(const ConvBackwardParams& params);

/// The workspace is aligned to 64 bytes and its content does not matter. Results do not depend on
/// pool.num_threads. The boundaries of cu_seqlens are in order and in range.
void causal_conv1d_forward(const ConvForwardParams& params, void* workspace,
                           const ThreadPool& pool);
void causal_conv1d_backward(const ConvBackwardParams& params, void* workspace,
                            const ThreadPool& pool);

void causal_conv1d_prefill(const ConvPrefillParams& params, const ThreadPool& pool);
void causal_conv1d_update(const ConvUpdateParams& params, const ThreadPool& pool);

}  // namespace selective_scan::cpu
