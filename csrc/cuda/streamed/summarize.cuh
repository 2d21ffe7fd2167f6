// The maps of the segments of time for the streamed forward scan of few channels. Each maps the
// state that enters a segment to the one that leaves it: x → factor·x + offset.
//
// Mapping. A block owns one segment and kWarpSize channels of one group or, if groups are smaller,
// the channels of several groups. It has one warp for each part of the states, in which lane =
// channel. In its other role, each warp computes the rows of Δ and Δ·u of its share of the
// channels, which all warps then read. These rows are double-buffered, with one barrier per chunk.
// A warp copies its own part of B with cp.async, one chunk ahead.
//
// Chunks are taken last one first. The state that a chunk produces from zero is weighted with the
// product of abar over all later chunks. Once this product is below the smallest normal number for
// all of a warp's states, all earlier steps have been forgotten, and the warp has nothing left to
// add. The block ends when no warp has. Parts of the states with faster poles end sooner.
//
// Shared memory: two buffers of Δ rows and Δ·u rows, then two buffers per warp of B of every group.
//
// Bound by: the special-function unit.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "forward.cuh"

namespace selective_scan::cuda::streamed {

template <class T, int kStates, int kLaneBits>
struct ForwardSummaryShape {
  using Shape = WarpShape<T, kStates, kLaneBits>;
  static constexpr int kThreads = kWarpSize * Shape::kLanes;
  static constexpr int kBuffers = 2;
  static constexpr int kRows = kWarpSize * kRowStride;           // floats of the rows of Δ or Δ·u
  static constexpr int kPart = kChunk * kStates + Shape::kQuad;  // of B; spreads groups over banks
  static constexpr int kMostGroups = kStates * sizeof(T) <= 16 ? 4 : 1;  // per block
  static constexpr int bytes(int groups) {
    return kBuffers * (2 * kRows * static_cast<int>(sizeof(float)) +
                       groups * Shape::kLanes * kPart * static_cast<int>(sizeof(T)));
  }
  static constexpr int kBlocks = kStates <= 4 ? 768 / kThreads : 384 / kThreads;  // resident
};

/// Returns whether a state multiplied by this factor leaves nothing, or next to nothing, in fp32.
__device__ __forceinline__ bool is_forgotten(float factor) {
  constexpr float kSmallestNormal = 1.17549435e-38f;
  return fabsf(factor) < kSmallestNormal;
}
__device__ __forceinline__ bool is_forgotten(Complex<float> factor) {
  return is_forgotten(factor.re) && is_forgotten(factor.im);
}

/// Takes a lane's states from zero through a whole chunk, and computes the product of abar. `B` is
/// the warp's part of B, [step][state].
template <Method kMethod, class T, int kStates, class Constants>
__device__ __forceinline__ void summarize_chunk(const float* delta_row, const float* delta_u_row,
                                                const T* B, const Constants (&constants)[kStates],
                                                T (&h)[kStates], T (&factor)[kStates]) {
  constexpr bool kIsExponential = Formula<kMethod>::kAbarIsExponential;
  constexpr int kQuad = 16 / static_cast<int>(sizeof(T));
  float sum = 0;  // over Δ
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    h[s] = T{};
    factor[s] = one<T>();
  }
  constexpr int kUnrolled = kStates * sizeof(T) <= 16 ? 2 : 1;
#pragma unroll kUnrolled
  for (int block = 0; block < kChunk; block += kBlockSteps) {
    const auto delta = load_pack<float, kBlockSteps>(delta_row + block);
    const auto delta_u = load_pack<float, kBlockSteps>(delta_u_row + block);
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      sum += delta.v[j];
#pragma unroll
      for (int q = 0; q < kStates / kQuad; ++q) {
        const auto b = load_pack<T, kQuad>(B + (block + j) * kStates + q * kQuad);
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          const int s = q * kQuad + i;
          const auto step =
              Formula<kMethod>::template step<ScanMath, T>(delta.v[j], delta_u.v[j], constants[s]);
          h[s] = advance(step, h[s], b.v[i]);
          if constexpr (!kIsExponential) factor[s] = abar_of(step) * factor[s];
        }
      }
    }
  }
  if constexpr (kIsExponential) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      factor[s] = abar_of(Formula<kMethod>::template step<ScanMath, T>(sum, 0.0f, constants[s]));
    }
  }
}

/// kPacked: the chunks are those of packed sequences. Steps before the last sequence that begins in
/// a segment do not affect the state that leaves the segment, so the walk ends there. If that
/// sequence also ends with the segment, no state leaves the segment.
template <class T, int kStates, int kLaneBits, int kSize, LaneMap kMap, Method kMethod,
          ForwardKind kKind>
__global__ void __launch_bounds__(ForwardSummaryShape<T, kStates, kLaneBits>::kThreads,
                                  ForwardSummaryShape<T, kStates, kLaneBits>::kBlocks)
    summarize_kernel(const __grid_constant__ ForwardArgs args, int64_t tiles, int groups) {
  if constexpr (!kHasAsyncCopies) return;
  constexpr bool kPacked = kKind == ForwardKind::kPacked;
  constexpr bool kOwnInputSteps = kKind == ForwardKind::kInputDelta;
  using Shape = WarpShape<T, kStates, kLaneBits>;
  using Summary = ForwardSummaryShape<T, kStates, kLaneBits>;
  using States = LaneStates<T, kStates, kLaneBits>;
  using Cursor = RowCursor<Shape::kChannels, kSize>;
  using Values = Slice<Shape::kChannels>;
  using Channels = ChannelValues<Shape::kChannels, kMap>;
  extern __shared__ __align__(16) char shared[];
  const ForwardParams& params = args.params;
  const int tile_groups = kPacked || Summary::kMostGroups == 1 ? 1 : groups;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  constexpr int kStep = 2 * Shape::kPadded;  // of B and C
  [[maybe_unused]] const PackedChunks packed_chunks =
      args.packed_chunks(kChunk * kStep * static_cast<int>(sizeof(T)));
  BlockItem item = block_item(args, tiles, kWarpSize, blockIdx.x);
  if constexpr (kPacked) {
    item = in_segment(item, packed_chunks.summarized_segment(item.segment, args.chunks));
  }
  const int last_chunk = item.first_chunk + item.chunks - 1;
  [[maybe_unused]] PackedChunk now;
  if constexpr (kPacked) {
    if (item.segment == args.segments - 1) return;
    if (item.chunks > 0) now = packed_chunks[last_chunk];
    if (item.chunks == 0 || now.is_last) {
      if (lane < item.channels) {
        // A sequence may continue after an empty segment, which passes on what enters it.
        const auto factor = item.chunks == 0 ? ones<T, kStates>() : no_factor<T, kStates>();
        const Pack<T, kStates> offset{};
        const int64_t channel = item.first_channel + lane;
        States::store_packed(args.states.factors, item, channel, warp, params, factor.v);
        States::store_packed(args.states.offsets, item, channel, warp, params, offset.v);
      }
      return;
    }
  }

  // From here on: the warp in its role of computing rows.
  const int left = item.channels - warp * Shape::kChannels;
  const int row_channels = left < 0 ? 0 : left < Shape::kChannels ? left : Shape::kChannels;
  const int64_t first_channel = item.first_channel + warp * Shape::kChannels;
  const LaneSlice slice = LaneSlice::make<Shape::kChannels>(kMap, args.u, lane, row_channels);
  const int cursor_chunk = kPacked ? 0 : last_chunk;
  Cursor u_cursor(args.u, slice, item.batch, first_channel, cursor_chunk);
  Cursor delta_cursor(args.delta, slice, item.batch, first_channel, cursor_chunk);
  int steps = kChunk;
  if constexpr (kPacked) {
    u_cursor.advance(args.u, now.first_step);
    delta_cursor.advance(args.delta, now.first_step);
    steps = now.steps;
  }
  auto raw_u = u_cursor.fetch(args.u, slice, steps);
  auto raw_delta = delta_cursor.fetch(args.delta, slice, steps);
  [[maybe_unused]] Cursor input_delta_cursor = delta_cursor;
  [[maybe_unused]] auto raw_input_delta = raw_delta;
  if constexpr (kOwnInputSteps) {
    input_delta_cursor = Cursor(args.input_delta, slice, item.batch, first_channel, cursor_chunk);
    raw_input_delta = input_delta_cursor.fetch(args.input_delta, slice, steps);
  }
  const Channels bias(params.delta_bias, slice,
                      Channels::load(params.delta_bias, first_channel, slice, lane));

  // From here on: the warp in its role of holding states.
  const int part = warp;
  const int64_t channel = item.first_channel + lane;
  const bool exists = lane < item.channels;
  using Constants = decltype(Formula<kMethod>::template constants<ScanMath>(T{}));
  Constants constants[kStates];
  T factor[kStates];
  T offset[kStates] = {};
  {
    T A[kStates] = {};
    const auto series = series_of<float>(params.method);
    if (exists) States::load(params.A, 0, channel, part, params.dstate, A);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const int n = Shape::first_state(part, s / Shape::kQuad) + s % Shape::kQuad;
      constants[s] = Formula<kMethod>::template constants<ScanMath>(A[s], series);
      factor[s] = exists && n < params.dstate ? one<T>() : T{};
    }
  }

  float* const delta_rows = reinterpret_cast<float*>(shared);
  float* const delta_u_rows = delta_rows + Summary::kBuffers * Summary::kRows;
  T* const B_parts = reinterpret_cast<T*>(delta_u_rows + Summary::kBuffers * Summary::kRows) +
                     warp * Summary::kBuffers * tile_groups * Summary::kPart;
  const T* B_step =
      reinterpret_cast<const T*>(args.projections) +
      (((item.batch * params.groups + item.group) * tile_groups * args.chunks + last_chunk) *
           kChunk +
       lane) *
          kStep;
  const int64_t group_stride = args.chunks * kChunk * kStep;
  const int own_group =
      tile_groups == 1 ? 0
                       : min(lane / (static_cast<int>(params.dim / params.groups) / tile_groups),
                             tile_groups - 1);
  const auto copy_B = [&](int buffer) {
#pragma unroll 1
    for (int group = 0; group < tile_groups; ++group) {
      T* const target = B_parts + (buffer * tile_groups + group) * Summary::kPart + lane * kStates;
#pragma unroll
      for (int q = 0; q < Shape::kQuads; ++q) {
        __pipeline_memcpy_async(target + q * Shape::kQuad,
                                B_step + group * group_stride + Shape::first_state(part, q), 16);
      }
    }
    __pipeline_commit();
  };
  copy_B(0);

  bool is_done = false;
  int buffer = 0;
#pragma unroll 1
  for (int chunks_left = item.chunks; chunks_left > 0; --chunks_left) {
    float* const own_rows =
        delta_rows + buffer * Summary::kRows + warp * Shape::kChannels * kRowStride;
    const Values u = Cursor::to_values(args.u, slice, raw_u);
    Values values = Cursor::to_values(args.delta, slice, raw_delta);
#pragma unroll
    for (int i = 0; i < Shape::kChannels; ++i) values.v[i] += bias[i];
    make_steps_by_series<kSize>(values, params.delta_softplus);
    slice_to_shared(slice, values, own_rows);
    if constexpr (kOwnInputSteps) {
      values = Cursor::to_values(args.input_delta, slice, raw_input_delta);
    }
#pragma unroll
    for (int i = 0; i < Shape::kChannels; ++i) values.v[i] *= u.v[i];
    slice_to_shared(slice, values, own_rows + Summary::kBuffers * Summary::kRows);
    if (kPacked && now.steps < kChunk) {
      clear_missing_steps<Shape::kChannels>(slice, now.steps, own_rows);
      clear_missing_steps<Shape::kChannels>(slice, now.steps,
                                            own_rows + Summary::kBuffers * Summary::kRows);
    }
    __pipeline_wait_prior(0);
    if (__syncthreads_and(is_done)) break;

    [[maybe_unused]] PackedChunk before;
    if (chunks_left > 1) {
      int gap = -kChunk;
      if constexpr (kPacked) {
        before = packed_chunks[item.first_chunk + chunks_left - 2];
        gap = before.first_step - now.first_step;
        steps = before.steps;
      }
      u_cursor.advance(args.u, gap);
      delta_cursor.advance(args.delta, gap);
      u_cursor.fetch_into(args.u, slice, steps, raw_u);
      delta_cursor.fetch_into(args.delta, slice, steps, raw_delta);
      if constexpr (kOwnInputSteps) {
        input_delta_cursor.advance(args.input_delta, gap);
        input_delta_cursor.fetch_into(args.input_delta, slice, steps, raw_input_delta);
      }
      B_step -= kChunk * kStep;
      copy_B(buffer ^ 1);
    }
    if (!is_done) {
      T h[kStates];
      T chunk_factor[kStates];
      const int at = buffer * Summary::kRows + lane * kRowStride;
      summarize_chunk<kMethod>(delta_rows + at, delta_u_rows + at,
                               B_parts + (buffer * tile_groups + own_group) * Summary::kPart,
                               constants, h, chunk_factor);
      bool is_lane_done = true;
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        // Skipped even if other lanes go on, so that the result does not depend on their values.
        if (is_forgotten(factor[s])) continue;
        offset[s] = apply_map(factor[s], offset[s], h[s]);
        // If it is forgotten, nothing that enters this chunk remains, whatever the later chunks do.
        const T product = apply_map(factor[s], T{}, chunk_factor[s]);
        factor[s] = is_forgotten(product) ? T{} : product;
        is_lane_done &= is_forgotten(factor[s]);
      }
      is_done = __all_sync(kFullMask, is_lane_done);
    }
    if constexpr (kPacked) {
      if (now.is_first) {
        T initial[kStates] = {};
        if (exists && params.initial_state.present()) {
          States::load(params.initial_state, now.sequence, channel, part, params.dstate, initial);
        }
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          if (!is_forgotten(factor[s])) offset[s] = apply_map(factor[s], offset[s], initial[s]);
          factor[s] = T{};
        }
        is_done = true;
      }
      now = before;
    }
    buffer ^= 1;
  }

  if constexpr (kPacked) {
    // A product with 0 would pass non-finite values from one sequence to another.
    const auto none = no_factor<T, kStates>();
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if (is_forgotten(factor[s])) factor[s] = none.v[s];
    }
  }
  if (exists) {
    States::store_packed(args.states.factors, item, channel, part, params, factor);
    States::store_packed(args.states.offsets, item, channel, part, params, offset);
  }
}

template <class T, int kStates, int kLaneBits, Method kMethod>
cudaError_t StreamedForward<T, kStates, kLaneBits, kMethod>::summarize(const ForwardArgs& whole,
                                                                       cudaStream_t stream) {
  using Summary = ForwardSummaryShape<T, kStates, kLaneBits>;
  ForwardArgs args = whole;
  ForwardParams& params = args.params;
  // A block treats as many groups as one as it has lanes for.
  int tile_groups = 1;
  while (!params.packed.present() && 2 * tile_groups <= Summary::kMostGroups &&
         params.groups % 2 == 0 && 2 * (params.dim / params.groups) <= kWarpSize) {
    params.groups /= 2;
    tile_groups *= 2;
  }
  const int64_t tiles = ceil_div(params.dim / params.groups, kWarpSize);
  // The last of packed sequences' segments has no fixed place.
  const bool takes_all = params.packed.present() || args.summarizes_all;
  const int64_t segments = takes_all ? args.segments : args.segments - 1;
  const LaunchShape shape{segments * params.batch * params.groups * tiles, Summary::kThreads,
                          Summary::bytes(tile_groups), false};
  constexpr bool kIsCommon = kIsCommonShape<T, kStates>;
  const auto launch_for = [&]<int kSize, LaneMap kMap>() {
    const auto launch_kind = [&]<ForwardKind kKind>() {
      return launch_kernel(summarize_kernel<T, kStates, kLaneBits, kSize, kMap, kMethod, kKind>,
                           shape, stream, args, tiles, tile_groups);
    };
    using enum ForwardKind;
    if constexpr (kIsCommon && kMap == LaneMap::kChannels) {
      if (params.packed.present()) return launch_kind.template operator()<kPacked>();
    }
    if constexpr (kIsCommon && has_all_kernels(kMethod)) {
      if (args.input_delta.present()) return launch_kind.template operator()<kInputDelta>();
    }
    return launch_kind.template operator()<kPlain>();
  };
  const auto launch_of_size = [&]<int kSize>() {
    return args.map == LaneMap::kSteps
               ? launch_for.template operator()<kSize, LaneMap::kSteps>()
               : launch_for.template operator()<kSize, LaneMap::kChannels>();
  };
  return element_size(params.u.dtype) == 4 ? launch_of_size.template operator()<4>()
                                           : launch_of_size.template operator()<2>();
}

}  // namespace selective_scan::cuda::streamed
