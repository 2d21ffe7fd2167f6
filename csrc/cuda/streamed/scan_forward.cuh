// The streamed forward scan.
//
// Mapping. A warp owns kWarpSize / lanes channels of one group and runs alone through time, in
// chunks of kChunk steps; a lane holds kStates states of one of these channels and their poles in
// registers. A block is up to kMaxWarps such warps, which share B and C only: those come in fp32
// from projections.cu through a ring of chunks (bulk_copy.cuh).
//
// A warp and chunk: u and delta, loaded while the chunk before was scanned, become rows of Δ and
// Δ·u in shared memory, once per (channel, step); the next chunk's loads are started; the lanes
// scan, and leave their part of y, four steps at a time, in a plane of rows per lane of a channel;
// the output phase adds the planes, applies D and the gate, and stores.
//
// Shared memory: barriers, the ring's slots, then per warp Δ rows, Δ·u rows, planes.
//
// Bound by: the special-function unit (one ex2 per update, three more per (channel, step)) and,
// nearly as much, issue slots.
#pragma once

#include "../scan_common.cuh"
#include "bulk_copy.cuh"
#include "forward.h"
#include "projections.h"
#include "row_slices.cuh"
#include "scan_math.cuh"

namespace selective_scan::cuda::streamed {

/// An element of an array of any dtype but fp64, whose load is not waited for before it is
/// converted.
struct RawElement {
  uint32_t bits = 0;  // that of an absent one is zero in every dtype

  __device__ __forceinline__ RawElement(const ArrayView& view, int64_t index, bool exists) {
    if (!exists || !view.present()) return;
    if (view.dtype == DType::kFloat32) {
      bits = static_cast<const uint32_t*>(view.data)[index];
    } else {
      bits = static_cast<const uint16_t*>(view.data)[index];
    }
  }
  __device__ __forceinline__ float value(const ArrayView& view) const {
    if (view.dtype == DType::kFloat32) return bit_cast<float>(bits);
    if (view.dtype == DType::kBFloat16) return bit_cast<float>(bits << 16);
    return to_float(Half{static_cast<uint16_t>(bits)});
  }
};

/// D or delta_bias of the channels that a lane holds values of, zero where absent.
template <int kItems, LaneMap kMap>
struct ChannelValues {
  static constexpr int kCount = kMap == LaneMap::kSteps ? 1 : kItems;
  float values[kCount];

  /// The element that the lane reads, of its own channel or of the lane-th.
  static __device__ __forceinline__ RawElement load(const ArrayView& view, int64_t first_channel,
                                                    const LaneSlice& slice, int lane) {
    const int channel = kMap == LaneMap::kSteps ? slice.channel : lane;
    return RawElement(view, (first_channel + channel) * view.channel,
                      channel < slice.channels_left && channel < kItems);
  }
  __device__ __forceinline__ ChannelValues(const ArrayView& view, RawElement element) {
    const float value = element.value(view);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = kCount == 1 ? value : __shfl_sync(kFullMask, value, i);
    }
  }
  __device__ __forceinline__ float operator[](int i) const { return values[kCount == 1 ? 0 : i]; }
};

template <class T, int kStates, int kLaneBits>
struct LaneStates {
  using Shape = WarpShape<T, kStates, kLaneBits>;
  using Quad = Pack<T, Shape::kQuad>;

  /// From an fp32 array (channel, state) or (batch, channel, state): all loads at a time.
  static __device__ __forceinline__ void load(const ArrayView& view, int64_t base, int part,
                                              int64_t dstate, T (&states)[kStates]) {
    const float* data = static_cast<const float*>(view.data) + base;
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
  /// From an array of any dtype.
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
  static __device__ __forceinline__ Quad quad(const T (&states)[kStates], int q) {
    Quad quad;
#pragma unroll
    for (int s = 0; s < Shape::kQuad; ++s) quad.v[s] = states[q * Shape::kQuad + s];
    return quad;
  }
};

/// Most steps of most models are small.
template <int kSize, int kItems>
__device__ __forceinline__ void softplus_in_place(Slice<kItems>& values) {
  float largest = values.v[0];
#pragma unroll
  for (int i = 1; i < kItems; ++i) largest = fmaxf(largest, values.v[i]);
  if (__all_sync(kFullMask, largest < kSmallSoftplus)) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) values.v[i] = small_softplus<kSize>(values.v[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kItems; ++i) values.v[i] = fast_softplus<kSize>(values.v[i]);
  }
}

/// Blocks of steps that the scan unrolls.
constexpr int kUnrolledBlocks = 4;

/// a·b + c
__device__ __forceinline__ float multiply_add(float a, float b, float c) {
  return fmaf(a, b, c);
}
__device__ __forceinline__ Complex<float> multiply_add(Complex<float> a, Complex<float> b,
                                                       Complex<float> c) {
  return {fmaf(a.re, b.re, fmaf(-a.im, b.im, c.re)), fmaf(a.re, b.im, fmaf(a.im, b.re, c.im))};
}
/// Re(a·b) + c
__device__ __forceinline__ float add_real_of_product(float a, float b, float c) {
  return fmaf(a, b, c);
}
__device__ __forceinline__ float add_real_of_product(Complex<float> a, Complex<float> b, float c) {
  return fmaf(a.re, b.re, fmaf(-a.im, b.im, c));
}

/// kSmall: the caller knows that ScanMath::is_small() holds.
template <Method kMethod, class T, bool kSmall, class Constants>
__device__ __forceinline__ auto step_of(float delta, float delta_u, const Constants& constants) {
  if constexpr (kSmall) {
    return Formula<kMethod>::template small_step<ScanMath, T>(delta, delta_u, constants);
  } else {
    return Formula<kMethod>::template step<ScanMath, T>(delta, delta_u, constants);
  }
}

/// One lane's states through the chunk's first `steps` steps, rounded up to what is unrolled: steps
/// that do not exist have Δ = 0. Its part of y goes to y_row. If kBackward, rows are against the
/// scan's order: step t of the chunk is element kChunk - 1 - t.
template <class T, int kStates, int kLaneBits, Method kMethod, bool kVariable, bool kBackward,
          class Constants>
__device__ __forceinline__ void scan_chunk(const float* delta_row, const float* delta_u_row,
                                           const T* projections, int steps,
                                           const Constants (&constants)[kStates],
                                           const T (&constant_B)[kStates],
                                           const T (&constant_C)[kStates], T (&h)[kStates],
                                           float* y_row) {
  using Shape = WarpShape<T, kStates, kLaneBits>;
  constexpr int kStride = kUnrolledBlocks * kBlockSteps;
  constexpr int kFirst = kBackward ? kChunk - kBlockSteps : 0;
  constexpr int kSign = kBackward ? -1 : 1;
  const auto scan_block = [&](auto small, int t, const auto& delta, const auto& delta_u) {
    Pack<float, kBlockSteps> y;
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      const int k = kBackward ? kBlockSteps - 1 - j : j;
      [[maybe_unused]] const T* row = projections + (t + j) * 2 * Shape::kPadded;
      float sum = 0;
#pragma unroll
      for (int q = 0; q < Shape::kQuads; ++q) {
        Pack<T, Shape::kQuad> B, C;
        if constexpr (kVariable) {
          const int at = q * Shape::kLanes * Shape::kQuad;
          B = load_pack<T, Shape::kQuad>(row + at);
          C = load_pack<T, Shape::kQuad>(row + Shape::kPadded + at);
        }
#pragma unroll
        for (int i = 0; i < Shape::kQuad; ++i) {
          const int s = q * Shape::kQuad + i;
          const T b = kVariable ? B.v[i] : constant_B[s];
          const T c = kVariable ? C.v[i] : constant_C[s];
          const auto step =
              step_of<kMethod, T, decltype(small)::value>(delta.v[k], delta_u.v[k], constants[s]);
          h[s] = multiply_add(step.abar, h[s], step.input * b);
          sum = s == 0 ? real_of_product(c, h[s]) : add_real_of_product(c, h[s], sum);
        }
      }
      y.v[k] = sum;
    }
    return y;
  };
#pragma unroll 1
  for (; steps > 0; steps -= kStride) {
#pragma unroll
    for (int t = 0; t < kStride; t += kBlockSteps) {
      const int block = kFirst + kSign * t;
      const auto delta = load_pack<float, kBlockSteps>(delta_row + block);
      const auto delta_u = load_pack<float, kBlockSteps>(delta_u_row + block);
      Pack<float, kBlockSteps> y;
      if constexpr (kMethod == Method::kFoh && !is_complex_v<T>) {
        float largest = 0;
#pragma unroll
        for (int j = 0; j < kBlockSteps; ++j) largest = fmaxf(largest, fabsf(delta.v[j]));
        bool small = true;
#pragma unroll
        for (int s = 0; s < kStates; ++s) small &= ScanMath::is_small(largest, constants[s]);
        if (__all_sync(kFullMask, small)) {
          y = scan_block(std::true_type{}, t, delta, delta_u);
        } else {
          y = scan_block(std::false_type{}, t, delta, delta_u);
        }
      } else {
        y = scan_block(std::false_type{}, t, delta, delta_u);
      }
      store_pack(y_row + block, y);
    }
    delta_row += kSign * kStride;
    delta_u_row += kSign * kStride;
    y_row += kSign * kStride;
    projections += kStride * 2 * Shape::kPadded;
  }
}

template <class T, int kStates, int kLaneBits, int kSize, LaneMap kMap, Method kMethod,
          bool kVariable, bool kDense>
__global__ void __launch_bounds__(kDense ? kDenseResidentThreads : kResidentThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  using Shape = WarpShape<T, kStates, kLaneBits>;
  using States = LaneStates<T, kStates, kLaneBits>;
  using Cursor = RowCursor<Shape::kChannels, kSize>;
  using Values = Slice<Shape::kChannels>;
  extern __shared__ __align__(16) char shared[];
  const ForwardParams& params = args.params;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const LaneRole role = lane_role(lane, kLaneBits);

  const BlockItem item = block_item(params, args.tiles, args.warps * Shape::kChannels, blockIdx.x);
  const int first_in_tile = warp * Shape::kChannels;
  const int left = item.channels - first_in_tile;
  const int channels = left < 0 ? 0 : left < Shape::kChannels ? left : Shape::kChannels;
  const int64_t first_channel = item.first_channel + first_in_tile;
  const int64_t channel = first_channel + role.channel;
  const bool exists = role.channel < channels;

  const LaneSlice slice = LaneSlice::make<Shape::kChannels>(kMap, args.u, lane, channels);
  Cursor u_cursor(args.u, slice, item.batch, first_channel, 0);
  Cursor delta_cursor(args.delta, slice, item.batch, first_channel, 0);
  Cursor z_cursor(args.z, slice, item.batch, first_channel, 0);
  Cursor out_cursor(args.out, slice, item.batch, first_channel, 0);
  int steps_left = static_cast<int>(params.seqlen);
  auto raw_u = u_cursor.fetch(args.u, slice, steps_left);
  auto raw_delta = delta_cursor.fetch(args.delta, slice, steps_left);
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
    States::load(params.A, channel * params.A.channel, role.part, params.dstate, A);
    if (params.initial_state.present()) {
      States::load(params.initial_state,
                   item.batch * params.initial_state.batch + channel * params.initial_state.channel,
                   role.part, params.dstate, h);
    }
    if constexpr (!kVariable) {
      States::load_any(params.B, channel * params.B.channel, role.part, params.dstate, constant_B);
      States::load_any(params.C, channel * params.C.channel, role.part, params.dstate, constant_C);
    }
  }

  auto& barriers = *reinterpret_cast<RingBarriers<kRingSlots>*>(shared);
  char* slots = shared + sizeof(RingBarriers<kRingSlots>);
  constexpr int kChunkBytes = kChunk * 2 * Shape::kPadded * static_cast<int>(sizeof(T));
  const int chunks = static_cast<int>(args.chunks);
  ChunkRing<kRingSlots> ring(
      barriers, slots,
      args.projections + (item.batch * params.groups + item.group) * args.chunks * kChunkBytes,
      kChunkBytes, kChunkBytes, kVariable ? chunks : 0);
  if constexpr (kVariable) {
    if (!kHasBulkCopy || threadIdx.x == 0) wait_for_primary();
    ring.start();
  }
  float* delta_rows = reinterpret_cast<float*>(slots + (kVariable ? kRingSlots * kChunkBytes : 0)) +
                      warp * Shape::kWarpFloats;
  float* delta_u_rows = delta_rows + Shape::kRows;
  float* planes = delta_u_rows + Shape::kRows;

  const Channels D(params.D, raw_D);
  const Channels bias(params.delta_bias, raw_bias);
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    constants[s] = Formula<kMethod>::template constants<ScanMath>(A[s]);
  }
  const float* delta_row = delta_rows + role.channel * kRowStride;
  const float* delta_u_row = delta_u_rows + role.channel * kRowStride;
  float* y_row = planes + role.part * Shape::kPlane + role.channel * kRowStride;

#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    {
      const Values u = Cursor::to_values(args.u, slice, raw_u);
      Values values = Cursor::to_values(args.delta, slice, raw_delta);
#pragma unroll
      for (int i = 0; i < Shape::kChannels; ++i) values.v[i] += bias[i];
      if (params.delta_softplus) softplus_in_place<kSize>(values);
      slice_to_shared<RowOrder::kMemory>(slice, values, delta_rows);
#pragma unroll
      for (int i = 0; i < Shape::kChannels; ++i) values.v[i] *= u.v[i];
      slice_to_shared<RowOrder::kMemory>(slice, values, delta_u_rows);
      if (steps_left < kChunk && !slice.exists(steps_left)) {  // such a step leaves states be
        slice_to_shared<RowOrder::kMemory>(slice, Values{}, delta_rows);
        slice_to_shared<RowOrder::kMemory>(slice, Values{}, delta_u_rows);
      }
      __syncwarp();

      // Before the loads: behind them the compiler may wait for what they load.
      const char* slot = kVariable ? ring.acquire() : nullptr;

      const auto raw_this_u = raw_u;
      if (args.z.present()) z_cursor.fetch_into(args.z, slice, steps_left, raw_z);
      z_cursor.advance(args.z);
      u_cursor.advance(args.u);
      delta_cursor.advance(args.delta);
      u_cursor.fetch_into(args.u, slice, steps_left - kChunk, raw_u);
      delta_cursor.fetch_into(args.delta, slice, steps_left - kChunk, raw_delta);

      const T* projections = reinterpret_cast<const T*>(slot) + Shape::first_state(role.part, 0);
      const int steps = steps_left < kChunk ? steps_left : kChunk;
      if (kMap == LaneMap::kSteps && slice.is_backward) {
        scan_chunk<T, kStates, kLaneBits, kMethod, kVariable, true>(
            delta_row, delta_u_row, projections, steps, constants, constant_B, constant_C, h,
            y_row);
      } else {
        scan_chunk<T, kStates, kLaneBits, kMethod, kVariable, false>(
            delta_row, delta_u_row, projections, steps, constants, constant_B, constant_C, h,
            y_row);
      }
      __syncwarp();

      if (params.states != nullptr && chunk < chunks - 1 && exists) {
        const int64_t saved = (item.batch * (args.chunks - 1) + chunk) * params.dim + channel;
        T* target = static_cast<T*>(params.states) + saved * params.dstate;
#pragma unroll
        for (int q = 0; q < Shape::kQuads; ++q) {
          store_states(target, Shape::first_state(role.part, q), params.dstate, States::quad(h, q));
        }
      }
      if (params.out.present()) {
        Values y = slice_from_shared<Shape::kChannels, Shape::kLanes, RowOrder::kMemory>(
            slice, planes, Shape::kPlane);
        const Values this_u = Cursor::to_values(args.u, slice, raw_this_u);
#pragma unroll
        for (int i = 0; i < Shape::kChannels; ++i) {
          y.v[i] = kOutputScale<T> * y.v[i] + D[i] * this_u.v[i];
        }
        if (args.z.present()) {
          const Values z = Cursor::to_values(args.z, slice, raw_z);
#pragma unroll
          for (int i = 0; i < Shape::kChannels; ++i) y.v[i] = gate<kSize>(y.v[i], z.v[i]);
        }
        out_cursor.store(args.out, slice, steps_left, y);
      }
      out_cursor.advance(args.out);
      steps_left -= kChunk;
      __syncwarp();
    }
    if constexpr (kVariable) ring.release();
  }

  if (exists && params.last_state.present()) {
#pragma unroll
    for (int q = 0; q < Shape::kQuads; ++q) {
      store_states<T, Shape::kQuad>(
          params.last_state,
          item.batch * params.last_state.batch + channel * params.last_state.channel,
          Shape::first_state(role.part, q), params.dstate, States::quad(h, q));
    }
  }
}

template <class Kernel>
cudaError_t launch_forward(Kernel* kernel, const ForwardArgs& args, cudaStream_t stream) {
  const cudaError_t error = allow_shared_bytes(kernel, args.shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute dependent;
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(args.params.batch * args.params.groups * args.tiles));
  config.blockDim = dim3(static_cast<unsigned>(args.warps * kWarpSize));
  config.dynamicSmemBytes = static_cast<size_t>(args.shared_bytes);
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = args.is_dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <class T, int kStates, int kLaneBits, Method kMethod>
cudaError_t StreamedForward<T, kStates, kLaneBits, kMethod>::launch(const ForwardArgs& args,
                                                                    cudaStream_t stream) {
  const auto launch_for = [&](auto size, auto along_steps, auto variable) {
    constexpr int kSize = decltype(size)::value;
    constexpr LaneMap kMap = decltype(along_steps)::value ? LaneMap::kSteps : LaneMap::kChannels;
    constexpr bool kVariable = decltype(variable)::value;
    if constexpr (has_dense(kMap)) {
      if (args.is_dense) {
        return launch_forward(
            forward_kernel<T, kStates, kLaneBits, kSize, kMap, kMethod, kVariable, true>, args,
            stream);
      }
    }
    return launch_forward(
        forward_kernel<T, kStates, kLaneBits, kSize, kMap, kMethod, kVariable, false>, args,
        stream);
  };
  const auto launch_of_size = [&](auto size, auto variable) {
    return args.map == LaneMap::kSteps ? launch_for(size, std::true_type{}, variable)
                                       : launch_for(size, std::false_type{}, variable);
  };
  const auto launch_with = [&](auto variable) {
    return element_size(args.params.u.dtype) == 4
               ? launch_of_size(std::integral_constant<int, 4>{}, variable)
               : launch_of_size(std::integral_constant<int, 2>{}, variable);
  };
  if constexpr (kHasConstant) {
    if (args.projections == nullptr) return launch_with(std::false_type{});
  }
  return launch_with(std::true_type{});
}

}  // namespace selective_scan::cuda::streamed
