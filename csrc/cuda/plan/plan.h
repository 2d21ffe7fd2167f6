// The plan of a selective-scan call: its kernels and their launch shapes.
//
// A plan is made once per call, from the parameters and the device's figures alone. Launchers
// (launch.cu of each path) turn it into kernel launches and decide nothing.
//
// plan.cpp has the rules by which one path is preferred to another. Each path has a file here that
// says which calls it can run, how it divides the work, and which scratch memory it needs. The
// path's plan struct lies with its kernels.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>

#include "../../core/params.h"
#include "../dstate1/plan.h"
#include "../floor/plan.h"
#include "../narrow/plan.h"
#include "../prompt/plan.h"
#include "../streamed/plan.h"
#include "device.h"

namespace selective_scan::cuda {

/// kPrompt has only a forward pass.
enum class Path : int8_t { kDstate1, kStreamed, kFloor, kNarrow, kPrompt };
constexpr std::array<std::string_view, 5> kPathNames = {"dstate1", "streamed", "floor", "narrow",
                                                        "prompt"};
static_assert(kPathNames.size() == static_cast<size_t>(Path::kPrompt) + 1 &&
              !kPathNames.back().empty());

/// Returns whether a device has the path's kernels, some of which need asynchronous copies.
constexpr bool has_kernels(const Device& device, Path path) {
  return device.has_async_copies() || path == Path::kDstate1 || path == Path::kFloor;
}

/// The plans of all paths, in the order of Path.
template <class... Plans>
struct AnyPlan {
  std::variant<Plans...> of_path;

  Path path() const { return static_cast<Path>(of_path.index()); }
  const LaunchShape& shape() const {
    return std::visit([](const auto& plan) -> const LaunchShape& { return plan.shape; }, of_path);
  }
  int64_t scratch_bytes() const {
    return std::visit([](const auto& plan) { return plan.scratch.bytes; }, of_path);
  }
};
using ForwardPlan = AnyPlan<dstate1::ForwardPlan, streamed::ForwardPlan, floor::ForwardPlan,
                            narrow::ForwardPlan, prompt::ForwardPlan>;
using BackwardPlan = AnyPlan<dstate1::BackwardPlan, streamed::BackwardPlan, floor::BackwardPlan,
                             narrow::BackwardPlan>;

/// Plans a call that is not empty: batch, dim and dstate are positive. `wanted` forces a path;
/// without it the rules choose one. Throws std::runtime_error if that path, or every path, cannot
/// run the call.
ForwardPlan plan_scan(const ForwardParams& params, const Device& device,
                      std::optional<Path> wanted = std::nullopt);
BackwardPlan plan_scan(const BackwardParams& params, const Device& device,
                       std::optional<Path> wanted = std::nullopt);

}  // namespace selective_scan::cuda
