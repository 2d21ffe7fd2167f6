// The special paths: ways to run a pass that are faster than the general one for what they accept.
//
// Each enqueues the pass as scan_forward() and scan_backward() in launch.h do, or returns nothing,
// having done nothing, where it cannot run the problem or is not the better choice for it.
#pragma once

#include <optional>

#include "../launch.h"

namespace selective_scan::cuda {

template <class Params>
using Path = std::optional<cudaError_t>(const Params& params, const ScratchMemory& memory,
                                        cudaStream_t stream);

/// Real A with one state a channel in fp32: lanes lie along time.
Path<ForwardParams> dstate1_forward;
Path<BackwardParams> dstate1_backward;

/// Real A of 5 to 16 states in fp32, variable B and C, few channels: warps divide time.
Path<ForwardParams> relay_forward;
Path<BackwardParams> relay_backward;

/// Problems that fill the device: fp32 arithmetic, 3 to 64 states (complex: 2 to 16), u, delta, z
/// and out of one dtype, B and C both variable or, with up to 16 states, both constant.
Path<ForwardParams> streamed_forward;
/// Likewise, with 2 to 64 states (complex: 2 to 16, B and C variable) and a gradient of out.
Path<BackwardParams> streamed_backward;

}  // namespace selective_scan::cuda
