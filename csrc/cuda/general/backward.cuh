// The backward scan.
//
// Mapping: geometry.h. A block walks its tile of channels backwards through time, chunk by chunk.
// From the state saved before a chunk every lane sweeps forward, keeping the state before each
// block of kBlockSteps steps; then, last block first, it computes the block's states again in
// registers and sweeps backwards through them with the gradient g of the state:
//
//   g[t] = conj(abar[t+1])·g[t+1] + conj(C[t])·dy[t]            dC[t] = conj(h[t])·dy[t]
//   and from w = g·conj(B): du, dΔ, dA; from g: dB and, through h[t-1], dΔ and dA again.
//
// Shared memory: shared_layout.h. du, dΔ and y are summed over the lanes of a channel with shuffles
// and replace dy, Δ and u of their steps, which are not needed any more. dB and dC are sums over
// channels: each lane leaves its products of a block of steps in shared memory, the warp adds those
// of its channels, every few steps the block adds those of its warps and writes one partial sum per
// tile. add_gradients() adds the tiles, and for the gradients without steps the segments and
// batches. Every sum has a fixed order.
//
// Bound by: issue slots and the latency of what a lane does in sequence.
#pragma once

#include "../kit/launch_tools.h"
#include "kernels.h"
#include "sweeps.cuh"

namespace selective_scan::cuda::general {

/// Returns the same work item. The compiler does not know that, so it keeps nothing it made of it.
/// Registers suffice for the scan alone, so what is known of arrays is found anew wherever a chunk
/// is moved.
__device__ __forceinline__ WorkItem found_anew(WorkItem item) {
  for (int64_t* field : {&item.batch, &item.group, &item.first_channel}) {
    asm volatile("" : "+l"(*field));
  }
  return item;
}

/// The arrays of a work item as a warp reads them, chunk by chunk.
struct BackwardInputs {
  RowWindow u;
  RowWindow delta;
  RowWindow z;
  RowWindow dout;
  char* raw_u;
  char* raw_delta;
  char* raw_z;
  char* raw_dout;

  __device__ __forceinline__ BackwardInputs(const BackwardArgs& args, const WorkItem& item,
                                            int first_channel, char* shared)
      : u(args.params.u, args.plans.u, item, first_channel),
        delta(args.params.delta, args.plans.delta, item, first_channel),
        z(args.params.z, args.plans.z, item, first_channel),
        dout(args.params.dout, args.dout, item, first_channel),
        raw_u(shared + args.layout.raw_u),
        raw_delta(shared + args.layout.raw_delta),
        raw_z(shared + args.layout.raw_z),
        raw_dout(shared + args.layout.raw_dout) {}

  __device__ void copy(const BackwardParams& params, const WarpTile& tile) const {
    copy_rows(u, tile, raw_u);
    copy_rows(delta, tile, raw_delta);
    if (!params.dout.present()) return;
    if (params.z.present()) copy_rows(z, tile, raw_z);
    copy_rows(dout, tile, raw_dout);
  }

  /// Fills Δ, u, and from dout and z what multiplies: dy = dout·silu(z), dz = (y + D·u)·dz_factor.
  template <class T, int kStates>
  __device__ __forceinline__ void convert(const BackwardParams& params, const WarpTile& tile,
                                          const BackwardRows<T, kStates>& rows) const {
    using R = real_t<T>;
    convert_inputs(u, delta, tile, raw_u, raw_delta, rows.delta_bias, params.delta_softplus, rows.u,
                   rows.delta);
    if (!params.dout.present()) {
      for (int i = tile.lane; i < kRowStride << tile.channel_bits; i += kWarpSize) {
        rows.dy[i] = 0;
        rows.dz_factor[i] = 0;
      }
      return;
    }
    convert_rows<R>(dout, tile, raw_dout, rows.dy, [](auto&, const auto&) {});
    if (!params.z.present()) return;
    __syncwarp();
    convert_rows<R>(z, tile, raw_z, rows.dz_factor, [&](auto& values, const auto& group_at) {
      constexpr int kGroups = sizeof(values.v) / sizeof(R) / kBlockSteps;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        R* const dy_row = rows.dy + group_at(i).at();
        auto dy = load_pack<R, kBlockSteps>(dy_row);
#pragma unroll
        for (int j = 0; j < kBlockSteps; ++j) {
          R& value = values.v[i * kBlockSteps + j];
          const R z_value = value;
          const R s = device_sigmoid(z_value);
          value = dy.v[j] * silu_derivative(z_value, s);
          dy.v[j] *= z_value * s;
        }
        store_pack(dy_row, dy);
      }
    });
  }
};

/// Whether the block has written the tile's partial sum before: tiles of several rounds share one,
/// to which their block adds them one after another.
__device__ __forceinline__ bool adds_to_partial_sum(const WorkItem& item) {
  return item.tile != item.sum_index;
}

/// The tile's partial sum of dB and dC at a step: [step][dB | dC][padded state].
template <class T, int kStates>
__device__ __forceinline__ T* partial_sum(const BackwardArgs& args, const Geometry& geometry,
                                          const WorkItem& item, int64_t step) {
  const int64_t row =
      ((item.sum_index * args.params.batch + item.batch) * args.params.groups + item.group) *
          args.params.seqlen +
      step;
  return static_cast<T*>(args.workspace.dBC_partials) + row * 2 * geometry.padded_states(kStates);
}

/// Brings some steps of a partial sum that will be added to to the L2 cache.
template <class T, int kStates>
__device__ __forceinline__ void prefetch_partial_sum(const BackwardArgs& args,
                                                     const Geometry& geometry, const WorkItem& item,
                                                     int64_t first_step, int64_t steps) {
  constexpr int kLine = 128;
  const char* const from =
      reinterpret_cast<const char*>(partial_sum<T, kStates>(args, geometry, item, first_step));
  const int64_t bytes = steps * 2 * geometry.padded_states(kStates) * sizeof(T);
  for (int64_t at = threadIdx.x * kLine; at < bytes; at += blockDim.x * kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
  }
}

/// Adds sums[step][dB | dC][state of the warp] over the block's warps, in their order, and writes
/// the steps from `first_step` on of the tile's partial sum.
template <class T, int kStates>
__device__ __forceinline__ void write_sums(const BackwardArgs& args, const Geometry& geometry,
                                           const WorkItem& item, const char* shared,
                                           int64_t first_step, int steps) {
  const int parts = geometry.lanes();
  const bool adds = adds_to_partial_sum(item);
  T* const target = partial_sum<T, kStates>(args, geometry, item, first_step);
  const int all_parts = geometry.state_warps * parts;
  for (int i = threadIdx.x; i < steps * 2 * all_parts; i += blockDim.x) {
    const int part = i % all_parts;
    const int step_and_kind = i / all_parts;
    const int offset = (step_and_kind * parts + part % parts) * kStates;
    T* const at = target + static_cast<int64_t>(i) * kStates;
    Pack<T, kStates> sum{};
    if (adds) sum = load_pack<T, kStates>(at);
    for (int w = 0; w < geometry.channel_warps; ++w) {
      const int warp = w * geometry.state_warps + part / parts;
      const T* sums = reinterpret_cast<const T*>(shared + args.layout.warps +
                                                 warp * args.layout.warp_bytes + args.layout.sums);
      const auto other = load_pack<T, kStates>(sums + offset);
#pragma unroll
      for (int s = 0; s < kStates; ++s) sum.v[s] += other.v[s];
    }
    store_pack(at, sum);
  }
}

/// Stores du, ddelta and dz of one warp's channels, adding what the warps that share them have.
template <class T, int kStates>
__device__ __forceinline__ void write_rows(const BackwardArgs& args, const Geometry& geometry,
                                           const WorkItem& item, const WarpTile& tile,
                                           const BackwardRows<T, kStates>& rows) {
  using R = real_t<T>;
  using Values = Pack<R, kBlockSteps>;
  const BackwardParams& params = args.params;
  const int next_warp = args.layout.warp_bytes / static_cast<int>(sizeof(R));
  const auto sum_of = [&](const R* array, const StepQuad& group) {
    auto sum = load_pack<R, kBlockSteps>(array + group.at());
#pragma unroll 1
    for (int w = 1; w < geometry.state_warps; ++w) {
      const auto other = load_pack<R, kBlockSteps>(array + group.at() + w * next_warp);
#pragma unroll
      for (int j = 0; j < kBlockSteps; ++j) sum.v[j] += other.v[j];
    }
    return sum;
  };
  store_rows<R>(RowWindow(params.du, args.du, item, tile.first_channel), tile,
                [&](const StepQuad& group) { return sum_of(rows.dy, group); });
  store_rows<R>(RowWindow(params.ddelta, args.ddelta, item, tile.first_channel), tile,
                [&](const StepQuad& group) { return sum_of(rows.delta, group); });
  if (!params.z.present()) return;
  store_rows<R>(RowWindow(params.dz, args.dz, item, tile.first_channel), tile,
                [&](const StepQuad& group) {
                  Values y = sum_of(rows.u, group);
                  const auto factor = load_pack<R, kBlockSteps>(rows.dz_factor + group.at());
#pragma unroll
                  for (int j = 0; j < kBlockSteps; ++j) y.v[j] *= factor.v[j];
                  return y;
                });
}

/// Writes what a lane has summed up over the steps of one (batch, channel).
template <class T, int kStates>
__device__ void write_lane_gradients(const BackwardArgs& args, const WorkItem& item,
                                     const ThreadRole& role, int64_t channel, bool exists,
                                     LaneGradients<T, kStates> gradients) {
  using R = real_t<T>;
  const BackwardParams& params = args.params;
  const BackwardWorkspace& workspace = args.workspace;
  for (int bit = 0; bit < args.geometry.lane_bits; ++bit) {
    const int mask = part_bit_mask(bit, args.geometry.lane_bits);
    gradients.dD += __shfl_xor_sync(kFullMask, gradients.dD, mask);
    gradients.ddelta_bias += __shfl_xor_sync(kFullMask, gradients.ddelta_bias, mask);
  }
  if (!exists) return;
  const int64_t row = (item.segment * params.batch + item.batch) * params.dim + channel;
  const int64_t at = row * args.geometry.padded_states(kStates) + role.first_state;
  const auto store = [&](void* array, const Pack<T, kStates>& states) {
    if (array != nullptr) store_pack(static_cast<T*>(array) + at, states);
  };
  store(workspace.dA, gradients.dA);
  store(workspace.dB, gradients.dB);
  store(workspace.dC, gradients.dC);
  if (role.in_warp.part == 0) {
    const int64_t of_warp = row * args.geometry.state_warps + role.state_warp;
    if (workspace.dD != nullptr) static_cast<R*>(workspace.dD)[of_warp] = gradients.dD;
    if (workspace.ddelta_bias != nullptr) {
      static_cast<R*>(workspace.ddelta_bias)[of_warp] = gradients.ddelta_bias;
    }
  }
}

template <class T, int kStates, Method kMethod>
__global__ void __launch_bounds__(kMaxThreads, 1)
    scan_backward_kernel(const __grid_constant__ BackwardArgs args) {
  using States = Pack<T, kStates>;
  char* const shared = shared_memory();
  const BackwardParams& params = args.params;
  const Geometry geometry = args.geometry;
  SharedLayout layout = args.layout;
  layout.row_set = geometry.warp_channels() * kRowStride;
  const int sum_steps = steps_between_sums(geometry);
  const bool summarize = args.mode == Mode::kSummarize;
  const bool is_packed = params.packed.present();
  const int padded_states = geometry.padded_states(kStates);
  const int pieces = kChunk / geometry.piece_steps;
  const int piece_blocks = geometry.piece_steps / kBlockSteps;  // a power of two
  const int piece_block_bits = __ffs(piece_blocks) - 1;
  const ThreadRole role = thread_role<kStates>(geometry);
  char* const warp_shared = shared + layout.warps + role.warp * layout.warp_bytes;
  const BackwardRows<T, kStates> rows(warp_shared, layout, geometry, role);
  const bool any_variable = params.variable_B || params.variable_C;

  const auto scan_part = [&](const WorkItem& whole, const Part& part, int64_t channel, bool exists,
                             int64_t segment_row, LaneGradients<T, kStates>& gradients) {
    const WorkItem item = part.steps_of(whole);
    const Projections<T, kStates> projections(params, args.plans, geometry, layout, role, channel,
                                              exists);
    const int64_t last_chunk = (item.end - item.begin - 1) / kChunk * kChunk + item.begin;
    WarpTile tile = warp_tile(geometry, item, role, last_chunk);
    const auto inputs = [&] {
      return BackwardInputs(args, found_anew(item), tile.first_channel, warp_shared);
    };
    stage_channels(params, item, tile, rows.D, rows.delta_bias);
    Pole<T> poles[kStates];
    load_poles<T>(params, channel, exists, role.first_state, poles);

    States carry{};
    States factor;
#pragma unroll
    for (int s = 0; s < kStates; ++s) factor.v[s] = one<T>();
    if (is_packed ? part.is_last() : args.mode == Mode::kWhole) {
      carry = load_channel_states<T, kStates>(params.dlast_state, part.states_of(item), channel,
                                              exists, role.first_state, params.dstate);
    } else if (args.mode == Mode::kResume && exists) {
      carry = load_pack<T, kStates>(static_cast<const T*>(args.workspace.segments.offsets) +
                                    segment_row);
    }

    const auto stage_piece = [&](int64_t first) {
      projections.copy(found_anew(item), first);
      __pipeline_commit();
      __pipeline_wait_prior(0);
      projections.convert(found_anew(item), 0);
      __syncthreads();
    };
    const auto work_on_chunk = [&](int64_t first) {
      const int blocks = ceil_div(tile.steps, kBlockSteps);
      const int used_pieces = (blocks + piece_blocks - 1) >> piece_block_bits;
      if (summarize) {
        for (int piece = used_pieces - 1; piece >= 0; --piece) {
          if (pieces > 1) stage_piece(first + piece * geometry.piece_steps);
          const int left = blocks - piece * piece_blocks;
          summarize_backward<kMethod>(rows, projections.C(0), piece * piece_blocks,
                                      left < piece_blocks ? left : piece_blocks, poles, carry,
                                      factor);
          __syncthreads();
        }
        return;
      }

      States start{};
      if (first == part.begin) {
        start = load_channel_states<T, kStates>(params.initial_state, part.states_of(item), channel,
                                                exists, role.first_state, params.dstate);
      } else if (exists) {
        const int64_t saved = part.saved_behind(first - kChunk) * params.dim + channel;
        start =
            load_states<T, kStates>(static_cast<const T*>(params.states) + saved * params.dstate,
                                    role.first_state, params.dstate);
      }
      States h = start;
      for (int piece = 0; piece < used_pieces; ++piece) {
        if (pieces > 1) stage_piece(first + piece * geometry.piece_steps);
        // The states behind the last block are not needed.
        const int left = blocks - piece * piece_blocks;
        sweep_forward<kMethod>(rows, projections.B(0), piece * piece_blocks,
                               left < piece_blocks ? left : piece_blocks, poles, h);
        if (pieces > 1) __syncthreads();
      }
      for (int block = blocks - 1; block >= 0; --block) {
        const int piece = block >> piece_block_bits;
        if (pieces > 1 && (block == blocks - 1 || ((block + 1) & (piece_blocks - 1)) == 0)) {
          stage_piece(first + piece * geometry.piece_steps);
        }
        ProjectionRows B_rows = projections.B(0);
        ProjectionRows C_rows = projections.C(0);
        B_rows.advance((block - piece * piece_blocks) * kBlockSteps);
        C_rows.advance((block - piece * piece_blocks) * kBlockSteps);
        const States before =
            block == 0
                ? start
                : load_pack<T, kStates>(rows.checkpoints + (block - 1) * kWarpSize * kStates);
        sweep_block_backward<kMethod>(params, geometry, role, rows, B_rows, C_rows, block,
                                      tile.steps, before, poles, carry, gradients);
        if (!any_variable) continue;
        const int sum_step = block * kBlockSteps & (sum_steps - 1);
        sum_products(geometry, rows, role.lane,
                     rows.sums + sum_step * 2 * geometry.lanes() * kStates);
        __syncwarp();
        if (sum_step == 0) {
          __syncthreads();
          const int left = tile.steps - block * kBlockSteps;
          write_sums<T, kStates>(args, geometry, found_anew(item), shared,
                                 first + block * kBlockSteps, left < sum_steps ? left : sum_steps);
          __syncthreads();
        }
      }
      sync_channel_warps(geometry);
      if (role.state_warp == 0) write_rows(args, geometry, found_anew(item), tile, rows);
    };

    // Each turn starts copying chunk `next`, works on the chunk behind it, and converts `next`.
    for (int64_t next = last_chunk;; next -= kChunk) {
      const bool more = next >= item.begin && item.begin < item.end;
      if (more) {
        inputs().copy(params, warp_tile(geometry, item, role, next));
        if (pieces == 1) projections.copy(found_anew(item), next);
        if (any_variable && !summarize && adds_to_partial_sum(item)) {
          const int64_t left = item.end - next;
          prefetch_partial_sum<T, kStates>(args, geometry, item, next,
                                           left < kChunk ? left : kChunk);
        }
      }
      __pipeline_commit();
      if (next < last_chunk) {
        work_on_chunk(next + kChunk);
        __syncthreads();
      }
      if (!more) break;
      __pipeline_wait_prior(0);
      __syncwarp();
      tile = warp_tile(geometry, item, role, next);
      inputs().convert(params, tile, rows);
      if (pieces == 1) projections.convert(found_anew(item), 0);
      __syncthreads();
    }

    if (summarize) {
      if (exists && is_packed && part.is_last()) factor = no_factor<T, kStates>();
      if (exists) store_segment(args.workspace.segments, segment_row, factor, carry);
    } else if (exists && params.dinitial_state.present() && part.is_first()) {
      store_channel_states(params.dinitial_state, part.states_of(item), channel, role.first_state,
                           params.dstate, carry);
    }
    __syncthreads();  // before the next work item writes to shared memory
  };

  const int64_t work_items = geometry.work_items * geometry.tiles_per_sum;
  for (int64_t index = blockIdx.x; index < work_items; index += gridDim.x) {
    const WorkItem item = any_work_item(params, geometry, index);
    if (item.channels <= 0) continue;
    if (summarize && item.segment == 0) continue;  // nothing comes before it
    const Parts parts(params, item);
    const int64_t channel = item.first_channel + role.channel_in_tile;
    const bool exists = role.channel_in_tile < item.channels;
    const int64_t segment_row =
        ((item.segment * params.batch + item.batch) * params.dim + channel) * padded_states +
        role.first_state;
    int64_t part = parts.behind() - 1;
    if (summarize && is_packed) {
      part = parts.first_one();
      // Nothing goes back to before the segment; see the forward scan.
      if (part < 0 || parts[part].is_first()) {
        if (exists) {
          store_segment(args.workspace.segments, segment_row, no_factor<T, kStates>(), States{});
        }
        continue;
      }
    }
    LaneGradients<T, kStates> gradients;
    for (; part >= parts.first(); --part) {
      const Part steps = parts[part];
      if (is_packed && !steps.exists()) continue;
      scan_part(item, steps, channel, exists, segment_row, gradients);
    }
    if (!summarize) write_lane_gradients(args, item, role, channel, exists, gradients);
  }
}

template <class T, int kStates, Method kMethod>
cudaError_t Scan<T, kStates, kMethod>::backward(const BackwardArgs& args, const LaunchShape& shape,
                                                cudaStream_t stream) {
  return launch_kernel(scan_backward_kernel<T, kStates, kMethod>, shape, stream, args);
}

}  // namespace selective_scan::cuda::general
