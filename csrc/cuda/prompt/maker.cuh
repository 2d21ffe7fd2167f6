// The warps of the prompt kernels that prepare the scan's input.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "../kit/step_math.cuh"
#include "block.cuh"
#include "pieces.cuh"

namespace selective_scan::cuda::prompt {

/// Brings a chunk's input to shared memory. Each of `workers` warps does a share of the work, and
/// finishes what it has started itself.
template <class S, class Element, Along kAlong>
class Maker {
 public:
  __device__ __forceinline__ Maker(const PromptArgs& args, const Tile& tile,
                                   const Shared<S, Element, kAlong>& shared)
      : args_(args),
        tile_(tile),
        shared_(shared),
        lane_(threadIdx.x % kWarpSize),
        B_(vectors_of(args.B)),
        C_(vectors_of(args.C)),
        u_(tile_of(args.u)),
        delta_(tile_of(args.delta)) {}

  /// Starts the copies. Input that does not exist becomes zero.
  __device__ __forceinline__ void start(int first_step, int worker, int workers) const {
    const int steps = args_.seqlen - first_step;  // remaining steps
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

  /// Converts what start() has copied to the scan's input. All of delta_bias must be in shared
  /// memory.
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
        make_steps_by_series<kSize>(delta, args_.delta_softplus);
        const int steps = args_.seqlen - first_step - p * Pieces::kPieceSteps - pieces.step;
#pragma unroll
        for (int i = 0; i < Pieces::kLength; ++i) {
          // A missing step leaves the states unchanged.
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
  static constexpr int kVectorBytes = Vectors::kLength * kSize;
  static constexpr int kRawC = Vectors::kPasses * kWarpSize * kVectorBytes;

  /// Starts to copy kCount elements, of which the first `count` exist.
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
    return shared_.raw_projections() + (pass * kWarpSize + lane_) * kVectorBytes;
  }
  __device__ __forceinline__ char* raw_pieces(int share) const {
    return shared_.raw_rows() + share * S::raw_row_bytes(kSize) + lane_ * kPieceBytes;
  }

  const PromptArgs& args_;
  const Tile& tile_;
  const Shared<S, Element, kAlong>& shared_;
  const Vectors vectors_{};
  const int lane_;
  // Addresses in the first chunk: the lane's vectors of B and C, the tile's first channel of u and
  // delta.
  const char* B_;
  const char* C_;
  const char* u_;
  const char* delta_;
};

}  // namespace selective_scan::cuda::prompt
