// Which kernels run a call of the selective scan, and in which shape.
//
// A plan is made once a call, from the parameters and the device's figures alone. Launchers
// (launch.cu of each path) turn it into kernel launches and decide nothing.
//
// plan.cpp holds the rules by which one path is the better choice than another. Each path has a
// file here with what it can run, how it divides the work, and what scratch memory it needs.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>

#include "../../core/params.h"
#include "../general/shared_layout.h"
#include "../kit/geometry.h"
#include "../kit/launch_shape.h"
#include "../relay/layout.h"
#include "../streamed/forward_shape.h"
#include "../streamed/row_array.h"
#include "device.h"
#include "scratch.h"

namespace selective_scan::cuda {

enum class Path : int8_t { kGeneral, kDstate1, kRelay, kStreamed };
constexpr std::array<std::string_view, 4> kPathNames = {"general", "dstate1", "relay", "streamed"};

// --- general: correct for everything ---

template <class PassScratch>
struct GeneralPlan {
  general::TypeSizes sizes;  // of the instantiation's types
  Geometry geometry;         // with segments
  general::SharedLayout layout;
  LaunchShape shape;
  PassScratch scratch;
};
using GeneralForwardPlan = GeneralPlan<ForwardScratch>;
using GeneralBackwardPlan = GeneralPlan<BackwardScratch>;

// --- dstate1: one real state in fp32, lanes lie along time ---

struct Dstate1ForwardPlan {
  bool has_vectors;    // see dstate1::Vectors
  int64_t windows;     // of a group's channels
  int64_t work_items;  // batch · groups · windows
  LaunchShape shape;
  ForwardScratch scratch;
};

struct Dstate1BackwardPlan {
  bool has_vectors;
  int warps;           // of a block
  int slots;           // windows that a warp takes in turns
  int64_t tiles;       // of a group's channels
  int64_t work_items;  // batch · groups · tiles
  LaunchShape shape;
  BackwardScratch scratch;
};

// --- relay: 5 to 16 real states in fp32, few channels; warps divide time ---

struct RelayForwardPlan {
  int vector_size;  // bytes of an element where arrays are vectors, or 0: see relay::Vectors
  bool may_have_one_state;  // blocks of one state a lane are few enough for the device
  bool has_one_state;       // the kernel of rounds.cuh, else that of forward.cuh
  relay::RelayGeometry geometry;
  // With one state a lane: see relay::RoundsForwardArgs.
  int slots = 0;
  int pairs = 0;
  int rounds = 0;
  LaunchShape shape;
  ForwardScratch scratch;
};

struct RelayBackwardPlan {
  int vector_size;
  relay::RelayGeometry geometry;
  LaunchShape shape;
  BackwardScratch scratch;
};

// --- streamed: 2 to 64 states in fp32, many channels or long sequences; B and C by bulk copies ---

struct StreamedForwardPlan {
  int lane_states;    // of an instantiation
  int warp_channels;  // likewise
  int padded_states;  // of a channel
  streamed::LaneMap map;
  std::array<streamed::RowArray, 4> rows;  // u, delta, z, out
  streamed::ForwardGeometry geometry;      // with segments
  int64_t chunks;                          // of a sequence
  LaunchShape shape;
  ForwardScratch scratch;
};

struct StreamedBackwardPlan {
  int team_warps;     // that share a channel
  int padded_states;  // of a channel
  streamed::LaneMap map;
  streamed::LaneMap summary_map;
  std::array<streamed::RowArray, 7> rows;          // in the order of streamed::Row
  std::array<streamed::RowArray, 7> summary_rows;  // where there are segments
  Geometry geometry;
  int split_tiles;        // see streamed::BlockOrder, also of
  int64_t flags;          // of blocks that others wait for
  bool has_enough_warps;  // a block, for all that shared memory has no room for
  LaunchShape shape;
  LaunchShape summary_shape;
  BackwardScratch scratch;
};

// --- the choice ---

/// In the order of Path.
template <class General, class Dstate1, class Relay, class Streamed>
struct AnyPlan {
  std::variant<General, Dstate1, Relay, Streamed> of_path;

  Path path() const { return static_cast<Path>(of_path.index()); }
  const LaunchShape& shape() const {
    return std::visit([](const auto& plan) -> const LaunchShape& { return plan.shape; }, of_path);
  }
  int64_t scratch_bytes() const {
    return std::visit([](const auto& plan) { return plan.scratch.bytes; }, of_path);
  }
};
using ForwardPlan =
    AnyPlan<GeneralForwardPlan, Dstate1ForwardPlan, RelayForwardPlan, StreamedForwardPlan>;
using BackwardPlan =
    AnyPlan<GeneralBackwardPlan, Dstate1BackwardPlan, RelayBackwardPlan, StreamedBackwardPlan>;

/// The plan of a call that is not empty: batch, dim and dstate are positive. `wanted` is the path
/// to take, if that is not left to the rules. Throws std::runtime_error where that path cannot run
/// the call, or no path can.
ForwardPlan plan_forward(const ForwardParams& params, const Device& device,
                         std::optional<Path> wanted = std::nullopt);
BackwardPlan plan_backward(const BackwardParams& params, const Device& device,
                           std::optional<Path> wanted = std::nullopt);

}  // namespace selective_scan::cuda
