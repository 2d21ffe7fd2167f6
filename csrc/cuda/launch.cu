// The selective scan: makes the plan of a call, takes its scratch memory, and has the path run it.
#include "launch.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "dstate1/kernels.h"
#include "general/kernels.h"
#include "kit/launch_tools.h"
#include "kit/packed_edges.h"
#include "plan/plan.h"
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
          "selective_scan: SELECTIVE_SCAN_CUDA_KERNELS must be unset, general, dstate1, relay or "
          "streamed, got '" +
          std::string(name) + "'");
    }
    return static_cast<Path>(found - kPathNames.begin());
  }();
  return wanted;
}

template <class Params, class MakePlan>
cudaError_t scan(const Params& params, const MakePlan& make_plan, const ScratchMemory& memory,
                 cudaStream_t stream) {
  if (params.batch == 0 || params.dim == 0 || params.dstate == 0) return cudaSuccess;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  const auto plan = make_plan(params, device, wanted_path());
  const int64_t bytes = plan.scratch_bytes();
  void* const scratch = bytes > 0 ? memory(bytes) : nullptr;
  using namespace general;
  using namespace dstate1;
  using namespace relay;
  using namespace streamed;
  const cudaError_t result = std::visit(
      [&](const auto& of_path) { return run(params, of_path, scratch, stream); }, plan.of_path);
  if (result != cudaSuccess || !params.packed.present()) return result;
  return write_packed_edges(params, stream);
}

}  // namespace

cudaError_t scan_forward(const ForwardParams& params, const ScratchMemory& memory,
                         cudaStream_t stream) {
  return scan(params, &plan_forward, memory, stream);
}

cudaError_t scan_backward(const BackwardParams& params, const ScratchMemory& memory,
                          cudaStream_t stream) {
  return scan(params, &plan_backward, memory, stream);
}

}  // namespace selective_scan::cuda
