// The device side of programmatic dependent launches: see launch_kernel() in launch_tools.h.
#pragma once

namespace selective_scan::cuda {

/// Lets the dependent kernel that was launched after this one begin. That kernel calls
/// wait_for_primary() before anything that needs this one's completion.
__device__ __forceinline__ void start_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Waits until the kernel before this one is complete and its memory is visible. Returns at once if
/// this kernel was not launched as a dependent.
__device__ __forceinline__ void wait_for_primary() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace selective_scan::cuda
