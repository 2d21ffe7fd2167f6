// The streamed forward scan.
//
// Mapping. A warp owns kWarpSize / lanes channels of one group and walks through time on its own,
// in chunks of kChunk steps. A lane holds kStates states of one of these channels and their poles
// in registers. A block consists of up to kMaxWarps such warps, which share only B and C. These
// come in fp32 from packed_bc.cu through a ring of chunks (bulk_copy.cuh).
//
// For each chunk, a warp starts the loads of the next chunk. Its lanes then scan, and store their
// parts of y, four steps at a time, in planes of rows, one plane for each lane of a channel. The
// output phase adds the planes, applies D and the gate, and stores the results. Finally u and delta
// of the next chunk become rows of Δ and Δ·u in shared memory, computed once per (channel, step).
//
// Shared memory: barriers, the ring's slots, then the Δ rows, Δ·u rows and planes of each warp.
//
// Bound by: the special-function unit (one ex2 per update, three more per (channel, step)) and,
// nearly as much, issue slots.
#pragma once

#include <type_traits>

#include "../kit/bulk_copy.cuh"
#include "../kit/launch_tools.h"
#include "../kit/states.cuh"
#include "../kit/step_math.cuh"
#include "forward_chunk.cuh"
#include "forward_kernels.h"
#include "row_slices.cuh"

namespace selective_scan::cuda::streamed {

/// D or delta_bias of the channels whose values a lane holds; zero if absent.
template <int kItems, LaneMap kMap>
struct ChannelValues {
  static constexpr int kItemsEach =  // values of a channel
      kMap == LaneMap::kSteps       ? kItems
      : kMap == LaneMap::kStepPairs ? 2
                                    : 1;
  static constexpr int kCount = kItems / kItemsEach;
  float values[kCount];

  /// Starts the load of the element that the lane reads: the one of its own channel, or of the
  /// channel numbered `lane`.
  static __device__ __forceinline__ RawElement load(const ArrayView& view, int64_t first_channel,
                                                    const LaneSlice& slice, int lane) {
    const int channel = kMap == LaneMap::kSteps ? slice.channel : lane;
    return RawElement(view, (first_channel + channel) * view.channel,
                      channel < slice.channels_left && channel < kItems);
  }
  __device__ __forceinline__ ChannelValues(const ArrayView& view, const LaneSlice& slice,
                                           RawElement element) {
    const float value = element.value(view.dtype);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] =
          kMap == LaneMap::kSteps ? value : __shfl_sync(kFullMask, value, slice.channel + i);
    }
  }
  __device__ __forceinline__ float operator[](int i) const { return values[i / kItemsEach]; }
};

template <class T, int kStates, int kLaneBits>
struct LaneStates {
  using Shape = WarpShape<T, kStates, kLaneBits>;
  using Quad = Pack<T, Shape::kQuad>;

  /// Loads from an fp32 array (batch, channel, state), with all loads in flight at a time.
  static __device__ __forceinline__ void load(const ArrayView& view, int64_t batch, int64_t channel,
                                              int part, int64_t dstate, T (&states)[kStates]) {
    const float* data =
        static_cast<const float*>(view.data) + (batch * view.batch + channel * view.channel);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const int n = Shape::first_state(part, s / Shape::kQuad) + s % Shape::kQuad;
      if (n >= dstate) continue;
      if constexpr (is_complex_v<T>) {
        states[s] = {data[n * view.state], data[n * view.state + view.imag]};
      } else {
        states[s] = data[n * view.state];
      }
    }
  }
  /// Loads from an array of any dtype.
  static __device__ __forceinline__ void load_any(const ArrayView& view, int64_t base, int part,
                                                  int64_t dstate, T (&states)[kStates]) {
#pragma unroll
    for (int q = 0; q < Shape::kQuads; ++q) {
      const Quad quad =
          load_states<T, Shape::kQuad>(view, base, Shape::first_state(part, q), dstate);
#pragma unroll
      for (int s = 0; s < Shape::kQuad; ++s) states[q * Shape::kQuad + s] = quad.v[s];
    }
  }
  /// These load from and store to a (segment, batch, channel, padded state) array.
  static __device__ __forceinline__ void load_packed(const void* array, const BlockItem& item,
                                                     int64_t channel, int part,
                                                     const ScanParams& params,
                                                     T (&states)[kStates]) {
    const T* row = static_cast<const T*>(array) + packed_row(params, item, channel);
#pragma unroll
    for (int q = 0; q < Shape::kQuads; ++q) {
      const auto quad = load_pack<T, Shape::kQuad>(row + Shape::first_state(part, q));
#pragma unroll
      for (int s = 0; s < Shape::kQuad; ++s) states[q * Shape::kQuad + s] = quad.v[s];
    }
  }
  static __device__ __forceinline__ void store_packed(void* array, const BlockItem& item,
                                                      int64_t channel, int part,
                                                      const ScanParams& params,
                                                      const T (&states)[kStates]) {
    T* row = static_cast<T*>(array) + packed_row(params, item, channel);
#pragma unroll
    for (int q = 0; q < Shape::kQuads; ++q) {
      store_pack(row + Shape::first_state(part, q), quad(states, q));
    }
  }
  static __device__ __forceinline__ int64_t packed_row(const ScanParams& params,
                                                       const BlockItem& item, int64_t channel) {
    return ((item.segment * params.batch + item.batch) * params.dim + channel) * Shape::kPadded;
  }
  static __device__ __forceinline__ Quad quad(const T (&states)[kStates], int q) {
    Quad quad;
#pragma unroll
    for (int s = 0; s < Shape::kQuad; ++s) quad.v[s] = states[q * Shape::kQuad + s];
    return quad;
  }
};

/// Optional work of a scan. The bits share one register, and testing them for every chunk takes
/// less than testing pointers.
enum Feature : int { kGate = 1, kOutput = 2, kSaveStates = 4, kSoftplus = 8 };

/// The properties of a call that select a specialized kernel.
enum class ForwardKind : int8_t {
  kPlain,
  kFewRegisters,  // see has_few_registers()
  kPacked,        // packed sequences: states are replaced at the chunk that begins one
  kInputDelta,    // the input has a separate step size
};

template <class T, int kStates, int kLaneBits, int kSize, LaneMap kMap, Method kMethod,
          bool kVariable, ForwardKind kKind>
__global__ void __launch_bounds__(kKind == ForwardKind::kFewRegisters ? kFewRegistersResidentThreads
                                                                      : kResidentThreads,
                                  1) forward_kernel(const __grid_constant__ ForwardArgs args) {
  if constexpr (!kHasAsyncCopies) return;
  constexpr bool kPacked = kKind == ForwardKind::kPacked;
  constexpr bool kOwnInputSteps = kKind == ForwardKind::kInputDelta;
  using Shape = WarpShape<T, kStates, kLaneBits>;
  using States = LaneStates<T, kStates, kLaneBits>;
  using Cursor = RowCursor<Shape::kChannels, kSize>;
  using Values = Slice<Shape::kChannels>;
  extern __shared__ __align__(16) char shared[];
  const ForwardParams& params = args.params;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const LaneRole role = lane_role(lane, kLaneBits);

  BlockItem item = block_item(args, args.tiles, args.warps * Shape::kChannels, blockIdx.x);
  constexpr int kChunkBytes = kChunk * 2 * Shape::kPadded * static_cast<int>(sizeof(T));
  [[maybe_unused]] const auto packed_chunk = [&](int chunk) {
    return args.packed_chunks(kChunkBytes)[item.first_chunk + chunk];
  };
  [[maybe_unused]] PackedChunk now, next;
  if constexpr (kPacked) {
    const PackedChunks chunks = args.packed_chunks(kChunkBytes);
    item = in_segment(item, chunks.segment(item.segment, args.chunks));
    if (item.chunks == 0) {
      // Even if all blocks end here, the next kernel must not start before B and C are written.
      wait_for_primary();
      return;
    }
    now = packed_chunk(0);
    if (item.chunks > 1) next = packed_chunk(1);
  }
  const int first_in_tile = warp * Shape::kChannels;
  const int left = item.channels - first_in_tile;
  const int channels = left < 0 ? 0 : left < Shape::kChannels ? left : Shape::kChannels;
  const int64_t first_channel = item.first_channel + first_in_tile;
  const int64_t channel = first_channel + role.channel;
  const bool exists = role.channel < channels;

  const LaneSlice slice = LaneSlice::make<Shape::kChannels>(kMap, args.u, lane, channels);
  Cursor u_cursor(args.u, slice, item.batch, first_channel, item.first_chunk);
  Cursor delta_cursor(args.delta, slice, item.batch, first_channel, item.first_chunk);
  Cursor z_cursor(args.z, slice, item.batch, first_channel, item.first_chunk);
  Cursor out_cursor(args.out, slice, item.batch, first_channel, item.first_chunk);
  int steps_left = static_cast<int>(params.seqlen) - item.first_chunk * kChunk;
  if constexpr (kPacked) {
    const int steps = now.first_step - item.first_chunk * kChunk;
    u_cursor.advance(args.u, steps);
    delta_cursor.advance(args.delta, steps);
    z_cursor.advance(args.z, steps);
    out_cursor.advance(args.out, steps);
    steps_left = now.steps;
  }
  auto raw_u = u_cursor.fetch(args.u, slice, steps_left);
  auto raw_delta = delta_cursor.fetch(args.delta, slice, steps_left);
  [[maybe_unused]] Cursor input_delta_cursor = delta_cursor;
  [[maybe_unused]] auto raw_input_delta = raw_delta;
  if constexpr (kOwnInputSteps) {
    input_delta_cursor =
        Cursor(args.input_delta, slice, item.batch, first_channel, item.first_chunk);
    raw_input_delta = input_delta_cursor.fetch(args.input_delta, slice, steps_left);
  }
  auto raw_z = raw_u;

  using Channels = ChannelValues<Shape::kChannels, kMap>;
  const RawElement raw_D = Channels::load(params.D, first_channel, slice, lane);
  const RawElement raw_bias = Channels::load(params.delta_bias, first_channel, slice, lane);

  using Constants = decltype(Formula<kMethod>::template constants<ScanMath>(T{}));
  Constants constants[kStates];
  T h[kStates] = {};
  T constant_B[kStates] = {};
  T constant_C[kStates] = {};
  T A[kStates] = {};
  if (exists) {
    States::load(params.A, 0, channel, role.part, params.dstate, A);
    if (args.segments > 1) {
      States::load_packed(args.states.offsets, item, channel, role.part, params, h);
    } else if (!kPacked && params.initial_state.present()) {
      States::load(params.initial_state, item.batch, channel, role.part, params.dstate, h);
    }
    if constexpr (!kVariable) {
      States::load_any(params.B, channel * params.B.channel, role.part, params.dstate, constant_B);
      States::load_any(params.C, channel * params.C.channel, role.part, params.dstate, constant_C);
    }
  }

  auto& barriers = *reinterpret_cast<RingBarriers<kRingSlots>*>(shared);
  char* slots = shared + sizeof(RingBarriers<kRingSlots>);
  const int chunks = item.chunks;
  ChunkRing<kRingSlots> ring(
      barriers, slots,
      args.projections +
          ((item.batch * params.groups + item.group) * args.chunks + item.first_chunk) *
              kChunkBytes,
      kChunkBytes, kChunkBytes, kVariable ? chunks : 0);
  if constexpr (kVariable) {
    if (!kHasBulkCopy || threadIdx.x == 0) wait_for_primary();
    ring.start();
  }
  float* delta_rows = reinterpret_cast<float*>(slots + (kVariable ? kRingSlots * kChunkBytes : 0)) +
                      warp * Shape::kWarpFloats;
  float* input_rows = delta_rows + Shape::kRows;
  float* planes = input_rows + Shape::kRows;

  const Channels D(params.D, slice, raw_D);
  const Channels bias(params.delta_bias, slice, raw_bias);
  const auto series = series_of<float>(params.method);
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    if constexpr (kGoesByIncrements<kMethod>) {
      A[s] = ScanMath::invertible(A[s]);
      h[s] = A[s] * h[s];
    }
    constants[s] = Formula<kMethod>::template constants<ScanMath>(A[s], series);
  }
  const auto quad_of_states = [&](int q) {
    T states[kStates];
#pragma unroll
    for (int s = 0; s < kStates; ++s) states[s] = state_of<kMethod>(constants[s], h[s]);
    return States::quad(states, q);
  };
  const auto store_last = [&](int64_t batch) {
    const ArrayView& view = params.last_state;
#pragma unroll
    for (int q = 0; q < Shape::kQuads; ++q) {
      store_states<T, Shape::kQuad>(view, batch * view.batch + channel * view.channel,
                                    Shape::first_state(role.part, q), params.dstate,
                                    quad_of_states(q));
    }
  };
  const float* delta_row = delta_rows + role.channel * kRowStride;
  const float* input_row = input_rows + role.channel * kRowStride;
  float* y_row = planes + role.part * Shape::kPlane + role.channel * kRowStride;

  // Kept in a register rather than computed again for every chunk.
  int features = (args.z.present() ? kGate : 0) |
                 (params.wanted == ForwardWanted::kOutput ? kOutput : 0) |
                 (params.states != nullptr && exists ? kSaveStates : 0) |
                 (params.delta_softplus ? kSoftplus : 0);
  asm volatile("" : "+r"(features));
  const auto has = [&](Feature feature) { return (features & feature) != 0; };
  int chunk_bytes = slice.is_backward ? -kChunk * kSize : kChunk * kSize;
  asm volatile("" : "+r"(chunk_bytes));
  [[maybe_unused]] int gap = 0;  // from one packed chunk to the next
  const auto advance = [&](Cursor& cursor, const RowArray& rows) {
    if constexpr (kMap == LaneMap::kSteps) {
      cursor.advance_bytes(chunk_bytes);
    } else {
      cursor.advance(rows, kPacked ? gap : kChunk);
    }
  };
  T* saved =
      static_cast<T*>(params.states) +
      ((item.batch * (args.chunks - 1) + item.first_chunk) * params.dim + channel) * params.dstate;
  const int chunks_to_save = static_cast<int>(args.chunks) - 1 - item.first_chunk;
  const int64_t saved_stride = params.dim * params.dstate;

  // Computes Δ and Δ·u of the next chunk from the loaded values. There is no branch for the last
  // chunk: rows computed after it are never read.
  const auto make_rows = [&] {
    const Values u = Cursor::to_values(args.u, slice, raw_u);
    Values values = Cursor::to_values(args.delta, slice, raw_delta);
#pragma unroll
    for (int i = 0; i < Shape::kChannels; ++i) values.v[i] += bias[i];
    make_steps_by_series<kSize>(values, has(kSoftplus));
    slice_to_shared<SharedOrder::kMemory>(slice, values, delta_rows);
    if constexpr (kOwnInputSteps) {
      values = Cursor::to_values(args.input_delta, slice, raw_input_delta);
    }
#pragma unroll
    for (int i = 0; i < Shape::kChannels; ++i) {
      values.v[i] = kGoesByIncrements<kMethod> ? u.v[i] : u.v[i] * values.v[i];
    }
    slice_to_shared<SharedOrder::kMemory>(slice, values, input_rows);
    if (steps_left < kChunk) {  // a missing step leaves the states unchanged
      clear_missing_steps<Shape::kChannels>(slice, steps_left, delta_rows);
      clear_missing_steps<Shape::kChannels>(slice, steps_left, input_rows);
    }
  };
  make_rows();

#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    __syncwarp();
    // Acquired before the loads: after them, the compiler may wait for their results.
    const char* slot = kVariable ? ring.acquire() : nullptr;

    [[maybe_unused]] PackedChunk after_next;
    if constexpr (kPacked) {
      gap = next.first_step - now.first_step;
      if (chunk + 2 < chunks) after_next = packed_chunk(chunk + 2);
      if (now.is_first) {
        T initial[kStates] = {};
        if (exists && params.initial_state.present()) {
          States::load(params.initial_state, now.sequence, channel, role.part, params.dstate,
                       initial);
        }
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          h[s] = kGoesByIncrements<kMethod> ? A[s] * initial[s] : initial[s];
        }
      }
    }

    const auto raw_this_u = raw_u;
    if (has(kGate)) z_cursor.fetch_into(args.z, slice, steps_left, raw_z);
    advance(z_cursor, args.z);
    advance(u_cursor, args.u);
    advance(delta_cursor, args.delta);
    u_cursor.fetch_into(args.u, slice, kPacked ? next.steps : steps_left - kChunk, raw_u);
    delta_cursor.fetch_into(args.delta, slice, kPacked ? next.steps : steps_left - kChunk,
                            raw_delta);
    if constexpr (kOwnInputSteps) {
      advance(input_delta_cursor, args.input_delta);
      input_delta_cursor.fetch_into(args.input_delta, slice, steps_left - kChunk, raw_input_delta);
    }

    const T* projections = reinterpret_cast<const T*>(slot) + Shape::first_state(role.part, 0);
    const int steps = steps_left < kChunk ? steps_left : kChunk;
    const auto scan_towards = [&](auto backward) {
      scan_chunk<T, kStates, kLaneBits, kSize, kMap, kMethod, kVariable, decltype(backward)::value>(
          delta_row, input_row, projections, steps, constants, constant_B, constant_C, h, y_row);
    };
    if (kMap == LaneMap::kSteps && slice.is_backward) {
      scan_towards(std::true_type{});
    } else {
      scan_towards(std::false_type{});
    }
    if constexpr (!kVariable || !kHasBulkCopy) __syncwarp();  // else release() does
    if constexpr (kVariable) ring.release();

    bool is_saved = chunk < chunks_to_save;
    if constexpr (kPacked) {
      if (now.is_last && exists && params.last_state.present()) store_last(now.sequence);
      is_saved = !now.is_last;
      saved = static_cast<T*>(params.states) + now.saved * saved_stride + channel * params.dstate;
    }
    if (has(kSaveStates) && is_saved) {
#pragma unroll
      for (int q = 0; q < Shape::kQuads; ++q) {
        store_states(saved, Shape::first_state(role.part, q), params.dstate, quad_of_states(q));
      }
      saved += saved_stride;
    }
    if (has(kOutput)) {
      Values y = slice_from_shared<Shape::kChannels, Shape::kLanes>(slice, planes, Shape::kPlane);
      const Values this_u = Cursor::to_values(args.u, slice, raw_this_u);
#pragma unroll
      for (int i = 0; i < Shape::kChannels; ++i) {
        y.v[i] = kOutputScale<T> * y.v[i] + D[i] * this_u.v[i];
      }
      if (has(kGate)) {
        const Values z = Cursor::to_values(args.z, slice, raw_z);
#pragma unroll
        for (int i = 0; i < Shape::kChannels; ++i) y.v[i] = gated<kSize>(y.v[i], z.v[i]);
      }
      out_cursor.store(args.out, slice, steps_left, y);
    }
    advance(out_cursor, args.out);
    if constexpr (kPacked) {
      now = next;
      next = after_next;
      steps_left = now.steps;
    } else {
      steps_left -= kChunk;
    }
    make_rows();
  }

  if (!kPacked && exists && params.last_state.present() && item.segment == args.segments - 1) {
    store_last(item.batch);
  }
}

template <class T, int kStates, int kLaneBits, Method kMethod>
cudaError_t StreamedForward<T, kStates, kLaneBits, kMethod>::launch(const ForwardArgs& args,
                                                                    const LaunchShape& shape,
                                                                    cudaStream_t stream) {
  constexpr bool kIsCommon = kIsCommonShape<T, kStates>;
  const auto launch_for = [&]<bool kVariable, int kSize, LaneMap kMap>() {
    const auto launch_kind = [&]<ForwardKind kKind>() {
      return launch_kernel(
          forward_kernel<T, kStates, kLaneBits, kSize, kMap, kMethod, kVariable, kKind>, shape,
          stream, args);
    };
    using enum ForwardKind;
    if constexpr (kIsCommon && kVariable && has_packed(kMap, kSize)) {
      if (args.params.packed.present()) return launch_kind.template operator()<kPacked>();
    }
    if constexpr (kIsCommon && kVariable && has_all_kernels(kMethod)) {
      if (args.input_delta.present()) return launch_kind.template operator()<kInputDelta>();
    }
    if constexpr (has_few_registers<T, kStates, kMethod>(kMap, kSize)) {
      if (args.few_registers) return launch_kind.template operator()<kFewRegisters>();
    }
    return launch_kind.template operator()<kPlain>();
  };
  const auto launch_of_size = [&]<bool kVariable, int kSize>() {
    using enum LaneMap;
    if (args.map == kSteps) return launch_for.template operator()<kVariable, kSize, kSteps>();
    if constexpr (kIsCommon) {
      return args.map == kStepPairs ? launch_for.template operator()<kVariable, kSize, kStepPairs>()
                                    : launch_for.template operator()<kVariable, kSize, kElements>();
    } else {
      return launch_for.template operator()<kVariable, kSize, kChannels>();
    }
  };
  const auto launch_with = [&]<bool kVariable>() {
    return element_size(args.params.u.dtype) == 4
               ? launch_of_size.template operator()<kVariable, 4>()
               : launch_of_size.template operator()<kVariable, 2>();
  };
  if constexpr (kIsCommon && has_all_kernels(kMethod)) {
    if (args.projections == nullptr) return launch_with.template operator()<false>();
  }
  return launch_with.template operator()<true>();
}

}  // namespace selective_scan::cuda::streamed
