// Makes the device of a tensor current and gives PyTorch's current stream on it.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>

namespace selective_scan::op {

class CudaStream {
 public:
  explicit CudaStream(const torch::stable::Tensor& tensor)
      : device_(tensor.get_device_index()), guard_(device_) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &current));
    stream_ = static_cast<cudaStream_t>(current);
  }

  operator cudaStream_t() const { return stream_; }

 private:
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace selective_scan::op
