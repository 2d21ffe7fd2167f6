// The device's side of programmatic dependent launches: see launch_kernel() in launch_tools.h.
#pragma once

namespace selective_scan::cuda {

/// Lets the kernel that was launched behind this one, as a dependent, begin. What it must not do
/// before this kernel is complete it does after wait_for_primary().
__device__ __forceinline__ void start_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Waits for the kernel in front of this one and its memory. Returns at once where this one was not
/// launched as a dependent.
__device__ __forceinline__ void wait_for_primary() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace selective_scan::cuda
