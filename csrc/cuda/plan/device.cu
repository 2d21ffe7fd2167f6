// The properties of the current device that the launchers know.

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "../kit/launch_tools.h"

namespace selective_scan::cuda {
namespace {

/// Compiled for the same architectures as all kernels, so its attributes tell which code runs.
__global__ void probe_kernel() {}

cudaError_t ask(int id, Device& device) {
  cudaError_t error = cudaSuccess;
  const auto query = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, id);
  };
  query(device.multiprocessors, cudaDevAttrMultiProcessorCount);
  query(device.block_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  query(device.shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  query(device.major, cudaDevAttrComputeCapabilityMajor);
  cudaFuncAttributes compiled{};
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&compiled, probe_kernel);
  device.major = std::min(device.major, compiled.ptxVersion / 10);
  return error;
}

}  // namespace

cudaError_t current_device(Device& device) {
  thread_local int known_id = -1;
  thread_local Device known;
  int id = 0;
  cudaError_t error = cudaGetDevice(&id);
  if (error == cudaSuccess && id != known_id) {
    Device found;
    error = ask(id, found);
    if (error == cudaSuccess) {
      const char* const less = std::getenv("SELECTIVE_SCAN_CUDA_DEVICE");
      known = lessened(found, less == nullptr ? "" : less);
      known_id = id;
    }
  }
  device = known;
  return error;
}

void check_shared_memory(const Device& device, int bytes) {
  if (bytes <= device.block_shared_bytes) return;
  throw std::runtime_error("selective_scan: a call of these sizes and dtypes needs " +
                           std::to_string(bytes) +
                           " bytes of shared memory, and blocks of this GPU have at most " +
                           std::to_string(device.block_shared_bytes));
}

}  // namespace selective_scan::cuda
