// Device functions that the forward and the backward scan share.
#pragma once

#include "shared_layout.h"
#include "staging.cuh"

namespace selective_scan::cuda {

/// bbar·u. A bbar that is Δ itself is real also where the states are complex.
template <Method kMethod, class T>
__device__ __forceinline__ auto held_input(real_t<T> delta, real_t<T> u,
                                           const Coefficients<T>& value) {
  if constexpr (Formula<kMethod>::kBbarDependsOnA) {
    return u * value.bbar;
  } else {
    return delta * u;
  }
}

template <Method kMethod, class T>
__device__ __forceinline__ Coefficients<T> coefficients(real_t<T> delta, const Pole<T>& pole) {
  return Formula<kMethod>::template value<DeviceMath>(delta, pole);
}

/// Re(a·b)
template <class R>
__device__ __forceinline__ R real_of_product(Complex<R> a, Complex<R> b) {
  return a.re * b.re - a.im * b.im;
}
template <class R>
__device__ __forceinline__ R real_of_product(R a, R b) {
  return a * b;
}

/// Complex states stand for themselves and their conjugates, so y = 2·Re Σ C·h.
template <class T>
constexpr int kOutputScale = is_complex_v<T> ? 2 : 1;

template <class T, int kStates>
__device__ void load_poles(const ScanParams& params, int64_t channel, bool exists, int first_state,
                           Pole<T> (&poles)[kStates]) {
  Pack<T, kStates> A{};
  if (exists) {
    A = load_states<T, kStates>(params.A, channel * params.A.channel, first_state, params.dstate);
  }
#pragma unroll
  for (int s = 0; s < kStates; ++s) poles[s] = make_pole<DeviceMath>(A.v[s]);
}

/// Where a lane reads B (kind 0) or C (kind 1); a constant one is put into the thread's slot first.
template <class T, int kStates>
__device__ ProjectionRows<T> projection_rows(const ScanParams& params, const SharedLayout& layout,
                                             char* shared, const ThreadRole& role, int kind,
                                             int64_t channel, bool exists, int padded_states) {
  const ArrayView& view = kind == 0 ? params.B : params.C;
  if (kind == 0 ? params.variable_B : params.variable_C) {
    return {reinterpret_cast<T*>(shared) + kind * padded_states + role.first_state,
            layout.projection_row};
  }
  T* slot = reinterpret_cast<T*>(shared + layout.constants) + (2 * threadIdx.x + kind) * kStates;
  Pack<T, kStates> states{};
  if (exists) {
    states =
        load_states<T, kStates>(view, channel * view.channel, role.first_state, params.dstate);
  }
  store_pack(slot, states);
  return {slot, 0};
}

/// Fills the block's [step][B | C] rows from whichever of B and C has steps.
template <class T>
__device__ void stage_projections(const ScanParams& params, const WorkItem& item,
                                  const SharedLayout& layout, char* shared, int64_t first_step,
                                  int steps, int padded_states) {
  T* rows = reinterpret_cast<T*>(shared);
  if (params.variable_B) {
    stage_projection(params.B, item, first_step, steps, params.dstate, padded_states,
                     layout.projection_row, rows);
  }
  if (params.variable_C) {
    stage_projection(params.C, item, first_step, steps, params.dstate, padded_states,
                     layout.projection_row, rows + padded_states);
  }
}

/// Δ = softplus(delta + delta_bias) and u of one warp's channels and one chunk.
template <class R>
__device__ void stage_inputs(const ScanParams& params, const WorkItem& item, const WarpTile& tile,
                             R* delta_rows, R* u_rows) {
  load_rows<R>(Window(params.u, item), tile, [&](WarpTile::Element e, R value) {
    u_rows[e.channel * kRowStride + e.step] = value;
  });
  const int64_t first_channel = item.first_channel + tile.first_channel;
  load_rows<R>(Window(params.delta, item), tile, [&](WarpTile::Element e, R value) {
    if (params.delta_bias.present() && e.channel < tile.channels) {
      value += load_component<R>(params.delta_bias,
                                 (first_channel + e.channel) * params.delta_bias.channel);
    }
    if (params.delta_softplus) value = softplus<DeviceMath>(value);
    // A step that does not exist leaves the state as it is.
    delta_rows[e.channel * kRowStride + e.step] = tile.exists(e) ? value : R(0);
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

/// The tile of a warp's channels in a chunk.
__device__ inline WarpTile warp_tile(const ScanParams& params, const Geometry& geometry,
                                     const WorkItem& item, const ThreadRole& role,
                                     int64_t first_step) {
  WarpTile tile;
  tile.first_channel = role.channel_warp * geometry.warp_channels();
  const int left = item.channels - tile.first_channel;
  tile.channels = left < geometry.warp_channels() ? left : geometry.warp_channels();
  tile.first_step = first_step;
  const int64_t steps = item.steps - first_step;
  tile.steps = static_cast<int>(steps < kChunk ? steps : kChunk);
  tile.lane = role.lane;
  tile.channel_bits = 0;
  while ((1 << tile.channel_bits) < geometry.warp_channels()) ++tile.channel_bits;
  const auto is_unit = [](int64_t stride) { return stride == 1 || stride == -1; };
  tile.channel_major = is_unit(params.u.channel) && !is_unit(params.u.step);
  return tile;
}

/// Dynamic shared memory above 48 KiB has to be asked for.
template <class Kernel>
cudaError_t allow_shared_bytes(Kernel* kernel, size_t bytes) {
  if (bytes <= 48 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

inline unsigned grid_blocks(int64_t work_items) {
  constexpr int64_t kMaxBlocks = 0x7fffffff;
  return static_cast<unsigned>(work_items < kMaxBlocks ? work_items : kMaxBlocks);
}

}  // namespace selective_scan::cuda
