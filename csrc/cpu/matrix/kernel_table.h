// The kernel table of the scan with full state matrices, for the sources that instantiate it.
#pragma once

#include "backward.h"
#include "forward.h"

namespace selective_scan::cpu {

template <class State>
const MatrixKernels MatrixScan<State>::kernels = {
    real_t<State>::kWidth,       &Reduction<State>::scratch_bytes,
    &Reduction<State>::run,      &MatrixForward<State>::scratch_bytes,
    &MatrixForward<State>::run,  &MatrixBackward<State>::scratch_bytes,
    &MatrixBackward<State>::run, &MatrixBackward<State>::finish};

}  // namespace selective_scan::cpu
