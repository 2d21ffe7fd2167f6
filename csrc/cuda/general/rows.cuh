// Between (batch, channel, step) arrays in global memory, of any dtype and layout, and rows of the
// compute type in shared memory.
//
// A chunk is first copied as it is, asynchronously where addresses allow, so that the copies of one
// chunk overlap the scan of the chunk before. It is then converted, four steps of a channel at a
// time ("group"). What depends on dtypes and strides of these arrays is here and nowhere else.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "../kit/elements.cuh"
#include "../kit/geometry.cuh"
#include "copy_plans.h"

namespace selective_scan::cuda::general {

/// One warp's channels in one chunk. What does not exist, at the end of a group or of the sequence,
/// is zero.
struct WarpTile {
  int first_channel;  // in the block's tile
  int channels;       // that exist
  int steps;          // likewise
  int64_t first_step;
  int lane;
  int channel_bits;  // log2 of the channels, existing or not

  __device__ int groups() const { return kBlocksPerChunk << channel_bits; }
  /// How many groups a lane visits; where there are fewer groups than lanes, some visit none.
  __device__ int visits() const { return ceil_div(groups(), kWarpSize); }
  __device__ bool is_full() const { return channels == 1 << channel_bits && steps == kChunk; }
};

/// A group: four steps of one channel.
struct StepQuad {
  int channel;
  int step;

  /// The g-th in the order that suits the memory: along steps, or along channels.
  __device__ __forceinline__ StepQuad(bool along_channels, const WarpTile& tile, int g) {
    if (along_channels) {
      channel = g & ((1 << tile.channel_bits) - 1);
      step = (g >> tile.channel_bits) * kBlockSteps;
    } else {
      channel = g / kBlocksPerChunk;
      step = g % kBlocksPerChunk * kBlockSteps;
    }
  }
  /// Returns where the group lies in [channel][step] rows of the compute type.
  __device__ __forceinline__ int at() const { return channel * kRowStride + step; }
};

/// Groups that lie along steps: lanes visit this many channels at a time.
constexpr int kChannelsPerVisit = kWarpSize / kBlocksPerChunk;

/// An array as one warp sees it.
struct RowWindow {
  char* data;  // first channel of the warp, step 0
  int64_t channel;
  int64_t step;
  int size;  // of an element
  RowPlan plan;
  DType dtype;

  __device__ RowWindow(const ArrayView& view, RowPlan plan, const WorkItem& item, int first_channel)
      : data(static_cast<char*>(view.data)),
        channel(view.channel),
        step(view.step),
        size(static_cast<int>(element_size(view.dtype))),
        plan(plan),
        dtype(view.dtype) {
    data += (item.batch * view.batch + (item.first_channel + first_channel) * view.channel) * size;
  }

  __device__ char* at(int c, int64_t t) const { return data + (c * channel + t * step) * size; }
};

/// Copies `bytes`, a power of two from 4 on, without waiting.
__device__ __forceinline__ void copy_async(char* target, const char* source, int bytes) {
  if (bytes == 8) {
    __pipeline_memcpy_async(target, source, 8);
  } else if (bytes == 4) {
    __pipeline_memcpy_async(target, source, 4);
  } else {
#pragma unroll 1
    for (int i = 0; i < bytes; i += 16) __pipeline_memcpy_async(target + i, source + i, 16);
  }
}

/// Starts copying an element of 4 or 8 bytes, or zeroes it.
__device__ __forceinline__ void copy_word_async(char* target, const char* source, int size,
                                                bool exists) {
  if (size == 4) {
    if (exists) {
      __pipeline_memcpy_async(target, source, 4);
    } else {
      *reinterpret_cast<uint32_t*>(target) = 0;
    }
  } else if (exists) {
    __pipeline_memcpy_async(target, source, 8);
  } else {
    *reinterpret_cast<uint64_t*>(target) = 0;
  }
}

/// Copies an element, or zeroes it.
__device__ __forceinline__ void copy_element(char* target, const char* source, int size,
                                             bool exists) {
  if (size == 2) {
    *reinterpret_cast<uint16_t*>(target) =
        exists ? *reinterpret_cast<const uint16_t*>(source) : uint16_t{0};
  } else if (size == 4) {
    *reinterpret_cast<uint32_t*>(target) = exists ? *reinterpret_cast<const uint32_t*>(source) : 0u;
  } else {
    *reinterpret_cast<uint64_t*>(target) =
        exists ? *reinterpret_cast<const uint64_t*>(source) : uint64_t{0};
  }
}

/// Copies a tile of any layout, element by element, kMany of them on their way at a time. Words of
/// four bytes or more are copied asynchronously.
template <class Word>
__device__ __forceinline__ void copy_row_elements(const RowWindow& window, const WarpTile& tile,
                                                  char* raw) {
  constexpr int kMany = 8;
  // Neighbouring lanes take neighbouring steps, or channels where only those may be contiguous.
  const bool step_major = window.plan.mode == RowMode::kChannels;
  const bool along_channels = step_major || window.channel == 1;
  const int channels = 1 << tile.channel_bits;
  Word* const words = reinterpret_cast<Word*>(raw);
  for (int first = tile.lane; first < kChunk * channels; first += kMany * kWarpSize) {
    Word values[kMany];
    int at[kMany];
#pragma unroll
    for (int k = 0; k < kMany; ++k) {
      const int i = first + k * kWarpSize;
      const int c = along_channels ? i & (channels - 1) : i / kChunk;
      const int t = along_channels ? i >> tile.channel_bits : i % kChunk;
      const bool exists = c < tile.channels && t < tile.steps;
      at[k] = i < kChunk * channels ? (step_major ? t * channels + c : c * kChunk + t) : -1;
      const char* source = window.at(c, tile.first_step + t);
      values[k] = 0;
      if constexpr (sizeof(Word) >= 4) {
        if (exists) {
          __pipeline_memcpy_async(words + at[k], source, sizeof(Word));
          at[k] = -1;
        }
      } else {
        if (exists) values[k] = *reinterpret_cast<const Word*>(source);
      }
    }
#pragma unroll
    for (int k = 0; k < kMany; ++k) {
      if (at[k] >= 0) words[at[k]] = values[k];
    }
  }
}

/// Copies a tile of any layout, complete or not. Out of line, and given copies of its arguments, so
/// that it costs the fast ways of copy_rows() nothing.
static __device__ __noinline__ void copy_rows_of_any_kind(RowWindow window, WarpTile tile,
                                                          char* raw) {
  const int size = window.size;
  if (window.plan.mode == RowMode::kSteps) {
    for (int g = tile.lane; g < tile.groups(); g += kWarpSize) {
      const StepQuad group(false, tile, g);
      char* target = raw + g * kBlockSteps * size;
      if (group.channel < tile.channels && group.step + kBlockSteps <= tile.steps) {
        const int first = window.plan.reversed ? kBlockSteps - 1 : 0;
        copy_async(target, window.at(group.channel, tile.first_step + group.step + first),
                   kBlockSteps * size);
      } else {
        for (int j = 0; j < kBlockSteps; ++j) {
          const int t = group.step + (window.plan.reversed ? kBlockSteps - 1 - j : j);
          copy_element(target + j * size, window.at(group.channel, tile.first_step + t), size,
                       group.channel < tile.channels && t < tile.steps);
        }
      }
    }
  } else if (size == 2) {
    copy_row_elements<uint16_t>(window, tile, raw);
  } else if (size == 4) {
    copy_row_elements<uint32_t>(window, tile, raw);
  } else {
    copy_row_elements<uint64_t>(window, tile, raw);
  }
}

/// Copies a complete tile of 4-byte or 2-byte elements of any alignment, lanes along steps.
static __device__ __noinline__ void copy_complete_rows(RowWindow window, WarpTile tile, char* raw) {
  const int channels = 1 << tile.channel_bits;
  const char* source = window.at(0, tile.first_step + tile.lane);
  const int64_t stride = window.channel * window.size;
  if (window.size == 4) {
    char* target = raw + tile.lane * 4;
#pragma unroll 8
    for (int c = 0; c < channels; ++c, source += stride, target += kChunk * 4) {
      __pipeline_memcpy_async(target, source, 4);
    }
    return;
  }
  constexpr int kMany = 8;  // on their way at a time
  uint16_t* target = reinterpret_cast<uint16_t*>(raw) + tile.lane;
  for (int c = 0; c < channels; c += kMany) {
    uint16_t values[kMany];
#pragma unroll
    for (int k = 0; k < kMany; ++k) {
      if (c + k < channels) values[k] = *reinterpret_cast<const uint16_t*>(source);
      source += stride;
    }
#pragma unroll
    for (int k = 0; k < kMany; ++k) {
      if (c + k < channels) target[(c + k) * kChunk] = values[k];
    }
  }
}

/// Starts copying the tile to `raw`: elements as they are, [channel][step], or [step][channel] in
/// mode kChannels. Reversed groups keep the order of memory.
__device__ __forceinline__ void copy_rows(const RowWindow& window, const WarpTile& tile,
                                          char* raw) {
  const int size = window.size;
  if (tile.is_full() && window.plan.mode == RowMode::kSteps) {
    const StepQuad first(false, tile, tile.lane);
    const char* source = window.at(
        first.channel, tile.first_step + first.step + (window.plan.reversed ? kBlockSteps - 1 : 0));
    const int64_t visit_stride = kChannelsPerVisit * window.channel * size;
    char* target = raw + tile.lane * kBlockSteps * size;
#pragma unroll 2
    for (int visit = 0; visit < tile.visits(); ++visit) {
      if (visit * kWarpSize + tile.lane >= tile.groups()) break;
      copy_async(target, source, kBlockSteps * size);
      source += visit_stride;
      target += kWarpSize * kBlockSteps * size;
    }
  } else if (tile.is_full() && window.plan.mode == RowMode::kChannels) {
    const int step_bytes = size << tile.channel_bits;
    const int bytes = copy_bytes(step_bytes);
    const int accesses_bits = step_bytes <= 16 ? 0 : __ffs(step_bytes / 16) - 1;  // of a step
#pragma unroll 1
    for (int i = tile.lane; i < kChunk << accesses_bits; i += kWarpSize) {
      const char* step = window.at(0, tile.first_step + (i >> accesses_bits));
      copy_async(raw + i * bytes, step + (i & ((1 << accesses_bits) - 1)) * bytes, bytes);
    }
  } else if (tile.is_full() && window.plan.mode == RowMode::kElements && size <= 4) {
    copy_complete_rows(window, tile, raw);
  } else {
    copy_rows_of_any_kind(window, tile, raw);
  }
}

/// Converts kGroups groups of a lane at once, so that their arithmetic overlaps.
template <class R, int kGroups, class Transform>
__device__ __forceinline__ void convert_groups(const RowWindow& window, const WarpTile& tile,
                                               int first_visit, const char* raw, R* rows,
                                               const Transform& transform) {
  const bool along_channels = window.plan.mode == RowMode::kChannels;
  Pack<R, kGroups * kBlockSteps> values;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int g = (first_visit + i) * kWarpSize + tile.lane;
    Pack<R, kBlockSteps> group_values;
    if (along_channels) {
      const StepQuad group(true, tile, g);
      const char* element = raw + ((group.step << tile.channel_bits) + group.channel) * window.size;
#pragma unroll
      for (int j = 0; j < kBlockSteps; ++j) {
        group_values.v[j] =
            load_elements<R, 1>(element + (j << tile.channel_bits) * window.size, window.dtype)
                .v[0];
      }
    } else {
      group_values =
          load_elements<R, kBlockSteps>(raw + g * kBlockSteps * window.size, window.dtype);
      if (window.plan.mode == RowMode::kSteps && window.plan.reversed) {
        group_values = reversed(group_values);
      }
    }
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) values.v[i * kBlockSteps + j] = group_values.v[j];
  }
  const auto group_at = [&](int i) {
    return StepQuad(along_channels, tile, (first_visit + i) * kWarpSize + tile.lane);
  };
  transform(values, group_at);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    Pack<R, kBlockSteps> group_values;
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) group_values.v[j] = values.v[i * kBlockSteps + j];
    store_pack(rows + group_at(i).at(), group_values);
  }
}

/// How many groups a lane converts, or stores, at a time.
constexpr int kGroupsAtATime = 2;

/// Fills rows of the compute type from what copy_rows() has copied. transform(values, group_at)
/// changes the values of one or more groups in place; group_at(i) is the i-th of them.
template <class R, class Transform>
__device__ __forceinline__ void convert_rows(const RowWindow& window, const WarpTile& tile,
                                             const char* raw, R* rows, const Transform& transform) {
  if (tile.lane >= tile.groups()) return;
  if (tile.visits() == 1) {
    convert_groups<R, 1>(window, tile, 0, raw, rows, transform);
    return;
  }
#pragma unroll 1
  for (int visit = 0; visit < tile.visits(); visit += kGroupsAtATime) {
    convert_groups<R, kGroupsAtATime>(window, tile, visit, raw, rows, transform);
  }
}

/// Writes value(group), four values, for every group of the tile.
template <class R, class Value>
__device__ __forceinline__ void store_rows(const RowWindow& window, const WarpTile& tile,
                                           const Value& value) {
  const bool along_channels = window.plan.mode == RowMode::kChannels;
  const bool whole_groups = window.plan.mode == RowMode::kSteps;
  const bool backwards = whole_groups && window.plan.reversed;
  const StepQuad first(along_channels, tile, tile.lane);
  char* target = window.at(first.channel, tile.first_step + first.step);
  const int64_t visit_stride =
      (along_channels ? (kBlockSteps << (kWarpBits - tile.channel_bits)) * window.step
                      : kChannelsPerVisit * window.channel) *
      window.size;
#pragma unroll kGroupsAtATime
  for (int visit = 0; visit < tile.visits(); ++visit, target += visit_stride) {
    const int g = visit * kWarpSize + tile.lane;
    const StepQuad group(along_channels, tile, g);
    if (g >= tile.groups() || group.channel >= tile.channels || group.step >= tile.steps) continue;
    Pack<R, kBlockSteps> values = value(group);
    if (whole_groups && group.step + kBlockSteps <= tile.steps) {
      char* lowest = target;
      if (backwards) {
        values = reversed(values);
        lowest -= (kBlockSteps - 1) * window.size;
      }
      store_elements(lowest, window.dtype, values);
    } else {
#pragma unroll
      for (int j = 0; j < kBlockSteps; ++j) {
        if (group.step + j < tile.steps) {
          store_elements(target + j * window.step * window.size, window.dtype,
                         Pack<R, 1>{values.v[j]});
        }
      }
    }
  }
}

}  // namespace selective_scan::cuda::general
