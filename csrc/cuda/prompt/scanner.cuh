// The warps of the prompt kernels that scan.
#pragma once

#include <type_traits>

#include "../../core/dtype.h"
#include "../kit/step_math.cuh"
#include "block.cuh"
#include "pieces.cuh"

namespace selective_scan::cuda::prompt {

/// A lane's states of its channel, and their poles in the form that ScanMath takes.
template <int kStates>
struct LaneStates {
  bool exist[kStates];
  float rate[kStates];
  float h[kStates];
};

/// Scans a warp's channels through all of time, half a chunk at once. Lanes write their parts of y
/// to planes; while they scan a half, they sum the parts of the half before. A chunk's output is
/// therefore stored after the first half of the next chunk. If warps store one another's output, it
/// is stored at the chunk's end instead, because the warps meet there anyway.
template <class S, class Element, Along kAlong>
class Scanner {
 public:
  __device__ __forceinline__ Scanner(const PromptArgs& args, const Tile& tile,
                                     const Shared<S, Element, kAlong>& shared, int warp,
                                     LaneStates<S::kStates>& states)
      : args_(args),
        tile_(tile),
        shared_(shared),
        warp_(warp),
        states_(states),
        pieces_(warp, args.scanners),
        has_gate_(args.z.data != nullptr),
        steps_left_(args.seqlen) {
    const LaneRole role = lane_role(threadIdx.x % kWarpSize, S::kLaneBits);
    lane_rows_ = role.channel * S::kRow;
    lane_projections_ = role.part * S::kRow;
    point_to(0);
    float* const planes = shared.planes(warp);
    parts_ = planes + role.channel * S::kPlanes + role.part * S::kRow;
    sum_parts_ =
        planes + sums_.channel * S::kPlanes + sums_.share * kBlocksPerChunk * S::kRow + sums_.step;
#pragma unroll
    for (int i = 0; i < Pieces::kLength; ++i) {
      D_.v[i] = shared.skips(pieces_.scanner)[pieces_.channel_of(i)];
    }
    if (args.has_output) {
      u_at_ = address_in(args.u);
      out_at_ = address_in(args.out);
    }
    if (has_gate_) z_at_ = address_in(args.z);
    if (args.states != nullptr) {
      const int64_t channel = tile.first_channel + warp * S::kChannels + role.channel;
      saved_ = args.states + tile.batch * ((args.seqlen - 1) / kChunk) * saved_stride() +
               channel * args.dstate + role.part;
    }
  }

  /// Scans all steps; makers must have filled the first buffer. While a block of steps is scanned,
  /// the next block is computed from its rows, and the rows of the block after that are loaded.
  __device__ __forceinline__ void run(int warps) {
    Rows rows[2] = {load_rows(0), load_rows(kBlockSteps)};
    Block blocks[2] = {make_block(rows[0])};
    int buffer = 0;
    int half = 0;  // the half that was scanned last
#pragma unroll 1
    while (true) {
      Quad sum;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        constexpr int kAhead = 2;
        if (block == kBlocksPerChunk) {
          half = 0;
          finish_half(0, sum);
          if (kIsAlongSteps && steps_left_ < args_.seqlen) finish(steps_left_ + S::kSteps);
          fetch();
          if (steps_left_ <= kChunk) break;
          half = 1;
        }
        if (block == kBlocks - kAhead && steps_left_ > S::kSteps) {
          if (steps_left_ > 2 * S::kSteps) arrive(kFree + buffer, warps);
          buffer ^= 1;
          meet(kFull + buffer, warps);
          point_to(buffer);
        }
        // Loads come before the store, because the compiler moves no load across it.
        rows[block % 2] = load_rows((block + kAhead) % kBlocks * kBlockSteps);
        if (block >= kBlocksPerChunk) {
          add_part(0, block - kBlocksPerChunk, sum);
        } else if (kIsAlongSteps) {
          add_part(1, block, sum);
        }
        blocks[(block + 1) % 2] = make_block(rows[(block + 1) % 2]);
        store_pack(parts_ + block * kBlockSteps, scan(blocks[block % 2]));
      }
      if (half == 0) break;
      finish_half(1, sum);
      if (steps_left_ <= S::kSteps) break;
      if (!kIsAlongSteps) finish_last_half(1);
      steps_left_ -= S::kSteps;
    }
    // Other warps may still read the sums of the previous chunk.
    if constexpr (!kIsAlongSteps) meet_scanners();
    finish_last_half(half);
  }

 private:
  static constexpr int kSize = sizeof(Element);
  static constexpr int kStates = S::kStates;
  static constexpr bool kIsAlongSteps = is_along_steps(kAlong);
  static constexpr int kBlocks = S::kSteps / kBlockSteps;
  using Quad = Pack<float, kBlockSteps>;
  using Pieces = LanePieces<S, kAlong>;
  using Piece = Pack<float, Pieces::kLength>;
  using Elements = Pack<Element, Pieces::kLength>;
  // Words of elements: separating the elements at once would wait for the load.
  using RawPiece = std::conditional_t<kAlong == Along::kElements, Elements,
                                      Pack<uint32_t, sizeof(Elements) / sizeof(uint32_t)>>;

  // The lanes of a channel sum y of a half chunk. kSumLanes lanes have the same four steps, each
  // with a share of the parts. A share has one part for each block of the half that is scanned
  // meanwhile.
  static constexpr int kSumLanes = S::kLanes / kBlocksPerChunk;
  static_assert(kSumLanes * kBlocksPerChunk == S::kLanes);
  struct LaneSums {
    int channel = threadIdx.x % kWarpSize / S::kLanes;
    int share = threadIdx.x % S::kLanes / kBlocksPerChunk;
    int step = threadIdx.x % kBlocksPerChunk * kBlockSteps;
  };

  /// Four steps of rows in shared memory.
  struct Rows {
    Quad delta, input, B[kStates], C[kStates];
  };
  /// The inputs of a block's scan: h becomes a·h + b, and C·h is the lane's part of y.
  struct Block {
    Quad a[kStates], b[kStates], C[kStates];
  };

  __device__ __forceinline__ void point_to(int buffer) {
    delta_row_ = shared_.rows(warp_, buffer) + lane_rows_;
    B_row_ = shared_.projections(buffer) + lane_projections_;
  }
  __device__ __forceinline__ Rows load_rows(int step) const {
    Rows rows;
    rows.delta = load_pack<float, kBlockSteps>(delta_row_ + step);
    rows.input = load_pack<float, kBlockSteps>(delta_row_ + S::kChannels * S::kRow + step);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const float* const B = B_row_ + s * S::kLanes * S::kRow + step;
      rows.B[s] = load_pack<float, kBlockSteps>(B);
      rows.C[s] = load_pack<float, kBlockSteps>(B + kPaddedStates * S::kRow);
    }
    return rows;
  }
  __device__ __forceinline__ Block make_block(const Rows& rows) const {
    Block block;
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
#pragma unroll
      for (int j = 0; j < kBlockSteps; ++j) {
        block.a[s].v[j] = ScanMath::exp_at(rows.delta.v[j], states_.rate[s]);
        block.b[s].v[j] = rows.input.v[j] * rows.B[s].v[j];
      }
      block.C[s] = rows.C[s];
    }
    return block;
  }
  __device__ __forceinline__ Quad scan(const Block& block) {
    Quad y;
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        float& h = states_.h[s];
        h = fmaf(block.a[s].v[j], h, block.b[s].v[j]);
        y.v[j] = s == 0 ? block.C[s].v[j] * h : fmaf(block.C[s].v[j], h, y.v[j]);
      }
    }
    return y;
  }

  __device__ __forceinline__ void add_part(int half, int part, Quad& sum) const {
    const auto summand = load_pack<float, kBlockSteps>(sum_parts_ + half * kChunk + part * S::kRow);
#pragma unroll
    for (int i = 0; i < kBlockSteps; ++i) {
      sum.v[i] = part == 0 ? summand.v[i] : sum.v[i] + summand.v[i];
    }
  }
  /// Keeps y of the half's steps that the lane moves if rows lie along steps.
  __device__ __forceinline__ void keep_sum(int half, Quad sum) {
    if constexpr (kSumLanes == 1) {
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        if (g == half) y_[g] = sum;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kBlockSteps; ++i) {
        sum.v[i] += __shfl_xor_sync(kFullMask, sum.v[i], kBlocksPerChunk);
        if (sums_.share == half) y_[0].v[i] = sum.v[i];
      }
    }
  }
  /// Ends the scan of a half. `sum` is y of the other half, if that was summed.
  __device__ __forceinline__ void finish_half(int half, const Quad& sum) {
    if (kIsAlongSteps || half == 1) keep_sum(1 - half, sum);
    if (saved_ != nullptr && (half + 1) * kChunk < steps_left_) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        if (states_.exist[s]) saved_[s * S::kLanes] = states_.h[s];
      }
      saved_ += saved_stride();
    }
    __syncwarp();
  }

  /// Sums y of the half that was scanned last, and stores its chunk's output.
  __device__ __forceinline__ void finish_last_half(int half) {
    Quad sum;
#pragma unroll
    for (int part = 0; part < kBlocksPerChunk; ++part) add_part(half, part, sum);
    keep_sum(half, sum);
    finish(steps_left_);
  }
  /// Stores the output of a chunk; `left` steps were left before it was scanned.
  __device__ __forceinline__ void finish(int left) {
    if (!args_.has_output) return;
    if constexpr (!kIsAlongSteps) {
      // Lanes move other channels than those whose y they have summed.
      float* const row = shared_.sums(warp_) + sums_.channel * S::kRow + sums_.step;
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        store_pack(row + (kSumLanes == 1 ? g : sums_.share) * kChunk, y_[g]);
      }
      meet_scanners();
    }
#pragma unroll
    for (int p = 0; p < Pieces::kPieces; ++p) {
      Piece y;
      if constexpr (kIsAlongSteps) {
        y = y_[p];
      } else {
        y = load_piece<kAlong, S::kRow, Pieces::kLength>(shared_.sums(pieces_.scanner) +
                                                         pieces_.step + p * Pieces::kPieceSteps);
      }
      const Piece u = to_values(bit_cast<Elements>(u_[p]));
#pragma unroll
      for (int i = 0; i < Pieces::kLength; ++i) y.v[i] += D_.v[i] * u.v[i];
      if (has_gate_) {
        const Piece z = to_values(bit_cast<Elements>(z_[p]));
#pragma unroll
        for (int i = 0; i < Pieces::kLength; ++i) y.v[i] = gated<kSize>(y.v[i], z.v[i]);
      }
      Elements result;
#pragma unroll
      for (int i = 0; i < Pieces::kLength; ++i) result.v[i] = to_element<Element>(y.v[i]);
      write_piece<kAlong>(out_at_ + bytes_of(args_.out, p * Pieces::kPieceSteps), count_of(p, left),
                          result);
    }
    out_at_ += bytes_of(args_.out, S::kSteps);
  }

  /// Uses an mbarrier, because racecheck loses track of kFull if some of that barrier's warps meet
  /// at another named barrier.
  __device__ __forceinline__ void meet_scanners() {
    const SharedBarrier summed(shared_.summed());
    summed.signal();
    summed.wait(sum_parity_);
    sum_parity_ ^= 1;
  }

  __device__ __forceinline__ int64_t saved_stride() const {
    return static_cast<int64_t>(args_.dim) * args_.dstate;
  }
  __device__ __forceinline__ int piece_channel() const {  // in the tile
    return pieces_.scanner * S::kChannels + pieces_.channel;
  }
  __device__ __forceinline__ char* address_in(const PromptArgs::Rows& rows) const {
    const int64_t channel = tile_.first_channel + piece_channel();
    return rows.data +
           (tile_.batch * rows.batch + bytes_to<kAlong, kSize>(rows.row, channel, pieces_.step));
  }
  __device__ __forceinline__ static int64_t bytes_of(const PromptArgs::Rows& rows, int steps) {
    return bytes_to<kAlong, kSize>(rows.row, 0, steps);
  }
  /// Returns how many steps exist from a piece's first one on; not positive if none do.
  __device__ __forceinline__ int count_of(int p, int left) const {
    const int steps = left - p * Pieces::kPieceSteps - pieces_.step;
    return piece_channel() < tile_.channels ? steps : 0;
  }
  __device__ __forceinline__ void fetch(const PromptArgs::Rows& rows, const char*& address,
                                        RawPiece (&raw)[Pieces::kPieces]) const {
#pragma unroll
    for (int p = 0; p < Pieces::kPieces; ++p) {
      fetch_piece<kAlong>(address + bytes_of(rows, p * Pieces::kPieceSteps),
                          count_of(p, steps_left_), raw[p]);
    }
    address += bytes_of(rows, S::kSteps);
  }
  /// Starts to load the chunk's u and z.
  __device__ __forceinline__ void fetch() {
    if (!args_.has_output) return;
    fetch(args_.u, u_at_, u_);
    if (has_gate_) fetch(args_.z, z_at_, z_);
  }

  const PromptArgs& args_;
  const Tile& tile_;
  const Shared<S, Element, kAlong>& shared_;
  const int warp_;
  LaneStates<kStates>& states_;
  const Pieces pieces_;  // the pieces that the lane moves
  const LaneSums sums_{};
  const bool has_gate_;
  int steps_left_;        // from the chunk's first step on
  int lane_rows_;         // offset in floats of the lane's rows from the warp's
  int lane_projections_;  // offset in floats of the lane's first row of B
  const float* delta_row_;
  const float* B_row_;
  float* parts_;
  const float* sum_parts_;
  Piece D_;
  const char* u_at_ = nullptr;
  const char* z_at_ = nullptr;
  char* out_at_ = nullptr;
  float* saved_ = nullptr;
  int sum_parity_ = 0;
  RawPiece u_[Pieces::kPieces]{};
  RawPiece z_[Pieces::kPieces]{};
  Quad y_[S::kGroups];
};

}  // namespace selective_scan::cuda::prompt
