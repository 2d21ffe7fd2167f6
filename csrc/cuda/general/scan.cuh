// What the general forward and backward scan share.
#pragma once

#include "../kit/segments.h"
#include "../kit/states.cuh"
#include "parts.cuh"
#include "rows.cuh"
#include "shared_layout.h"
#include "staged_bc.cuh"

namespace selective_scan::cuda::general {

template <class T, int kStates>
__device__ __forceinline__ void store_segment(const SegmentStates& segments, int64_t row,
                                              const Pack<T, kStates>& factor,
                                              const Pack<T, kStates>& offset) {
  store_pack(static_cast<T*>(segments.factors) + row, factor);
  store_pack(static_cast<T*>(segments.offsets) + row, offset);
}

/// B and C of a block's work item.
template <class T, int kStates>
class Projections {
 public:
  __device__ Projections(const ScanParams& params, const InputPlans& plans,
                         const Geometry& geometry, const SharedLayout& layout,
                         const ThreadRole& role, int64_t channel, bool exists)
      : params_(params),
        layout_(layout),
        piece_steps_(geometry.piece_steps),
        padded_states_(geometry.padded_states(kStates)),
        first_state_(role.first_state),
        plans_(plans) {
    if (!params.variable_B) keep_constant(params.B, 0, channel, exists);
    if (!params.variable_C) keep_constant(params.C, 1, channel, exists);
  }

  /// Starts copying a piece of a work item, which convert() puts where it is read.
  __device__ void copy(const WorkItem& item, int64_t first_step) const {
    const int64_t left = item.end - first_step;
    const int steps = static_cast<int>(left < piece_steps_ ? left : piece_steps_);
    if (params_.variable_B) {
      copy_projection<T>(B_window(item), first_step, steps, piece_steps_, padded_states_,
                         shared_memory() + layout_.raw_B);
    }
    if (params_.variable_C) {
      copy_projection<T>(C_window(item), first_step, steps, piece_steps_, padded_states_,
                         shared_memory() + layout_.raw_C);
    }
  }

  /// Converts the piece this thread has copied, into buffer 0 or 1.
  __device__ void convert(const WorkItem& item, int buffer) const {
    T* rows = reinterpret_cast<T*>(shared_memory()) + buffer * layout_.projection_buffer;
    if (params_.variable_B) {
      convert_projection(B_window(item), piece_steps_, padded_states_,
                         shared_memory() + layout_.raw_B, layout_.projection_row, rows);
    }
    if (params_.variable_C) {
      convert_projection(C_window(item), piece_steps_, padded_states_,
                         shared_memory() + layout_.raw_C, layout_.projection_row,
                         rows + padded_states_);
    }
  }

  __device__ ProjectionRows B(int buffer) const { return rows(params_.variable_B, 0, buffer); }
  __device__ ProjectionRows C(int buffer) const { return rows(params_.variable_C, 1, buffer); }

 private:
  __device__ __forceinline__ ProjectionWindow B_window(const WorkItem& item) const {
    return {params_.B, plans_.B, item, params_.dstate};
  }
  __device__ __forceinline__ ProjectionWindow C_window(const WorkItem& item) const {
    return {params_.C, plans_.C, item, params_.dstate};
  }

  /// Byte offset of this thread's constant B (kind 0) or C (kind 1).
  __device__ int slot(int kind) const {
    constexpr int kBytes = kStates * static_cast<int>(sizeof(T));
    return layout_.constants + (2 * static_cast<int>(threadIdx.x) + kind) * kBytes;
  }
  __device__ void keep_constant(const ArrayView& view, int kind, int64_t channel,
                                bool exists) const {
    Pack<T, kStates> states{};
    if (exists) {
      states = load_states<T, kStates>(view, channel * view.channel, first_state_, params_.dstate);
    }
    store_pack(reinterpret_cast<T*>(shared_memory() + slot(kind)), states);
  }
  __device__ ProjectionRows rows(bool variable, int kind, int buffer) const {
    if (!variable) return {slot(kind), 0};
    constexpr int kBytes = static_cast<int>(sizeof(T));
    return {(buffer * layout_.projection_buffer + kind * padded_states_ + first_state_) * kBytes,
            layout_.projection_row * kBytes};
  }

  const ScanParams& params_;
  const SharedLayout& layout_;
  int piece_steps_;
  int padded_states_;
  int first_state_;
  const InputPlans& plans_;
};

/// D and delta_bias of a warp's channels, in shared memory; zero where absent.
template <class R>
__device__ void stage_channels(const ScanParams& params, const WorkItem& item, const WarpTile& tile,
                               R* D, R* delta_bias) {
  for (int c = tile.lane; c < (1 << tile.channel_bits); c += kWarpSize) {
    const int64_t channel = item.first_channel + tile.first_channel + c;
    const bool exists = c < tile.channels;
    D[c] = exists ? load_component<R>(params.D, channel * params.D.channel) : R(0);
    delta_bias[c] =
        exists ? load_component<R>(params.delta_bias, channel * params.delta_bias.channel) : R(0);
  }
}

/// Converts what has been copied of u and delta: u, and Δ = softplus(delta + delta_bias).
template <class R>
__device__ __forceinline__ void convert_inputs(const RowWindow& u, const RowWindow& delta,
                                               const WarpTile& tile, const char* raw_u,
                                               const char* raw_delta, const R* delta_bias,
                                               bool delta_softplus, R* u_rows, R* delta_rows) {
  convert_rows<R>(u, tile, raw_u, u_rows, [](auto&, const auto&) {});
  convert_rows<R>(delta, tile, raw_delta, delta_rows, [&](auto& values, const auto& group_at) {
    constexpr int kCount = sizeof(values.v) / sizeof(R);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const R bias = delta_bias[group_at(j / kBlockSteps).channel];
      values.v[j] += bias;
    }
    make_steps(values.v, delta_softplus);
    if (tile.steps == kChunk) return;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      // A step that does not exist leaves the state as it is.
      if (group_at(j / kBlockSteps).step + j % kBlockSteps >= tile.steps) values.v[j] = 0;
    }
  });
}

/// Waits for the warps that share channels.
__device__ inline void sync_channel_warps(const Geometry& geometry) {
  if (geometry.state_warps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

/// The tile of a warp's channels in the chunk that begins with `first_step`.
__device__ __forceinline__ WarpTile warp_tile(const Geometry& geometry, const WorkItem& item,
                                              const ThreadRole& role, int64_t first_step) {
  WarpTile tile;
  tile.first_channel = role.channel_warp * geometry.warp_channels();
  const int left = item.channels - tile.first_channel;
  tile.channels = left < geometry.warp_channels() ? left : geometry.warp_channels();
  tile.first_step = first_step;
  const int64_t steps = item.end - first_step;
  tile.steps = static_cast<int>(steps < kChunk ? steps : kChunk);
  tile.lane = role.lane;
  tile.channel_bits = geometry.channel_bits();
  return tile;
}

}  // namespace selective_scan::cuda::general
