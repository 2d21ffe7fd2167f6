// The selective scan: plans a call, allocates its scratch memory, and lets the path run it.
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
#include "streamed/backward_kernels.h"
#include "streamed/forward_kernels.h"

namespace selective_scan::cuda {
namespace {

/// Returns the path that SELECTIVE_SCAN_CUDA_KERNELS names, which runs all calls in tests and
/// comparisons. The variable is read once.
std::optional<Path> wanted_path() {
  static const std::optional<Path> wanted = []() -> std::optional<Path> {
    const char* value = std::getenv("SELECTIVE_SCAN_CUDA_KERNELS");
    const std::string_view name = value == nullptr ? "" : value;
    if (name.empty()) return std::nullopt;
    const auto found = std::find(kPathNames.begin(), kPathNames.end(), name);
    if (found == kPathNames.end()) {
      std::string names;
      for (const std::string_view known : kPathNames) {
        names.append(names.empty() ? "" : ", ").append(known);
      }
      throw std::runtime_error(
          "selective_scan: SELECTIVE_SCAN_CUDA_KERNELS must be unset or one of " + names +
          ", got '" + std::string(name) + "'");
    }
    return static_cast<Path>(found - kPathNames.begin());
  }();
  return wanted;
}

template <class Params, class Plan>
cudaError_t run_plan(const Params& params, const Plan& plan, void* scratch, cudaStream_t stream,
                     const StateExchange* exchange = nullptr) {
  return std::visit(
      [&](const auto& of_path) {
        if constexpr (requires { run(params, of_path, scratch, stream, exchange); }) {
          return run(params, of_path, scratch, stream, exchange);
        } else {
          return run(params, of_path, scratch, stream);
        }
      },
      plan.of_path);
}

/// Returns whether a plan's pass computes the map of all steps before it scans them.
bool has_summaries(const ForwardParams& params, const ForwardPlan& plan) {
  const auto* const streamed = std::get_if<streamed::ForwardPlan>(&plan.of_path);
  if (streamed != nullptr) return streamed->geometry.segments > 1 && params.seqlen % kChunk == 0;
  const auto* const floor = std::get_if<floor::ForwardPlan>(&plan.of_path);
  return floor != nullptr && floor->geometry.segments > 1;
}
bool has_summaries(const BackwardParams&, const BackwardPlan& plan) {
  const auto* const streamed = std::get_if<streamed::BackwardPlan>(&plan.of_path);
  if (streamed != nullptr) return streamed->geometry.segments > 1;
  const auto* const floor = std::get_if<floor::BackwardPlan>(&plan.of_path);
  return floor != nullptr && floor->geometry.segments > 1;
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
cudaError_t scan(Params params, const ScratchMemory& memory, cudaStream_t stream,
                 const StateExchange* exchange = nullptr) {
  if (params.batch == 0 || params.dim == 0 || params.dstate == 0) return cudaSuccess;
  Device device;
  cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  if (exchange != nullptr) set_entering(params, exchange->offset);  // a placeholder for plans
  const bool is_packed = params.packed.present();
  const auto exchange_before = [&] {
    if (exchange == nullptr) return cudaSuccess;
    const cudaError_t error = scan(alone(params, *exchange), memory, stream);
    if (error == cudaSuccess) set_entering(params, exchange->enter());
    return error;
  };
  const auto slices = [&](const Arrangement& arrangement, const ScratchMemory& source) {
    return plan_slices(params, arrangement, device, wanted_path(), source);
  };
  if (const auto arrangement = arrange_states(params, device); arrangement && !is_packed) {
    if ((error = exchange_before()) != cudaSuccess) return error;
    return run_slices(slices(*arrangement, memory), memory, stream);
  }
  const auto plan = plan_scan(params, device, wanted_path());
  if (!wanted_path() && !is_packed) {
    if (const auto arrangement = arrange_rows(params, device, plan)) {
      // Which path a slice takes depends on how its arrays are aligned, not on where they are.
      const auto unallocated = [](int64_t) { return reinterpret_cast<void*>(uintptr_t{256}); };
      if (slices(*arrangement, unallocated).slices.front().plan.path() != Path::kFloor) {
        if ((error = exchange_before()) != cudaSuccess) return error;
        return run_slices(slices(*arrangement, memory), memory, stream);
      }
    }
  }
  if (exchange != nullptr && !has_summaries(params, plan)) {
    if ((error = exchange_before()) != cudaSuccess) return error;
    exchange = nullptr;
  }
  const int64_t bytes = plan.scratch_bytes();
  void* const scratch = bytes > 0 ? memory(bytes) : nullptr;
  error = run_plan(params, plan, scratch, stream, exchange);
  if (error != cudaSuccess || !is_packed) return error;
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

cudaError_t launch(const ForwardParams& params, const ScratchMemory& memory, cudaStream_t stream,
                   const StateExchange* exchange) {
  return scan(params, memory, stream, exchange);
}

cudaError_t launch(const BackwardParams& params, const ScratchMemory& memory, cudaStream_t stream,
                   const StateExchange* exchange) {
  return scan(params, memory, stream, exchange);
}

}  // namespace selective_scan::cuda
