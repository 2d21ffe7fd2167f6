#include "launch_tools.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

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
  thread_local std::vector<std::optional<Device>> known;  // by number
  int id = 0;
  if (const cudaError_t error = cudaGetDevice(&id); error != cudaSuccess) return error;
  if (static_cast<size_t>(id) >= known.size()) known.resize(id + 1);
  if (!known[id]) {
    Device found;
    if (const cudaError_t error = ask(id, found); error != cudaSuccess) return error;
    const char* const less = std::getenv("SELECTIVE_SCAN_CUDA_DEVICE");
    known[id] = lessened(found, less == nullptr ? "" : less);
  }
  device = *known[id];
  return cudaSuccess;
}

cudaError_t allow_shared_memory(const void* kernel) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> allowed;  // kernels, and numbers of devices
  int id = 0;
  if (const cudaError_t error = cudaGetDevice(&id); error != cudaSuccess) return error;
  const std::lock_guard lock(mutex);
  if (allowed.count({kernel, id}) > 0) return cudaSuccess;
  int most = 0;
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 most - static_cast<int>(attributes.sharedSizeBytes));
  }
  if (error == cudaSuccess) allowed.insert({kernel, id});
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
