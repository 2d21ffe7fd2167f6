// A (batch, channel, step) array as the streamed kernels see it, and how a warp's lanes divide it.
//
// A chunk is kChunk steps of kItems channels, and every lane holds kItems values of it: kItems
// consecutive steps of one channel where rows are contiguous and aligned (LaneMap::kSteps), else
// one step of all channels (kChannels), which suits any stride and any alignment and is one vector
// where channels are neighbours in memory. All arrays of a kernel have the same map, so that what a
// lane computes of one of them meets what it holds of another.
//
// Instead of kChannels a kernel may have three maps, with less to decide at run time: kElements,
// which has no vectors, and kStepPairs, which has nothing else and lays two consecutive steps of
// half of the channels on a lane (item 2·c + j is step j of channel c). That needs half as many
// accesses to shared memory and, for fp32, touches half as many lines of the L1 cache.
#pragma once

#include <cstdint>

#include "../../core/dtype.h"

namespace selective_scan::cuda::streamed {

enum class LaneMap : int8_t { kSteps, kChannels, kElements, kStepPairs };

/// What kernels know of the elements of their arrays: those of two bytes may be of either type.
enum class Elements : int8_t { kBFloat16, kFloat16, kFloat32, kTwoBytes };

constexpr SELECTIVE_SCAN_HD int size_of(Elements elements) {
  return elements == Elements::kFloat32 ? 4 : 2;
}
/// Whether gradients have more digits than tensor cores take of what they sum up. Those of bfloat16
/// have fewer; float16 has as many, which is not enough.
constexpr SELECTIVE_SCAN_HD bool needs_all_digits(Elements elements) {
  return elements == Elements::kFloat16 || elements == Elements::kFloat32;
}

/// A (batch, channel, step) array with strides in bytes.
struct RowArray {
  char* data = nullptr;  // null: absent
  int64_t batch = 0;
  int64_t channel = 0;
  int64_t step = 0;
  DType dtype = DType::kFloat32;
  bool has_vectors = false;       // what a lane holds lies together and is aligned
  bool has_step_vectors = false;  // so do the slices of kSteps, whatever the map

  SELECTIVE_SCAN_HD bool present() const { return data != nullptr; }
};

}  // namespace selective_scan::cuda::streamed
