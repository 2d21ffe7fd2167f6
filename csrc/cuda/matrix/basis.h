// What comes before the scans and after the backward one, for every channel.
#pragma once

#include <cuda_runtime_api.h>

#include "workspace.h"

namespace selective_scan::cuda::matrix {

/// Householder's reduction, in double precision: fills workspace.bases.
cudaError_t reduce(const MatrixForwardParams& params, const Workspace& workspace,
                   cudaStream_t stream);

/// dA from dH, and the gradients that are sums over batch entries or channels from their parts, in
/// a fixed order.
cudaError_t finish(const MatrixBackwardParams& params, const Workspace& workspace,
                   cudaStream_t stream);

}  // namespace selective_scan::cuda::matrix
