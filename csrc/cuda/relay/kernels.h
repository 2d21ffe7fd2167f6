// The relay kernels as their launcher sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "../scan.h"

namespace selective_scan::cuda::relay {

/// How arrays with steps are stored. Either all of them are vectors: of one type of 2 or 4 bytes,
/// contiguous along steps and aligned so that a lane moves its items, or 16 bytes of a row of B or
/// C, at once; vectors exist as a whole. Or they are taken element by element, of any type and
/// layout.
template <int kSize>
struct Vectors;
struct Elements;

struct RelayGeometry {
  int warps = 1;
  int64_t tiles = 1;  // of a group
  int64_t group_channels = 1;
  int64_t blocks = 1;  // or clusters
  int cluster = 1;     // blocks that share a tile
};

struct RelayForwardArgs {
  ForwardParams params;
  RelayGeometry geometry;
  const char* projections = nullptr;  // see streamed::ProjectionStream; of shapes that read it
  int64_t sequence_bytes = 0;         // of one (batch, group) of these
  bool is_dependent = false;          // launched behind the kernel that writes them
};

struct RelayBackwardArgs {
  BackwardParams params;
  RelayGeometry geometry;
  BackwardWorkspace workspace;  // partial sums: projections of every tile, the rest of every batch
};

/// kStates per lane and kSteps per chunk: see Shape; kGroup warps a group: see Handover.
template <int kStates, int kSteps, int kGroup, class Storage, Method kMethod>
struct RelayForward {
  static cudaError_t launch(RelayForwardArgs args, cudaStream_t stream);
};

/// One state per lane, chunks of kChunk steps.
template <class Storage, Method kMethod>
struct RelayBackward {
  static cudaError_t launch(RelayBackwardArgs args, cudaStream_t stream);
};

/// Adds the partial sums in a fixed order and stores the gradients.
cudaError_t relay_reduce(const RelayBackwardArgs& args, cudaStream_t stream);

}  // namespace selective_scan::cuda::relay
