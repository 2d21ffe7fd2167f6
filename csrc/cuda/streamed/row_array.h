// The streamed kernels' view of a (batch, channel, step) array, and its division among the lanes of
// a warp.
//
// A chunk is kChunk steps of kItems channels, of which every lane holds kItems values. If rows are
// contiguous and aligned, these are kItems consecutive steps of one channel (LaneMap::kSteps), else
// one step of all channels (kChannels). The latter suits any stride and alignment, and is one
// vector if channels are neighbors in memory. All arrays of a kernel have the same map, so that a
// lane holds the same (channel, step) pairs of each of them.
//
// Instead of kChannels, a kernel may have two maps that leave less to decide at run time:
// kElements, which has no vectors, and kStepPairs, which has nothing but vectors and gives a lane
// two consecutive steps of half of the channels (item 2·c + j is step j of channel c). kStepPairs
// needs half as many accesses to shared memory and, for fp32, touches half as many lines of the L1
// cache.
#pragma once

#include <cstdint>

#include "../../core/dtype.h"

namespace selective_scan::cuda::streamed {

enum class LaneMap : int8_t { kSteps, kChannels, kElements, kStepPairs };

/// The element type of a kernel's arrays, as known at compile time: kTwoBytes may be either type of
/// two bytes.
enum class Elements : int8_t { kBFloat16, kFloat16, kFloat32, kTwoBytes };

constexpr SELECTIVE_SCAN_HD int size_of(Elements elements) {
  return elements == Elements::kFloat32 ? 4 : 2;
}
/// Returns whether gradients need more digits than the tensor cores keep of the values that they
/// sum. bfloat16 has fewer digits than those; float16 has as many, which is not enough.
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
  bool has_vectors = false;       // a lane's values are contiguous and aligned
  bool has_step_vectors = false;  // kSteps' slices are, whatever the map

  SELECTIVE_SCAN_HD bool present() const { return data != nullptr; }
  /// Returns the address of an element of batch entry b and channel c at step t.
  SELECTIVE_SCAN_HD char* at(int64_t b, int64_t c, int64_t t) const {
    return data + b * batch + c * channel + t * step;
  }
};

}  // namespace selective_scan::cuda::streamed
