// The forward scan.
//
// Mapping: geometry.cuh. A block walks its tile of channels through time in chunks of kChunk steps;
// each lane keeps its kStates states and poles in registers and runs through the chunk
// sequentially, so that an update is a multiplication and an ex2 for abar, a multiplication for the
// input, and one FMA each for the state and for y.
//
// Shared memory: shared_layout.h. Per chunk: the block stages B and C, every warp its Δ, u and gate;
// lanes then scan, four steps at a time, and leave their part of y in rows of their own ("planes"),
// which the output phase adds up. Nothing is exchanged between lanes inside the scan, so what is
// not finite stays in its (batch, channel).
//
// Bound by: issue slots and the special-function unit (one ex2 per update); for dstate 1 by memory.
#pragma once

#include "scan.h"
#include "scan_common.cuh"

namespace selective_scan::cuda {

struct ForwardArgs {
  ForwardParams params;
  Geometry geometry;
  SharedLayout layout;
};

/// Runs one lane's states through `steps` steps; the lane's part of y goes to y_row.
template <Method kMethod, class T, int kStates>
__device__ void scan_chunk(const real_t<T>* delta_row, const real_t<T>* u_row,
                           const ProjectionRows<T>& B_rows, const ProjectionRows<T>& C_rows,
                           int steps, const Pole<T> (&poles)[kStates], Pack<T, kStates>& h,
                           real_t<T>* y_row) {
  using R = real_t<T>;
  const T* B_row = B_rows.first;
  const T* C_row = C_rows.first;
  for (int t = 0; t < steps; t += kBlockSteps) {
    const auto delta = load_pack<R, kBlockSteps>(delta_row + t);
    const auto u = load_pack<R, kBlockSteps>(u_row + t);
    Pack<R, kBlockSteps> y;
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      const auto B = load_pack<T, kStates>(B_row);
      const auto C = load_pack<T, kStates>(C_row);
      B_row += B_rows.stride;
      C_row += C_rows.stride;
      R sum = 0;
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const auto value = coefficients<kMethod>(delta.v[j], poles[s]);
        h.v[s] = value.abar * h.v[s] + held_input<kMethod>(delta.v[j], u.v[j], value) * B.v[s];
        sum += real_of_product(C.v[s], h.v[s]);
      }
      y.v[j] = sum;
    }
    store_pack(y_row + t, y);
  }
}

/// out = (y + D·u)·gate for one warp's channels. Warps that share channels share the elements.
template <class R>
__device__ void write_output(const ForwardParams& params, const Geometry& geometry,
                             const SharedLayout& layout, const WorkItem& item, WarpTile tile,
                             const ThreadRole& role, int scale, const char* first_warp,
                             const R* u_rows, const R* gate_rows) {
  const int parts = geometry.lanes();
  const int64_t first_channel = item.first_channel + tile.first_channel;
  store_rows<R>(Window(params.out, item), tile, [&](WarpTile::Element e) {
    R y = 0;
    for (int w = 0; w < geometry.state_warps; ++w) {
      const R* planes = reinterpret_cast<const R*>(first_warp + w * layout.warp_bytes +
                                                   layout.planes);
      for (int p = 0; p < parts; ++p) y += planes[(e.channel * parts + p) * kRowStride + e.step];
    }
    y *= scale;
    const int at = e.channel * kRowStride + e.step;
    if (params.D.present()) {
      y += load_component<R>(params.D, (first_channel + e.channel) * params.D.channel) * u_rows[at];
    }
    if (params.z.present()) y *= gate_rows[at];
    return y;
  });
}

template <class T, int kStates, Method kMethod>
__global__ void __launch_bounds__(kMaxThreads, 1)
    scan_forward_kernel(const __grid_constant__ ForwardArgs args) {
  using R = real_t<T>;
  extern __shared__ __align__(16) char shared[];
  const ForwardParams& params = args.params;
  const Geometry& geometry = args.geometry;
  const SharedLayout& layout = args.layout;
  const int padded_states = geometry.padded_states<kStates>();
  const ThreadRole role = thread_role<kStates>(geometry);

  char* warp_shared = shared + layout.warps + role.warp * layout.warp_bytes;
  R* delta_rows = reinterpret_cast<R*>(warp_shared);
  R* u_rows = delta_rows + layout.row_set;
  R* gate_rows = u_rows + layout.row_set;
  R* planes = reinterpret_cast<R*>(warp_shared + layout.planes);
  const int row = role.in_warp.channel * kRowStride;
  R* y_row =
      planes + (role.in_warp.channel * geometry.lanes() + role.in_warp.part) * kRowStride;
  const char* first_warp = warp_shared - role.state_warp * layout.warp_bytes;

  for (int64_t index = blockIdx.x; index < geometry.work_items; index += gridDim.x) {
    const WorkItem item = work_item(params, geometry, index);
    const int64_t channel = item.first_channel + role.channel_in_tile;
    const bool exists = role.channel_in_tile < item.channels;
    Pole<T> poles[kStates];
    load_poles<T>(params, channel, exists, role.first_state, poles);
    const auto B_rows = projection_rows<T, kStates>(params, layout, shared, role, 0, channel,
                                                    exists, padded_states);
    const auto C_rows = projection_rows<T, kStates>(params, layout, shared, role, 1, channel,
                                                    exists, padded_states);
    Pack<T, kStates> h{};
    if (exists) {
      const ArrayView& initial = params.initial_state;
      h = load_states<T, kStates>(initial,
                                  item.batch * initial.batch + channel * initial.channel,
                                  role.first_state, params.dstate);
    }

    for (int64_t first = 0; first < item.steps; first += kChunk) {
      const WarpTile tile = warp_tile(params, geometry, item, role, first);
      stage_projections<T>(params, item, layout, shared, first, tile.steps, padded_states);
      stage_inputs(params, item, tile, delta_rows, u_rows);
      if (params.z.present() && params.out.present()) {
        load_rows<R>(Window(params.z, item), tile, [&](WarpTile::Element e, R z) {
          gate_rows[e.channel * kRowStride + e.step] = silu<DeviceMath>(z);
        });
      }
      __syncthreads();
      scan_chunk<kMethod>(delta_rows + row, u_rows + row, B_rows, C_rows, tile.steps, poles, h,
                          y_row);
      if (params.states != nullptr && first + kChunk < item.steps && exists) {
        const int64_t saved = (item.batch * num_saved_states(params.seqlen) + first / kChunk) *
                                  params.dim + channel;
        store_states(static_cast<T*>(params.states) + saved * params.dstate, role.first_state,
                     params.dstate, h);
      }
      sync_channel_warps(geometry);
      if (params.out.present() && role.state_warp == 0) {
        write_output<R>(params, geometry, layout, item, tile, role, kOutputScale<T>, first_warp,
                        u_rows, gate_rows);
      }
      __syncthreads();
    }

    if (exists && params.last_state.present()) {
      const ArrayView& last = params.last_state;
      store_states(last, item.batch * last.batch + channel * last.channel, role.first_state,
                   params.dstate, h);
    }
  }
}

template <class T, int kStates, Method kMethod>
cudaError_t Scan<T, kStates, kMethod>::forward(const ForwardParams& params,
                                               const Geometry& geometry, cudaStream_t stream) {
  const auto kernel = scan_forward_kernel<T, kStates, kMethod>;
  const ForwardArgs args{
      params, geometry,
      forward_layout(params, geometry, kStates, sizeof(T), sizeof(real_t<T>))};
  const cudaError_t error = allow_shared_bytes(kernel, args.layout.bytes);
  if (error != cudaSuccess) return error;
  kernel<<<grid_blocks(geometry.work_items), geometry.threads(), args.layout.bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace selective_scan::cuda
