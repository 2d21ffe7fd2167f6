// What every launcher needs on the host: the device's figures, scratch memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "../../core/config.h"

namespace selective_scan::cuda {

struct Device {
  int multiprocessors = 1;
  int block_shared_bytes = 48 * 1024;  // that a block may have
  int shared_bytes = 48 * 1024;        // of a multiprocessor
  int registers = 65536;               // likewise
  /// Compute capability of the code that runs: what is compiled for an earlier one, and on this
  /// device from PTX, has nothing of what came later.
  int major = 0;
};

/// The current device, asked for its figures once per thread and change of device.
cudaError_t current_device(Device& device);

struct LaunchShape {
  int64_t blocks;
  int threads;
  int shared_bytes = 0;
  bool is_dependent = false;  // on the kernel in front of it
  int cluster = 1;            // blocks
  int64_t rows = 1;           // of `blocks` blocks each
  int64_t layers = 1;         // of rows
};

/// Launches a kernel. One that is dependent may begin before the kernel in front of it in the
/// stream is complete (programmatic dependent launch): code before Hopper's does not wait for it.
template <class... Parameters>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const LaunchShape& shape,
                          cudaStream_t stream,
                          const std::type_identity_t<Parameters>&... arguments) {
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  if (shape.is_dependent && device.major >= 9) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
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

/// Dynamic shared memory above 48 KiB has to be asked for.
template <class Kernel>
cudaError_t allow_shared_bytes(Kernel* kernel, int bytes) {
  if (bytes <= 48 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

inline unsigned grid_blocks(int64_t work_items) {
  constexpr int64_t kMaxBlocks = 0x7fffffff;
  return static_cast<unsigned>(work_items < kMaxBlocks ? work_items : kMaxBlocks);
}

/// Hands out consecutive arrays of scratch memory from `memory` on; null ones where that is null,
/// to learn their size. An array that is not wanted stays as it is.
class Scratch {
 public:
  explicit Scratch(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class T>
  void take(T*& array, bool wanted, int64_t count, int64_t size) {
    constexpr int64_t kAlignment = 256;
    if (!wanted) return;
    array = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += round_up(count * size, kAlignment);
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

/// Gives arrays their places in memory(bytes): `take_all(scratch)` takes them from a Scratch.
template <class Memory, class TakeAll>
void lay_out(const Memory& memory, const TakeAll& take_all) {
  Scratch sizes(nullptr);
  take_all(sizes);
  if (sizes.bytes() == 0) return;
  Scratch arrays(memory(sizes.bytes()));
  take_all(arrays);
}

}  // namespace selective_scan::cuda
