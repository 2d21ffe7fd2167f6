// The forward scan of few sequences, in one launch without segments: prompts.
//
// Mapping. The first warps of a block scan: each has kChannels channels of one group, a lane holds
// kStates states of one of these and walks through all of time. With one state a lane there are
// four times as many warps as in the streamed kernels, so that few channels fill the device. The
// other warps make what these read, a chunk ahead: Δ and Δ·u, once per (channel, step), and B and C
// in fp32. They take the place of scanning warps that schedulers would lack otherwise.
//
// Makers and scanners wait for each other at a barrier of each buffer. Arrays come to makers by
// asynchronous copies, as they lie in memory; each thread converts what it has copied itself, and
// copies the chunk after. Scanning lanes leave their parts of y in planes; where these are added
// up, gated and stored, lanes lie along steps.
//
// Shared memory: raw B and C, two chunks of B and C in fp32, raw u and delta, then for each
// scanning warp two chunks of rows, planes, and its channels' delta_bias: see Shape.
//
// Bound by: latency for short sequences; then issue slots and, nearly as much, the special-function
// unit.
#pragma once

#include <cuda_pipeline_primitives.h>

#include <type_traits>

#include "../kit/barriers.cuh"
#include "../kit/launch_tools.h"
#include "../kit/states.cuh"
#include "../kit/step_math.cuh"
#include "kernels.h"

namespace selective_scan::cuda::prompt {

/// The barriers of the first buffer, in front of those of the second: makers have filled it for
/// scanners, or scanners have left it to makers.
constexpr int kFull = 1;
constexpr int kFree = 3;

/// The compiler knows of all that derives from the result that it is the same in all lanes.
__device__ __forceinline__ int uniform(int value) {
  return __shfl_sync(kFullMask, value, 0);
}

template <class Element, int kCount>
__device__ __forceinline__ Pack<float, kCount> to_values(const Pack<Element, kCount>& raw) {
  Pack<float, kCount> values;
  to_reals<Element>(raw, values.v);
  return values;
}

/// What the lane moves of every warp's rows: kBlockSteps steps of one channel, kGroups times.
template <class S>
struct LaneItem {
  int channel = threadIdx.x % kWarpSize / S::kLanes;
  int step = threadIdx.x % S::kLanes * kBlockSteps;
};

/// This is where a block stands.
struct Tile {
  int64_t batch;
  int group;
  int first_channel;
  int channels;  // of the group from there on
};

/// This is where the arrays of a block lie in shared memory.
template <class S, class Element>
struct Shared {
  static constexpr int kSize = sizeof(Element);
  char* base = shared_memory();
  int scanners;

  __device__ explicit Shared(int scanners) : scanners(scanners) {}

  __device__ char* raw_projections() const { return base; }
  __device__ float* projections(int buffer) const {
    return reinterpret_cast<float*>(base + S::raw_projection_bytes(kSize)) +
           buffer * S::kProjections;
  }
  __device__ float* planes(int scanner) const {
    return projections(kBuffers) + scanner * S::kScanner;
  }
  __device__ float* rows(int scanner, int buffer) const {
    return planes(scanner) + S::kChannels * S::kPlanes + buffer * S::kRows;
  }
  __device__ float* biases(int scanner) const { return rows(scanner, kBuffers); }
  __device__ char* raw_rows() const { return reinterpret_cast<char*>(planes(scanners)); }
};

/// Brings a chunk's input to shared memory. `worker` of `workers` warps share that; what one has
/// started it also finishes.
template <class S, class Element, Method kMethod>
class Maker {
 public:
  __device__ __forceinline__ Maker(const PromptArgs& args, const Tile& tile,
                                   const Shared<S, Element>& shared)
      : args_(args),
        tile_(tile),
        shared_(shared),
        lane_(threadIdx.x % kWarpSize),
        row_(lane_ / kRowVectors),
        vector_step_(lane_ % kRowVectors * kVectorSteps),
        B_(vectors_of(args.B)),
        C_(vectors_of(args.C)),
        u_(items_of(args.u)),
        delta_(items_of(args.delta)) {}

  /// Starts copies; what does not exist becomes zero.
  __device__ __forceinline__ void start(int first_step, int worker, int workers) const {
    const auto address = [&](const char* origin, int64_t row, int row_stride) {
      return origin + row * row_stride + bytes_of(first_step);
    };
    const int vector_steps = args_.seqlen - first_step - vector_step_;  // that exist
#pragma unroll 1
    for (int pass = worker; pass < kPasses; pass += workers) {
      const int state = pass * kPassRows;
      const int count = state + row_ < args_.dstate ? vector_steps : 0;
      char* const target = raw_vector(pass);
      copy<kVectorSteps>(target, address(B_, state, args_.B.state), count);
      copy<kVectorSteps>(target + kRawC, address(C_, state, args_.C.state), count);
    }
#pragma unroll 1
    for (int scanner = worker; scanner < shared_.scanners; scanner += workers) {
      const int channel = scanner * S::kChannels;
      const int steps =
          channel + item_.channel < tile_.channels ? args_.seqlen - first_step - item_.step : 0;
      const char* const u = address(u_, channel, args_.u.channel);
      const char* const delta = address(delta_, channel, args_.delta.channel);
      char* const target = raw_items(scanner);
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        const int first = g * S::kGroupSteps;
        copy<kBlockSteps>(target + g * kRawGroup, u + bytes_of(first), steps - first);
        copy<kBlockSteps>(target + kRawDelta + g * kRawGroup, delta + bytes_of(first),
                          steps - first);
      }
    }
    __pipeline_commit();
  }

  /// Makes of what start() has brought what the scan reads. All delta_bias must be there.
  __device__ __forceinline__ void finish(int first_step, int buffer, int worker,
                                         int workers) const {
    __pipeline_wait_prior(0);
#pragma unroll 1
    for (int pass = worker; pass < kPasses; pass += workers) {
      const Element* const raw = reinterpret_cast<const Element*>(raw_vector(pass));
      float* const target =
          shared_.projections(buffer) + (pass * kPassRows + row_) * S::kRow + vector_step_;
      store_pack(target, to_values(load_pack<Element, kVectorSteps>(raw)));
      store_pack(target + kPaddedStates * S::kRow,
                 to_values(load_pack<Element, kVectorSteps>(raw + kRawC / kSize)));
    }
#pragma unroll 1
    for (int scanner = worker; scanner < shared_.scanners; scanner += workers) {
      float* const rows = shared_.rows(scanner, buffer) + item_.channel * S::kRow + item_.step;
      const float bias = shared_.biases(scanner)[item_.channel];
      const Element* const raw = reinterpret_cast<const Element*>(raw_items(scanner));
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        auto input = to_values(load_pack<Element, kBlockSteps>(raw + g * kRawGroup / kSize));
        auto delta =
            to_values(load_pack<Element, kBlockSteps>(raw + (kRawDelta + g * kRawGroup) / kSize));
#pragma unroll
        for (float& value : delta.v) value += bias;
        make_steps<kSize>(delta, args_.delta_softplus);
        const int steps = args_.seqlen - first_step - g * S::kGroupSteps - item_.step;
#pragma unroll
        for (int i = 0; i < kBlockSteps; ++i) {
          // A step that does not exist leaves states be.
          if (steps <= 0) delta.v[i] = 0;
          if constexpr (!kGoesByIncrements<kMethod>) input.v[i] *= delta.v[i];
        }
        store_pack(rows + g * S::kGroupSteps, delta);
        store_pack(rows + S::kChannels * S::kRow + g * S::kGroupSteps, input);
      }
    }
  }

 private:
  static constexpr int kSize = sizeof(Element);
  static constexpr int kItemBytes = kBlockSteps * kSize;
  static constexpr int kRawGroup = kWarpSize * kItemBytes;
  static constexpr int kRawDelta = S::kGroups * kRawGroup;
  // A lane takes one vector of the rows of B and C at a time.
  static constexpr int kVectorSteps = 16 / kSize;
  static constexpr int kRowVectors = S::kSteps / kVectorSteps;
  static constexpr int kPassRows = kWarpSize / kRowVectors;
  static constexpr int kPasses = kPaddedStates / kPassRows;
  static constexpr int kRawC = kPasses * kWarpSize * 16;

  /// A vector of kCount steps, of which all exist if `count` is positive, else none.
  template <int kCount>
  __device__ __forceinline__ void copy(char* target, const char* source, int count) const {
    constexpr int kBytes = kCount * kSize;
    __pipeline_memcpy_async(target, source, kBytes, count > 0 ? 0 : kBytes);
  }
  static constexpr int64_t bytes_of(int64_t steps) { return steps * kSize; }
  __device__ __forceinline__ const char* vectors_of(const PromptArgs::Projection& view) const {
    return view.data + (tile_.batch * view.batch + static_cast<int64_t>(tile_.group) * view.group +
                        static_cast<int64_t>(row_) * view.state + bytes_of(vector_step_));
  }
  __device__ __forceinline__ const char* items_of(const PromptArgs::Rows& rows) const {
    return rows.data + (tile_.batch * rows.batch +
                        static_cast<int64_t>(tile_.first_channel + item_.channel) * rows.channel +
                        bytes_of(item_.step));
  }
  __device__ __forceinline__ char* raw_vector(int pass) const {
    return shared_.raw_projections() + (pass * kWarpSize + lane_) * 16;
  }
  __device__ __forceinline__ char* raw_items(int scanner) const {
    return shared_.raw_rows() + scanner * S::raw_row_bytes(kSize) + lane_ * kItemBytes;
  }

  const PromptArgs& args_;
  const Tile& tile_;
  const Shared<S, Element>& shared_;
  const LaneItem<S> item_{};
  const int lane_;
  const int row_;
  const int vector_step_;
  // The lane's addresses, of state row_ or the tile's first warp.
  const char* B_;
  const char* C_;
  const char* u_;
  const char* delta_;
};

template <class Element, int kStates, int kGroups, Method kMethod>
__global__ void __launch_bounds__(Shape<kStates, kGroups>::kMostWarps* kWarpSize, 1)
    forward_kernel(const __grid_constant__ PromptArgs args) {
  if constexpr (!kHasAsyncCopies) return;
  using S = Shape<kStates, kGroups>;
  using Quad = Pack<float, kBlockSteps>;
  using RawQuad = Pack<Element, kBlockSteps>;
  constexpr int kSize = sizeof(Element);
  const int lane = threadIdx.x % kWarpSize;
  const int warp = uniform(threadIdx.x / kWarpSize);
  const int warps = blockDim.x / kWarpSize;
  const int group = blockIdx.y;
  const int offset = blockIdx.x * args.scanners * S::kChannels;
  const Tile tile{blockIdx.z, group, group * args.group_channels + offset,
                  args.group_channels - offset};
  const Shared<S, Element> shared(args.scanners);
  const Maker<S, Element, kMethod> maker(args, tile, shared);
  maker.start(0, warp, warps);

  // --- what is read once ---

  const bool is_scanner = warp < args.scanners;
  const LaneItem<S> item;
  const LaneRole role = lane_role(lane, S::kLaneBits);
  const int warp_channels = is_scanner ? tile.channels - warp * S::kChannels : 0;
  const int64_t first_channel = tile.first_channel + warp * S::kChannels;
  const int64_t item_channel = first_channel + item.channel;
  const int64_t channel = first_channel + role.channel;
  const bool item_exists = item.channel < warp_channels;
  const RawElement raw_D(args.D, item_channel * args.D.channel, item_exists);
  const RawElement raw_bias(args.delta_bias, item_channel * args.delta_bias.channel, item_exists);
  const auto state_at = [&](const ArrayView& view, int s) {
    return tile.batch * view.batch + channel * view.channel +
           (s * S::kLanes + role.part) * view.state;
  };
  bool has_state[kStates];
  float A[kStates] = {};
  float h[kStates] = {};
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    has_state[s] = role.channel < warp_channels && s * S::kLanes + role.part < args.dstate;
    if (!has_state[s]) continue;
    A[s] = static_cast<const float*>(args.A.data)[state_at(args.A, s)];
    if (args.initial_state.present()) {
      h[s] = static_cast<const float*>(args.initial_state.data)[state_at(args.initial_state, s)];
    }
  }
  const float D = raw_D.value(args.D.dtype);
  if (is_scanner && item.step == 0) {
    shared.biases(warp)[item.channel] = raw_bias.value(args.delta_bias.dtype);
  }
  using Constants = decltype(Formula<kMethod>::template constants<ScanMath>(float{}));
  Constants constants[kStates];
  const auto series = series_of<float>(args.method);
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    if constexpr (kGoesByIncrements<kMethod>) {
      A[s] = ScanMath::invertible(A[s]);
      h[s] = A[s] * h[s];
    }
    constants[s] = Formula<kMethod>::template constants<ScanMath>(A[s], series);
  }
  __syncthreads();
  maker.finish(0, 0, warp, warps);
  __syncthreads();

  // --- warps that make ---

  if (!is_scanner) {
    const int worker = warp - args.scanners;
    const int workers = warps - args.scanners;
    int buffer = 0;
    if (S::kSteps < args.seqlen) maker.start(S::kSteps, worker, workers);
#pragma unroll 1
    for (int next = S::kSteps; next < args.seqlen; next += S::kSteps) {
      buffer ^= 1;
      if (next > S::kSteps) meet(kFree + buffer, warps);
      maker.finish(next, buffer, worker, workers);
      arrive(kFull + buffer, warps);
      if (next + S::kSteps < args.seqlen) maker.start(next + S::kSteps, worker, workers);
    }
    return;
  }

  // --- warps that scan ---

  const auto bytes_of = [](int64_t steps) { return steps * kSize; };
  const auto address_in = [&](const PromptArgs::Rows& rows) {
    return rows.data +
           (tile.batch * rows.batch + item_channel * rows.channel + bytes_of(item.step));
  };
  int steps_left = args.seqlen;
  const auto steps_of = [&](int g) {  // that exist, of a vector
    return item_exists ? steps_left - g * S::kGroupSteps - item.step : 0;
  };
  const auto fetch = [&](const char* address, RawQuad(&raw)[kGroups]) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (steps_of(g) <= 0) continue;
      const char* const vector = address + bytes_of(g * S::kGroupSteps);
      raw[g] = load_pack<Element, kBlockSteps>(reinterpret_cast<const Element*>(vector));
    }
  };
  const bool has_gate = args.z.data != nullptr;
  const char* u_at = args.has_output ? address_in(args.u) : nullptr;
  const char* z_at = has_gate ? address_in(args.z) : nullptr;
  char* out_at = args.has_output ? address_in(args.out) : nullptr;
  float* const planes = shared.planes(warp);
  float* const y_row = planes + role.channel * S::kPlanes + role.part * S::kRow;
  const float* const item_planes = planes + item.channel * S::kPlanes + item.step;
  const int64_t saved_stride = static_cast<int64_t>(args.dim) * args.dstate;
  float* saved = args.states == nullptr
                     ? nullptr
                     : args.states + tile.batch * ((args.seqlen - 1) / kChunk) * saved_stride +
                           channel * args.dstate + role.part;

  /// kChunk steps of rows in shared memory.
  const auto scan = [&](const float* delta_row, const float* B_row, float* y_row) {
    const float* const input_row = delta_row + S::kChannels * S::kRow;
    const float* const C_row = B_row + kPaddedStates * S::kRow;
    Quad y;
#pragma unroll
    for (int t = 0; t < kChunk; t += kBlockSteps) {
      const auto delta = load_pack<float, kBlockSteps>(delta_row + t);
      const auto input = load_pack<float, kBlockSteps>(input_row + t);
      Quad B[kStates], C[kStates];
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        B[s] = load_pack<float, kBlockSteps>(B_row + s * S::kLanes * S::kRow + t);
        C[s] = load_pack<float, kBlockSteps>(C_row + s * S::kLanes * S::kRow + t);
      }
      // Behind the loads, which the compiler moves across no store.
      if (t > 0) store_pack(y_row + t - kBlockSteps, y);
#pragma unroll
      for (int j = 0; j < kBlockSteps; ++j) {
        float sum = 0;
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          h[s] = advance(step_of<kMethod, float>(delta.v[j], input.v[j], constants[s]), h[s],
                         B[s].v[j]);
          const float state = state_of<kMethod>(constants[s], h[s]);
          sum = s == 0 ? C[s].v[j] * state : fmaf(C[s].v[j], state, sum);
        }
        y.v[j] = sum;
      }
    }
    store_pack(y_row + kChunk - kBlockSteps, y);
  };

  int buffer = 0;
#pragma unroll 1
  while (true) {
    RawQuad u[kGroups]{}, z[kGroups]{};
    if (args.has_output) fetch(u_at, u);
    if (has_gate) fetch(z_at, z);
    const float* const delta_row = shared.rows(warp, buffer) + role.channel * S::kRow;
    const float* const B_row = shared.projections(buffer) + role.part * S::kRow;
#pragma unroll 1
    for (int first = 0; first < S::kSteps && first < steps_left; first += kChunk) {
      scan(delta_row + first, B_row + first, y_row + first);
      if (saved != nullptr && first + kChunk < steps_left) {
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          if (has_state[s]) saved[s * S::kLanes] = state_of<kMethod>(constants[s], h[s]);
        }
        saved += saved_stride;
      }
    }
    __syncwarp();

    if (args.has_output) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        Quad y = load_pack<float, kBlockSteps>(item_planes + g * S::kGroupSteps);
#pragma unroll
        for (int part = 1; part < S::kLanes; ++part) {
          const auto summand =
              load_pack<float, kBlockSteps>(item_planes + part * S::kRow + g * S::kGroupSteps);
#pragma unroll
          for (int i = 0; i < kBlockSteps; ++i) y.v[i] += summand.v[i];
        }
        const Quad this_u = to_values(u[g]);
#pragma unroll
        for (int i = 0; i < kBlockSteps; ++i) y.v[i] += D * this_u.v[i];
        if (has_gate) {
          const Quad this_z = to_values(z[g]);
#pragma unroll
          for (int i = 0; i < kBlockSteps; ++i) y.v[i] = gated<kSize>(y.v[i], this_z.v[i]);
        }
        RawQuad result;
#pragma unroll
        for (int i = 0; i < kBlockSteps; ++i) result.v[i] = from_real<Element>(y.v[i]);
        char* const vector = out_at + bytes_of(g * S::kGroupSteps);
        if (steps_of(g) > 0) store_pack(reinterpret_cast<Element*>(vector), result);
      }
      u_at += bytes_of(S::kSteps);
      out_at += bytes_of(S::kSteps);
    }
    if (has_gate) z_at += bytes_of(S::kSteps);
    steps_left -= S::kSteps;
    if (steps_left <= 0) break;
    if (steps_left > S::kSteps) arrive(kFree + buffer, warps);
    buffer ^= 1;
    meet(kFull + buffer, warps);
  }

  if (!args.last_state.present()) return;
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    if (!has_state[s]) continue;
    store_element(args.last_state.data, args.last_state.dtype, state_at(args.last_state, s),
                  state_of<kMethod>(constants[s], h[s]));
  }
}

template <class Element, int kStates, int kGroups, Method kMethod>
cudaError_t PromptForward<Element, kStates, kGroups, kMethod>::launch(const PromptArgs& args,
                                                                      const LaunchShape& shape,
                                                                      cudaStream_t stream) {
  return launch_kernel(forward_kernel<Element, kStates, kGroups, kMethod>, shape, stream, args);
}

}  // namespace selective_scan::cuda::prompt
