// The kernels that run before the scans and after the backward scan, on whole channels.
#pragma once

#include <cuda_runtime_api.h>

#include "workspace.h"

namespace selective_scan::cuda::matrix {

/// Computes Householder's reduction of A, in double precision, into workspace.bases.
cudaError_t reduce(const MatrixForwardParams& params, const Workspace& workspace,
                   cudaStream_t stream);

/// Computes dA from dH, and sums the gradients whose parts come from several batch entries or
/// channels, in a fixed order.
cudaError_t finish(const MatrixBackwardParams& params, const Workspace& workspace,
                   cudaStream_t stream);

}  // namespace selective_scan::cuda::matrix
