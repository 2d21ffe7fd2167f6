// The plan of each path: what its launcher turns into launches.
#pragma once

#include <array>
#include <cstdint>

#include "../../core/params.h"
#include "../general/shared_layout.h"
#include "../kit/geometry.h"
#include "../kit/launch_shape.h"
#include "../kit/packed_chunks.h"
#include "../relay/layout.h"
#include "../streamed/forward_shape.h"
#include "../streamed/row_array.h"
#include "scratch.h"

namespace selective_scan::cuda {

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
  bool has_one_state;       // the kernel of relay/rounds.cuh, else that of relay/forward.cuh
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
  PackedCuts cuts;
  int64_t chunks;  // of a sequence
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
  PackedCuts cuts;
  int split_tiles;        // see streamed::BlockOrder, also of
  int64_t flags;          // of blocks that others wait for
  bool has_enough_warps;  // a block, for all that shared memory has no room for
  LaunchShape shape;
  LaunchShape summary_shape;
  BackwardScratch scratch;
};

}  // namespace selective_scan::cuda
