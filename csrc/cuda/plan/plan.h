// Which kernels run a call of the selective scan, and in which shape.
//
// A plan is made once a call, from the parameters and the device's figures alone. Launchers
// (launch.cu of each path) turn it into kernel launches and decide nothing.
//
// plan.cpp holds the rules by which one path is the better choice than another. Each path has a
// file here with what it can run, how it divides the work, and what scratch memory it needs. Its
// plan is a struct of its own, which lies with its kernels.
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

/// The last one has a forward pass alone.
enum class Path : int8_t { kDstate1, kStreamed, kFloor, kNarrow, kPrompt };
constexpr std::array<std::string_view, 5> kPathNames = {"dstate1", "streamed", "floor", "narrow",
                                                        "prompt"};
static_assert(kPathNames.size() == static_cast<size_t>(Path::kPrompt) + 1 &&
              !kPathNames.back().empty());

/// Whether a device has the path's kernels, of which some need asynchronous copies.
constexpr bool has_kernels(const Device& device, Path path) {
  return device.has_async_copies() || path == Path::kDstate1 || path == Path::kFloor;
}

/// The plans are in the order of Path.
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

/// The plan of a call that is not empty: batch, dim and dstate are positive. `wanted` is the path
/// to take, if that is not left to the rules. Throws std::runtime_error where that path cannot run
/// the call, or no path can.
ForwardPlan plan_scan(const ForwardParams& params, const Device& device,
                      std::optional<Path> wanted = std::nullopt);
BackwardPlan plan_scan(const BackwardParams& params, const Device& device,
                       std::optional<Path> wanted = std::nullopt);

}  // namespace selective_scan::cuda
