// The selective scan: makes the plan of a call, takes its scratch memory, and has the path run it.
#include "launch.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "dstate1/kernels.h"
#include "floor/kernels.h"
#include "kit/launch_tools.h"
#include "kit/packed_edges.h"
#include "kit/row_sums.h"
#include "narrow/kernels.h"
#include "plan/plan.h"
#include "plan/slices.h"
#include "prompt/kernels.h"
#include "relay/kernels.h"
#include "streamed/backward_kernels.h"
#include "streamed/forward_kernels.h"

namespace selective_scan::cuda {
namespace {

/// SELECTIVE_SCAN_CUDA_KERNELS names the path that runs all calls, for tests and comparisons. Read
/// once.
std::optional<Path> wanted_path() {
  static const std::optional<Path> wanted = []() -> std::optional<Path> {
    const char* value = std::getenv("SELECTIVE_SCAN_CUDA_KERNELS");
    const std::string_view name = value == nullptr ? "" : value;
    if (name.empty()) return std::nullopt;
    const auto found = std::find(kPathNames.begin(), kPathNames.end(), name);
    if (found == kPathNames.end()) {
      throw std::runtime_error(
          "selective_scan: SELECTIVE_SCAN_CUDA_KERNELS must be unset, dstate1, relay, streamed, "
          "floor, narrow or prompt, got '" +
          std::string(name) + "'");
    }
    return static_cast<Path>(found - kPathNames.begin());
  }();
  return wanted;
}

template <class Params, class Plan>
cudaError_t run_plan(const Params& params, const Plan& plan, void* scratch, cudaStream_t stream) {
  return std::visit([&](const auto& of_path) { return run(params, of_path, scratch, stream); },
                    plan.of_path);
}

template <class Params>
cudaError_t run_slices(const SlicedPlan<Params>& plan, const ScratchMemory& memory,
                       cudaStream_t stream) {
  void* const scratch = plan.scratch_bytes > 0 ? memory(plan.scratch_bytes) : nullptr;
  cudaError_t error = sum_rows(plan.copies, stream);
  for (const auto& slice : plan.slices) {
    if (error == cudaSuccess) error = run_plan(slice.params, slice.plan, scratch, stream);
    if (error == cudaSuccess) error = sum_rows(slice.sums, stream);
  }
  return error;
}

template <class Params>
cudaError_t scan(const Params& params, const ScratchMemory& memory, cudaStream_t stream) {
  if (params.batch == 0 || params.dim == 0 || params.dstate == 0) return cudaSuccess;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  const bool is_packed = params.packed.present();
  const auto slices = [&](const Arrangement& arrangement) {
    return plan_slices(params, arrangement, device, wanted_path(), memory);
  };
  if (const auto arrangement = arrange_states(params, device); arrangement && !is_packed) {
    return run_slices(slices(*arrangement), memory, stream);
  }
  const auto plan = plan_scan(params, device, wanted_path());
  if (!wanted_path() && !is_packed) {
    if (const auto arrangement = arrange_rows(params, device, plan)) {
      const auto sliced = slices(*arrangement);
      if (sliced.slices.front().plan.path() != Path::kFloor) {
        return run_slices(sliced, memory, stream);
      }
    }
  }
  const int64_t bytes = plan.scratch_bytes();
  void* const scratch = bytes > 0 ? memory(bytes) : nullptr;
  const cudaError_t result = run_plan(params, plan, scratch, stream);
  if (result != cudaSuccess || !is_packed) return result;
  return write_packed_edges(params, stream);
}

}  // namespace

cudaError_t describe_device(std::string& text) {
  Device device;
  const cudaError_t error = current_device(device);
  std::string paths;
  for (size_t i = 0; i < kPathNames.size(); ++i) {
    if (!has_kernels(device, static_cast<Path>(i))) continue;
    paths.append(paths.empty() ? "" : ",").append(kPathNames[i]);
  }
  text = facts_of(device) + " paths=" + paths;
  return error;
}

cudaError_t scan_forward(const ForwardParams& params, const ScratchMemory& memory,
                         cudaStream_t stream) {
  return scan(params, memory, stream);
}

cudaError_t scan_backward(const BackwardParams& params, const ScratchMemory& memory,
                          cudaStream_t stream) {
  return scan(params, memory, stream);
}

}  // namespace selective_scan::cuda
