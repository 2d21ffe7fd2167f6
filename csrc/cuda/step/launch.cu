// The launch of a token's step.
#include "../launch.h"

#include <algorithm>

#include "../kit/launch_tools.h"
#include "step.cuh"

namespace selective_scan::cuda {

cudaError_t step_needs(const StepParams& params, StepNeeds& needs) {
  Device device;
  const cudaError_t error = current_device(device);
  step::StepPlan plan;
  needs.refusal = step::plan_step(params, device, plan);
  needs.workspace_bytes = plan.workspace_bytes();
  return error;
}

cudaError_t step_through_layers(const StepParams& params, void* workspace, cudaStream_t stream) {
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return error;
  step::StepArgs args{.params = params, .plan = {}, .workspace = workspace, .layers = {}};
  if (step::plan_step(params, device, args.plan)) return cudaErrorNotSupported;
  std::copy_n(params.layer, params.layers, args.layers);
  return with_element_type(params.weight_dtype, [&]<class W>(W*) {
    const auto kernel = args.plan.padded_rows > 8 ? &step::step_kernel<W, 16, 2>
                        : args.plan.pairs_entries ? &step::step_kernel<W, 8, 2>
                                                  : &step::step_kernel<W, 8, 1>;
    return launch_kernel(kernel, args.plan.shape, stream, args);
  });
}

}  // namespace selective_scan::cuda
