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
// up, gated and stored, lanes lie along steps. Arrays are dense along steps or along channels, B
// and C along steps or states: see pieces.cuh for what a lane moves of either.
//
// Shared memory: raw B and C, two chunks of B and C in fp32, raw u and delta, then for each
// scanning warp two chunks of rows, planes, and its channels' delta_bias and D: see Shape.
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
#include "pieces.cuh"

namespace selective_scan::cuda::prompt {

/// The barriers of the first buffer, in front of those of the second: makers have filled it for
/// scanners, or scanners have left it to makers.
constexpr int kFull = 1;
constexpr int kFree = 3;
/// All scanners have added up y of a chunk.
constexpr int kSummed = 5;

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
  __device__ float* skips(int scanner) const { return biases(scanner) + S::kBiases; }
  __device__ char* raw_rows() const { return reinterpret_cast<char*>(planes(scanners)); }
};

/// Brings a chunk's input to shared memory. `worker` of `workers` warps share that; what one has
/// started it also finishes.
template <class S, class Element, Along kAlong>
class Maker {
 public:
  __device__ __forceinline__ Maker(const PromptArgs& args, const Tile& tile,
                                   const Shared<S, Element>& shared)
      : args_(args),
        tile_(tile),
        shared_(shared),
        lane_(threadIdx.x % kWarpSize),
        B_(vectors_of(args.B)),
        C_(vectors_of(args.C)),
        u_(tile_of(args.u)),
        delta_(tile_of(args.delta)) {}

  /// Starts copies; what does not exist becomes zero.
  __device__ __forceinline__ void start(int first_step, int worker, int workers) const {
    const int steps = args_.seqlen - first_step;  // that are left
    const char* const B = B_ + bytes(args_.B.row, 0, first_step);
    const char* const C = C_ + bytes(args_.C.row, 0, first_step);
#pragma unroll 1
    for (int pass = worker; pass < Vectors::kPasses; pass += workers) {
      const int row = pass * Vectors::kPassRows;
      const int rows = Vectors::kAlongSteps ? args_.dstate : steps;
      const int places = Vectors::kAlongSteps ? steps : args_.dstate;
      const int count = row + vectors_.row < rows ? places - vectors_.place : 0;
      char* const target = raw_vector(pass);
      copy<Vectors::kLength>(target, B + static_cast<int64_t>(row) * args_.B.row, count);
      copy<Vectors::kLength>(target + kRawC, C + static_cast<int64_t>(row) * args_.C.row, count);
    }
#pragma unroll 1
    for (int share = worker; share < shared_.scanners; share += workers) {
      const Pieces pieces(share, shared_.scanners);
      const int channel = pieces.scanner * S::kChannels + pieces.channel;
      const int piece_steps = channel < tile_.channels ? steps - pieces.step : 0;
      const char* const u = u_ + bytes(args_.u.row, channel, first_step + pieces.step);
      const char* const delta = delta_ + bytes(args_.delta.row, channel, first_step + pieces.step);
      char* const target = raw_pieces(share);
#pragma unroll
      for (int p = 0; p < Pieces::kPieces; ++p) {
        const int step = p * Pieces::kPieceSteps;
        copy<Pieces::kLength>(target + p * kRawPiece, u + bytes(args_.u.row, 0, step),
                              piece_steps - step);
        copy<Pieces::kLength>(target + kRawDelta + p * kRawPiece,
                              delta + bytes(args_.delta.row, 0, step), piece_steps - step);
      }
    }
    __pipeline_commit();
  }

  /// Makes of what start() has brought what the scan reads. All delta_bias must be there.
  __device__ __forceinline__ void finish(int first_step, int buffer, int worker,
                                         int workers) const {
    __pipeline_wait_prior(0);
#pragma unroll 1
    for (int pass = worker; pass < Vectors::kPasses; pass += workers) {
      const Element* const raw = reinterpret_cast<const Element*>(raw_vector(pass));
      float* const target = shared_.projections(buffer) + vectors_.state() * S::kRow +
                            vectors_.step() +
                            pass * Vectors::kPassRows * (Vectors::kAlongSteps ? S::kRow : 1);
      store_piece<kAlong, S::kRow>(target, to_values(load_pack<Element, Vectors::kLength>(raw)));
      store_piece<kAlong, S::kRow>(
          target + kPaddedStates * S::kRow,
          to_values(load_pack<Element, Vectors::kLength>(raw + kRawC / kSize)));
    }
#pragma unroll 1
    for (int share = worker; share < shared_.scanners; share += workers) {
      const Pieces pieces(share, shared_.scanners);
      float* const rows =
          shared_.rows(pieces.scanner, buffer) + pieces.channel * S::kRow + pieces.step;
      const float* const biases = shared_.biases(pieces.scanner);
      const Element* const raw = reinterpret_cast<const Element*>(raw_pieces(share));
#pragma unroll
      for (int p = 0; p < Pieces::kPieces; ++p) {
        auto input = to_values(load_pack<Element, Pieces::kLength>(raw + p * kRawPiece / kSize));
        auto delta = to_values(
            load_pack<Element, Pieces::kLength>(raw + (kRawDelta + p * kRawPiece) / kSize));
#pragma unroll
        for (int i = 0; i < Pieces::kLength; ++i) delta.v[i] += biases[pieces.channel_of(i)];
        make_steps<kSize>(delta, args_.delta_softplus);
        const int steps = args_.seqlen - first_step - p * Pieces::kPieceSteps - pieces.step;
#pragma unroll
        for (int i = 0; i < Pieces::kLength; ++i) {
          // A step that does not exist leaves states be.
          if ((kAlong == Along::kElements ? i : 0) >= steps) delta.v[i] = 0;
          input.v[i] *= delta.v[i];
        }
        float* const target = rows + p * Pieces::kPieceSteps;
        store_piece<kAlong, S::kRow>(target, delta);
        store_piece<kAlong, S::kRow>(target + S::kChannels * S::kRow, input);
      }
    }
  }

 private:
  static constexpr int kSize = sizeof(Element);
  using Pieces = LanePieces<S, kAlong>;
  using Vectors = LaneVectors<S, kAlong, kSize>;
  static constexpr int kPieceBytes = Pieces::kLength * kSize;
  static constexpr int kRawPiece = kWarpSize * kPieceBytes;
  static constexpr int kRawDelta = Pieces::kPieces * kRawPiece;
  static constexpr int kRawC = Vectors::kPasses * kWarpSize * 16;

  /// Starts to copy kCount elements, of which `count` exist.
  template <int kCount>
  __device__ __forceinline__ void copy(char* target, const char* source, int count) const {
    if constexpr (kAlong == Along::kElements) {
      Pack<Element, kCount> piece{};
      fetch_piece<kAlong>(source, count, piece);
      store_pack(reinterpret_cast<Element*>(target), piece);
    } else {
      constexpr int kBytes = kCount * kSize;
      __pipeline_memcpy_async(target, source, kBytes, count > 0 ? 0 : kBytes);
    }
  }
  __device__ __forceinline__ static int64_t bytes(int row, int64_t channel, int64_t step) {
    return bytes_to<kAlong, kSize>(row, channel, step);
  }
  __device__ __forceinline__ const char* vectors_of(const PromptArgs::Projection& view) const {
    return view.data + (tile_.batch * view.batch + static_cast<int64_t>(tile_.group) * view.group +
                        bytes(view.row, vectors_.state(), vectors_.step()));
  }
  __device__ __forceinline__ const char* tile_of(const PromptArgs::Rows& rows) const {
    return rows.data + (tile_.batch * rows.batch + bytes(rows.row, tile_.first_channel, 0));
  }
  __device__ __forceinline__ char* raw_vector(int pass) const {
    return shared_.raw_projections() + (pass * kWarpSize + lane_) * 16;
  }
  __device__ __forceinline__ char* raw_pieces(int share) const {
    return shared_.raw_rows() + share * S::raw_row_bytes(kSize) + lane_ * kPieceBytes;
  }

  const PromptArgs& args_;
  const Tile& tile_;
  const Shared<S, Element>& shared_;
  const Vectors vectors_{};
  const int lane_;
  // These lie in the first chunk: the lane's vectors, and the tile's first channel.
  const char* B_;
  const char* C_;
  const char* u_;
  const char* delta_;
};

template <class Element, int kStates, int kGroups, Along kAlong>
__global__ void __launch_bounds__(Shape<kStates, kGroups>::kMostWarps* kWarpSize, 1)
    forward_kernel(const __grid_constant__ PromptArgs args) {
  if constexpr (!kHasAsyncCopies) return;
  using S = Shape<kStates, kGroups>;
  using Quad = Pack<float, kBlockSteps>;
  using Pieces = LanePieces<S, kAlong>;
  using Piece = Pack<float, Pieces::kLength>;
  using RawPiece = Pack<Element, Pieces::kLength>;
  constexpr int kSize = sizeof(Element);
  const int lane = threadIdx.x % kWarpSize;
  const int warp = uniform(threadIdx.x / kWarpSize);
  const int warps = blockDim.x / kWarpSize;
  const int group = blockIdx.y;
  const int offset = blockIdx.x * args.scanners * S::kChannels;
  const Tile tile{blockIdx.z, group, group * args.group_channels + offset,
                  args.group_channels - offset};
  const Shared<S, Element> shared(args.scanners);
  const Maker<S, Element, kAlong> maker(args, tile, shared);
  maker.start(0, warp, warps);

  // --- what is read once ---

  const bool is_scanner = warp < args.scanners;
  const LaneRole role = lane_role(lane, S::kLaneBits);
  const int warp_channels = is_scanner ? tile.channels - warp * S::kChannels : 0;
  const int64_t first_channel = tile.first_channel + warp * S::kChannels;
  const int64_t channel = first_channel + role.channel;
  const bool has_channel = lane < S::kChannels && lane < warp_channels;
  const RawElement raw_D(args.D, (first_channel + lane) * args.D.channel, has_channel);
  const RawElement raw_bias(args.delta_bias, (first_channel + lane) * args.delta_bias.channel,
                            has_channel);
  const auto state_at = [&](const ArrayView& view, int s) {
    return tile.batch * view.batch + channel * view.channel +
           (s * S::kLanes + role.part) * view.state;
  };
  bool has_state[kStates];
  float rate[kStates] = {};
  float h[kStates] = {};
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    has_state[s] = role.channel < warp_channels && s * S::kLanes + role.part < args.dstate;
    if (!has_state[s]) continue;
    rate[s] = static_cast<const float*>(args.A.data)[state_at(args.A, s)];
    if (args.initial_state.present()) {
      h[s] = static_cast<const float*>(args.initial_state.data)[state_at(args.initial_state, s)];
    }
  }
  if (is_scanner && lane < S::kChannels) {
    shared.biases(warp)[lane] = raw_bias.value(args.delta_bias.dtype);
    shared.skips(warp)[lane] = raw_D.value(args.D.dtype);
  }
#pragma unroll
  for (float& value : rate) value = ScanMath::rate(value);
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

  const Pieces pieces(warp, args.scanners);
  const int piece_channel = pieces.scanner * S::kChannels + pieces.channel;  // of the tile
  const auto address_in = [&](const PromptArgs::Rows& rows) {
    return rows.data +
           (tile.batch * rows.batch +
            bytes_to<kAlong, kSize>(rows.row, tile.first_channel + piece_channel, pieces.step));
  };
  const auto bytes_of = [](const PromptArgs::Rows& rows, int steps) {
    return bytes_to<kAlong, kSize>(rows.row, 0, steps);
  };
  int steps_left = args.seqlen;
  /// How many steps there are of a piece, if positive.
  const auto count_of = [&](int p) {
    const int steps = steps_left - p * Pieces::kPieceSteps - pieces.step;
    return piece_channel < tile.channels ? steps : 0;
  };
  const auto fetch = [&](const PromptArgs::Rows& rows, const char* address,
                         RawPiece(&raw)[Pieces::kPieces]) {
#pragma unroll
    for (int p = 0; p < Pieces::kPieces; ++p) {
      fetch_piece<kAlong>(address + bytes_of(rows, p * Pieces::kPieceSteps), count_of(p), raw[p]);
    }
  };
  Piece D;
#pragma unroll
  for (int i = 0; i < Pieces::kLength; ++i)
    D.v[i] = shared.skips(pieces.scanner)[pieces.channel_of(i)];
  const bool has_gate = args.z.data != nullptr;
  const char* u_at = args.has_output ? address_in(args.u) : nullptr;
  const char* z_at = has_gate ? address_in(args.z) : nullptr;
  char* out_at = args.has_output ? address_in(args.out) : nullptr;
  float* const planes = shared.planes(warp);
  float* const y_row = planes + role.channel * S::kPlanes + role.part * S::kRow;
  // What the lane adds up lies along steps of the warp's own channels, whatever it moves.
  const LanePieces<S, Along::kSteps> sums(warp, args.scanners);
  float* const sum_planes = planes + sums.channel * S::kPlanes + sums.step;
  const float* const piece_planes =
      shared.planes(pieces.scanner) + pieces.channel * S::kPlanes + pieces.step;
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
          h[s] = fmaf(ScanMath::exp_at(delta.v[j], rate[s]), h[s], input.v[j] * B[s].v[j]);
          sum = s == 0 ? C[s].v[j] * h[s] : fmaf(C[s].v[j], h[s], sum);
        }
        y.v[j] = sum;
      }
    }
    store_pack(y_row + kChunk - kBlockSteps, y);
  };

  int buffer = 0;
#pragma unroll 1
  while (true) {
    RawPiece u[Pieces::kPieces]{}, z[Pieces::kPieces]{};
    if (args.has_output) fetch(args.u, u_at, u);
    if (has_gate) fetch(args.z, z_at, z);
    const float* const delta_row = shared.rows(warp, buffer) + role.channel * S::kRow;
    const float* const B_row = shared.projections(buffer) + role.part * S::kRow;
#pragma unroll 1
    for (int first = 0; first < S::kSteps && first < steps_left; first += kChunk) {
      scan(delta_row + first, B_row + first, y_row + first);
      if (saved != nullptr && first + kChunk < steps_left) {
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          if (has_state[s]) saved[s * S::kLanes] = h[s];
        }
        saved += saved_stride;
      }
    }
    __syncwarp();

    if (args.has_output) {
      Quad y[kGroups];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        y[g] = load_pack<float, kBlockSteps>(sum_planes + g * S::kGroupSteps);
#pragma unroll
        for (int part = 1; part < S::kLanes; ++part) {
          const auto summand =
              load_pack<float, kBlockSteps>(sum_planes + part * S::kRow + g * S::kGroupSteps);
#pragma unroll
          for (int i = 0; i < kBlockSteps; ++i) y[g].v[i] += summand.v[i];
        }
        if constexpr (kAlong == Along::kChannels) store_pack(sum_planes + g * S::kGroupSteps, y[g]);
      }
      if constexpr (kAlong == Along::kChannels) meet(kSummed, args.scanners);
#pragma unroll
      for (int p = 0; p < Pieces::kPieces; ++p) {
        Piece y_piece;
        if constexpr (is_along_steps(kAlong)) {
          y_piece = y[p];
        } else {
          y_piece = load_piece<kAlong, S::kPlanes, Pieces::kLength>(piece_planes +
                                                                    p * Pieces::kPieceSteps);
        }
        const Piece this_u = to_values(u[p]);
#pragma unroll
        for (int i = 0; i < Pieces::kLength; ++i) y_piece.v[i] += D.v[i] * this_u.v[i];
        if (has_gate) {
          const Piece this_z = to_values(z[p]);
#pragma unroll
          for (int i = 0; i < Pieces::kLength; ++i)
            y_piece.v[i] = gated<kSize>(y_piece.v[i], this_z.v[i]);
        }
        RawPiece result;
#pragma unroll
        for (int i = 0; i < Pieces::kLength; ++i) result.v[i] = from_real<Element>(y_piece.v[i]);
        write_piece<kAlong>(out_at + bytes_of(args.out, p * Pieces::kPieceSteps), count_of(p),
                            result);
      }
      u_at += bytes_of(args.u, S::kSteps);
      out_at += bytes_of(args.out, S::kSteps);
    }
    if (has_gate) z_at += bytes_of(args.z, S::kSteps);
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
    store_element(args.last_state.data, args.last_state.dtype, state_at(args.last_state, s), h[s]);
  }
}

template <class Element, int kStates, int kGroups, Along kAlong>
cudaError_t PromptForward<Element, kStates, kGroups, kAlong>::launch(const PromptArgs& args,
                                                                     const LaunchShape& shape,
                                                                     cudaStream_t stream) {
  return launch_kernel(forward_kernel<Element, kStates, kGroups, kAlong>, shape, stream, args);
}

}  // namespace selective_scan::cuda::prompt
