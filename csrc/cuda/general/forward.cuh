// The forward scan.
//
// Mapping: geometry.h. A block walks its tile of channels through time in chunks of kChunk steps;
// each lane keeps its kStates states and poles in registers and runs through the chunk
// sequentially, so that an update is a multiplication and an ex2 for abar, a multiplication for the
// input, and one FMA each for the state and for y.
//
// Shared memory: shared_layout.h. While a chunk is scanned the next one is on its way. Lanes scan
// four steps at a time and leave their part of y in rows of their own ("planes"), which the output
// phase adds up. Nothing goes from one channel to another, so what is not finite stays in
// its (batch, channel). One barrier a piece suffices: B and C are converted into two buffers in
// turn, everything else belongs to a warp.
//
// Bound by: issue slots and the special-function unit (one ex2 per update); in fp64 by the FP64
// unit.
#pragma once

#include "../kit/launch_tools.h"
#include "kernels.h"
#include "scan.cuh"

namespace selective_scan::cuda::general {

/// Runs one lane's states through `steps` steps; the lane's part of y goes to y_row.
template <Method kMethod, class T, int kStates>
__device__ __forceinline__ void scan_piece(const real_t<T>* delta_row, const real_t<T>* u_row,
                                           ProjectionRows B_rows, ProjectionRows C_rows, int steps,
                                           const Pole<T> (&poles)[kStates], Pack<T, kStates>& h,
                                           real_t<T>* y_row) {
  using R = real_t<T>;
  for (int t = 0; t < steps; t += kBlockSteps) {
    const auto delta = load_pack<R, kBlockSteps>(delta_row + t);
    const auto u = load_pack<R, kBlockSteps>(u_row + t);
    Pack<R, kBlockSteps> y;
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      const auto B = B_rows.load<T, kStates>(j);
      const auto C = C_rows.load<T, kStates>(j);
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
    B_rows.advance(kBlockSteps);
    C_rows.advance(kBlockSteps);
  }
}

/// Scans without y, for the summary of a segment: `factor` collects the product of abar.
template <Method kMethod, class T, int kStates>
__device__ __forceinline__ void summarize_piece(const real_t<T>* delta_row, const real_t<T>* u_row,
                                                ProjectionRows B_rows, int steps,
                                                const Pole<T> (&poles)[kStates],
                                                Pack<T, kStates>& h, Pack<T, kStates>& factor) {
  using R = real_t<T>;
  for (int t = 0; t < steps; t += kBlockSteps) {
    const auto delta = load_pack<R, kBlockSteps>(delta_row + t);
    const auto u = load_pack<R, kBlockSteps>(u_row + t);
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      const auto B = B_rows.load<T, kStates>(j);
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const auto value = coefficients<kMethod>(delta.v[j], poles[s]);
        h.v[s] = value.abar * h.v[s] + held_input<kMethod>(delta.v[j], u.v[j], value) * B.v[s];
        factor.v[s] = value.abar * factor.v[s];
      }
    }
    B_rows.advance(kBlockSteps);
  }
}

/// out = (y + D·u)·gate for one warp's channels.
template <class R>
__device__ __forceinline__ void write_output(const RowWindow& out, const WarpTile& tile,
                                             const Geometry& geometry, const SharedLayout& layout,
                                             int scale, bool has_gate, const char* warp_shared,
                                             const R* D, const R* u_rows, const R* gate_rows) {
  using Values = Pack<R, kBlockSteps>;
  const int parts = geometry.lanes();
  store_rows<R>(out, tile, [&](const StepQuad& group) {
    Values y{};
#pragma unroll 1
    for (int w = 0; w < geometry.state_warps; ++w) {
      const R* planes =
          reinterpret_cast<const R*>(warp_shared + w * layout.warp_bytes + layout.planes) +
          group.channel * parts * kRowStride + group.step;
#pragma unroll 4
      for (int p = 0; p < parts; ++p) {
        const auto part = load_pack<R, kBlockSteps>(planes + p * kRowStride);
#pragma unroll
        for (int j = 0; j < kBlockSteps; ++j) y.v[j] += part.v[j];
      }
    }
    const R skip = D[group.channel];
    const auto u = load_pack<R, kBlockSteps>(u_rows + group.at());
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) y.v[j] = R(scale) * y.v[j] + skip * u.v[j];
    if (has_gate) {
      const auto gate = load_pack<R, kBlockSteps>(gate_rows + group.at());
#pragma unroll
      for (int j = 0; j < kBlockSteps; ++j) y.v[j] *= gate.v[j];
    }
    return y;
  });
}

template <class T, int kStates, Method kMethod>
__global__ void __launch_bounds__(kMaxThreads, 1)
    scan_forward_kernel(const __grid_constant__ ForwardArgs args) {
  using R = real_t<T>;
  using States = Pack<T, kStates>;
  char* const shared = shared_memory();
  const ForwardParams& params = args.params;
  const Geometry geometry = args.geometry;
  SharedLayout layout = args.layout;
  layout.row_set = geometry.warp_channels() * kRowStride;
  const bool summarize = args.mode == Mode::kSummarize;
  const bool has_output = params.wanted == ForwardWanted::kOutput && !summarize;
  const bool has_gate = params.z.present() && has_output;
  const bool is_packed = params.packed.present();
  const int padded_states = geometry.padded_states(kStates);
  const ThreadRole role = thread_role<kStates>(geometry);

  char* warp_shared = shared + layout.warps + role.warp * layout.warp_bytes;
  R* delta_rows = reinterpret_cast<R*>(warp_shared);
  R* u_rows = delta_rows + layout.row_set;
  R* gate_rows = u_rows + layout.row_set;
  R* D = reinterpret_cast<R*>(warp_shared + layout.channels);
  R* delta_bias = D + geometry.warp_channels();
  char* raw_u = warp_shared + layout.raw_u;
  char* raw_delta = warp_shared + layout.raw_delta;
  char* raw_z = warp_shared + layout.raw_z;
  const int row = role.in_warp.channel * kRowStride;
  R* y_row = reinterpret_cast<R*>(warp_shared + layout.planes) +
             (role.in_warp.channel * geometry.lanes() + role.in_warp.part) * kRowStride;

  const auto scan_part = [&](const WorkItem& whole, const Part& part, int64_t channel, bool exists,
                             int64_t segment_row) {
    const WorkItem item = part.steps_of(whole);
    const Projections<T, kStates> projections(params, args.plans, geometry, layout, role, channel,
                                              exists);
    WarpTile tile = warp_tile(geometry, item, role, item.begin);
    const RowWindow u(params.u, args.plans.u, item, tile.first_channel);
    const RowWindow delta(params.delta, args.plans.delta, item, tile.first_channel);
    const RowWindow z(params.z, args.plans.z, item, tile.first_channel);
    const RowWindow out(params.out, args.out, item, tile.first_channel);
    stage_channels(params, item, tile, D, delta_bias);
    Pole<T> poles[kStates];
    load_poles<T>(params, channel, exists, role.first_state, poles);
    States h{};
    States factor;
#pragma unroll
    for (int s = 0; s < kStates; ++s) factor.v[s] = one<T>();
    if (is_packed ? part.is_first() : args.mode == Mode::kWhole) {
      h = load_channel_states<T, kStates>(params.initial_state, part.states_of(item), channel,
                                          exists, role.first_state, params.dstate);
    } else if (args.mode == Mode::kResume && exists) {
      h = load_pack<T, kStates>(static_cast<const T*>(args.segments.offsets) + segment_row);
    }

    // Each turn starts copying piece `next`, scans the piece before it, and converts `next`.
    int buffer = 0;
    for (int64_t next = item.begin;; next += geometry.piece_steps) {
      const bool more = next < item.end;
      const bool new_chunk = more && (next - item.begin) % kChunk == 0;
      if (more) projections.copy(item, next);
      if (new_chunk) {
        WarpTile next_tile = warp_tile(geometry, item, role, next);
        next_tile.lane = opaque(role.lane);
        copy_rows(u, next_tile, raw_u);
        copy_rows(delta, next_tile, raw_delta);
        if (has_gate) copy_rows(z, next_tile, raw_z);
      }
      __pipeline_commit();

      if (next > item.begin) {
        const int in_chunk = static_cast<int>(next - geometry.piece_steps - tile.first_step);
        const int left = tile.steps - in_chunk;
        const int steps = left < geometry.piece_steps ? left : geometry.piece_steps;
        const int at = row + in_chunk;
        if (summarize) {
          summarize_piece<kMethod>(delta_rows + at, u_rows + at, projections.B(buffer), steps,
                                   poles, h, factor);
        } else {
          scan_piece<kMethod>(delta_rows + at, u_rows + at, projections.B(buffer),
                              projections.C(buffer), steps, poles, h, y_row + in_chunk);
        }
        buffer ^= 1;
      }
      if (next > item.begin && !summarize && (new_chunk || !more)) {  // the chunk is complete
        if (params.states != nullptr && exists && part.is_saved(tile.first_step)) {
          const int64_t saved = part.saved_behind(tile.first_step) * params.dim + channel;
          store_states(static_cast<T*>(params.states) + saved * params.dstate, role.first_state,
                       params.dstate, h);
        }
        if (has_output) {
          sync_channel_warps(geometry);
          if (role.state_warp == 0) {
            write_output(out, tile, geometry, layout, kOutputScale<T>, has_gate, warp_shared, D,
                         u_rows, gate_rows);
          }
        }
      }
      if (!more) break;

      __pipeline_wait_prior(0);
      __syncwarp();
      projections.convert(item, buffer);
      if (new_chunk) {
        tile = warp_tile(geometry, item, role, next);
        tile.lane = opaque(role.lane);
        convert_inputs(u, delta, tile, raw_u, raw_delta, delta_bias, params.delta_softplus, u_rows,
                       delta_rows);
        if (has_gate) {
          convert_rows<R>(z, tile, raw_z, gate_rows, [](auto& values, const auto&) {
            for (R& value : values.v) value *= device_sigmoid(value);
          });
        }
      }
      __syncthreads();
    }

    if (summarize) {
      if (exists && is_packed && part.is_first()) factor = no_factor<T, kStates>();
      if (exists) store_segment(args.segments, segment_row, factor, h);
    } else if (exists && params.last_state.present() && part.is_last()) {
      store_channel_states(params.last_state, part.states_of(item), channel, role.first_state,
                           params.dstate, h);
    }
    __syncthreads();  // before the next work item writes to shared memory
  };

  for (int64_t index = blockIdx.x; index < geometry.work_items; index += gridDim.x) {
    const WorkItem item = any_work_item(params, geometry, index);
    const Parts parts(params, item);
    const int64_t channel = item.first_channel + role.channel_in_tile;
    const bool exists = role.channel_in_tile < item.channels;
    const int64_t segment_row =
        ((item.segment * params.batch + item.batch) * params.dim + channel) * padded_states +
        role.first_state;
    int64_t part = parts.first();
    if (summarize && is_packed) {
      part = parts.last_one();
      // Nothing goes on behind the segment, for which what is not finite in it must be nothing,
      // too.
      if (part < 0 || parts[part].is_last()) {
        if (exists) store_segment(args.segments, segment_row, no_factor<T, kStates>(), States{});
        continue;
      }
    }
    for (; part < parts.behind(); ++part) {
      const Part steps = parts[part];
      if (!is_packed || steps.exists()) scan_part(item, steps, channel, exists, segment_row);
    }
  }
}

template <class T, int kStates, Method kMethod>
cudaError_t Scan<T, kStates, kMethod>::forward(const ForwardArgs& args, const LaunchShape& shape,
                                               cudaStream_t stream) {
  return launch_kernel(scan_forward_kernel<T, kStates, kMethod>, shape, stream, args);
}

}  // namespace selective_scan::cuda::general
