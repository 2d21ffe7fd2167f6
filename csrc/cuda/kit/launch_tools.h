// Host tools of all launchers: the current device's figures, and kernel launches.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <type_traits>

#include "../../core/complex.h"
#include "../../core/dtype.h"
#include "../plan/device.h"
#include "launch_shape.h"

namespace selective_scan::cuda {

/// Returns the current device. Its figures are queried once per thread. SELECTIVE_SCAN_CUDA_DEVICE
/// lowers them for tests: see lessened().
cudaError_t current_device(Device& device);

/// Allows the blocks of a kernel all shared memory that a block of the current device can have. The
/// limit belongs to the kernel and is the same for all threads of the process, so it is set once,
/// and not to the size of a launch: another thread could lower it before that launch.
cudaError_t allow_shared_memory(const void* kernel);

/// Throws std::runtime_error if no block of the device can have this much shared memory.
void check_shared_memory(const Device& device, int bytes);

/// Launches a kernel. A dependent kernel may begin before the previous kernel in the stream is
/// complete (programmatic dependent launch). Code compiled for architectures before Hopper never
/// does, since it does not wait.
template <class... Parameters>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const LaunchShape& shape,
                          cudaStream_t stream,
                          const std::type_identity_t<Parameters>&... arguments) {
  Device device;
  cudaError_t error = current_device(device);
  // Every block has 48 KiB without a request, which includes the static shared memory of a kernel.
  constexpr int kGranted = 32 * 1024;
  if (error == cudaSuccess && shape.shared_bytes > kGranted) {
    check_shared_memory(device, shape.shared_bytes);
    error = allow_shared_memory(reinterpret_cast<const void*>(kernel));
  }
  if (error != cudaSuccess) return error;
  // CUDA would truncate larger numbers.
  if (shape.blocks > kMaxBlocks || std::max(shape.rows, shape.layers) > kMaxRows) {
    return cudaErrorInvalidConfiguration;
  }
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (shape.is_dependent && device.major >= 9) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.is_cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.rows),
                        static_cast<unsigned>(shape.layers));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

/// Calls visit with a null pointer to the type of elements that have at most 4 bytes each.
template <class Visit>
auto with_element_type(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kBFloat16:
      return visit(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16:
      return visit(static_cast<Half*>(nullptr));
    default:
      return visit(static_cast<float*>(nullptr));
  }
}

/// Calls visit with a null pointer to the type of the states.
template <class Problem, class Visit>
cudaError_t with_state_type(const Problem& problem, const Visit& visit) {
  if (problem.is_double) {
    return problem.is_complex ? visit(static_cast<Complex<double>*>(nullptr))
                              : visit(static_cast<double*>(nullptr));
  }
  return problem.is_complex ? visit(static_cast<Complex<float>*>(nullptr))
                            : visit(static_cast<float*>(nullptr));
}

}  // namespace selective_scan::cuda
