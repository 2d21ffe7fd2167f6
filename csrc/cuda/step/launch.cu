// The launch of a token's step: all blocks are on the GPU at the same time, or none is.
#include "../launch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../kit/launch_tools.h"
#include "step.cuh"

namespace selective_scan::cuda {
namespace step {
namespace {

template <class W, int kRows>
cudaError_t launch(const StepArgs& args, cudaStream_t stream) {
  const auto kernel = &step_kernel<W, kRows>;
  cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, args.plan.shared.bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(args.plan.shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(args.plan.shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(args.plan.shape.shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <class W>
cudaError_t launch_rows(const StepArgs& args, cudaStream_t stream) {
  return args.plan.padded_rows == 8 ? launch<W, 8>(args, stream) : launch<W, 16>(args, stream);
}

StepPlan make_plan(const StepParams& params) {
  Device device;
  StepPlan plan;
  if (current_device(device) != cudaSuccess) {
    throw std::runtime_error("selective_scan: the current device cannot be asked for its figures");
  }
  if (const char* reason = plan_step(params, device, plan)) {
    throw std::runtime_error(std::string("selective_scan: s6_step: on CUDA ") + reason);
  }
  return plan;
}

}  // namespace
}  // namespace step

int64_t step_workspace_bytes(const StepParams& params) {
  return step::make_plan(params).exchange.words * static_cast<int64_t>(sizeof(step::Word));
}

cudaError_t step_through_layers(const StepParams& params, void* workspace, cudaStream_t stream) {
  step::StepArgs args{};
  args.params = params;
  args.plan = step::make_plan(params);
  args.workspace = workspace;
  std::copy_n(params.layer, params.layers, args.layers);
  switch (params.weight_dtype) {
    case DType::kBFloat16:
      return step::launch_rows<BFloat16>(args, stream);
    case DType::kFloat16:
      return step::launch_rows<Half>(args, stream);
    default:
      return step::launch_rows<float>(args, stream);
  }
}

}  // namespace selective_scan::cuda
