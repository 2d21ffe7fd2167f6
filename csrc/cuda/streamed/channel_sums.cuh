// The sums of dB and dC over channels: by the tensor cores within a warp, and through shared memory
// over the block's warps.
//
// A lane's four products of a step (its states' contributions to dB or dC) are the A operand of one
// m16n8k8 mma, whose k runs over the two lowest lane bits: up to four channels. The B operand is a
// constant that selects: column n of the result gets the sums of one step and of one pair of the
// four products, so one accumulator takes four steps. Lane (g, tig) = (lane / 4, lane % 4) then
// holds columns 2·tig and 2·tig + 1 of rows g and g + 8.
//
// For bfloat16 gradients, the B operand instead holds the weights, Δ·u or dy, and the A operand the
// states to be weighted, which saves their products. Then k is the channel and one of two steps,
// and the rows are the lane's states, two of them in each of two mma. Column n has the weights of
// step n / 2. With four channels, these are the weights of dB if n is even and of dC if n is odd.
// With eight channels, dB and dC are summed separately, and column n has the weights of the lanes
// whose bit 2 is n % 2. A lane only provides the weights of its own column. With eight channels,
// half of the results are therefore unused: those whose row and column differ in that bit.
//
// mma reads tf32: it cuts what it multiplies to 11 bits. This is enough for bfloat16 gradients, in
// which the mean loss is corrected. For fp32 and float16 gradients, the part cut off of the
// products goes through a second mma, which leaves an error of 2^-22.
//
// With eight channels, bit 2 of the lane, the third bit of the channel, says whether the lane keeps
// dB or dC. The lane gets the other half of its sum from the lane that differs in this bit: one
// shuffle adds both kinds. A warp's sums then take half the memory, so that there are twice as many
// slots for them.
//
// A warp stores its sums of a step group in one of these slots. Warps take turns at adding the sums
// of all warps, in the order of the warps, and writing them to the tile's partial sums in global
// memory. They do so only when half of the slots are filled. A warp thus seldom waits for slower
// warps to fill the slot that it adds up, or for other warps to add up the slot that it fills. The
// further apart warps may be, the less often all of them are in a phase that leaves the
// multiprocessor idle, such as filling rows. Every lane arrives at the slots' barriers by itself:
// this is as fast as one arrival per warp, and tools that look for races can follow it.
#pragma once

#include <cstddef>

#include "../kit/barriers.cuh"
#include "../kit/elements.cuh"
#include "../kit/states.cuh"
#include "backward_shape.h"

namespace selective_scan::cuda::streamed {

/// Computes D += A·B. No operand is rounded: mma ignores the low bits.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(bit_cast<uint32_t>(a[0])), "r"(bit_cast<uint32_t>(a[1])), "r"(bit_cast<uint32_t>(a[2])),
        "r"(bit_cast<uint32_t>(a[3])), "r"(bit_cast<uint32_t>(b0)), "r"(bit_cast<uint32_t>(b1)));
}

/// Returns the part of x that mma reads.
__device__ __forceinline__ float tf32_part(float x) {
  return bit_cast<float>(bit_cast<uint32_t>(x) & 0xffffe000u);
}

/// Adds to 16 bytes in global memory, without waiting for their previous values.
__device__ __forceinline__ void add_to_global(float* target, const Pack<float, 4>& values) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target),
               "f"(values.v[0]), "f"(values.v[1]), "f"(values.v[2]), "f"(values.v[3]));
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(target + i, values.v[i]);
#endif
}
template <bool kIsAdded>
__device__ __forceinline__ void store_or_add(float* target, const Pack<float, 4>& values,
                                             std::bool_constant<kIsAdded>) {
  if constexpr (kIsAdded) {
    add_to_global(target, values);
  } else {
    store_pack(target, values);
  }
}
/// Stores or adds. From Hopper on there is no branch, past which the compiler would move no other
/// instructions.
__device__ __forceinline__ void store_or_add(float* target, const Pack<float, 4>& values,
                                             bool is_added) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred is_added;\n"
      "setp.ne.s32 is_added, %5, 0;\n"
      "@!is_added st.global.v4.f32 [%0], {%1, %2, %3, %4};\n"
      "@is_added red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(target),
      "f"(values.v[0]), "f"(values.v[1]), "f"(values.v[2]), "f"(values.v[3]),
      "r"(static_cast<int>(is_added)));
#else
  if (is_added) {
    add_to_global(target, values);
  } else {
    store_pack(target, values);
  }
#endif
}

/// kExact keeps all digits of the products. kCutsInput: the weights of dB have more bits than mma
/// reads, as Δ·u has and u alone has not.
template <class Shape, bool kExact, bool kCutsInput>
class ChannelSums {
  static_assert(Shape::kChannelBits == 2 || Shape::kChannelBits == 3);
  static constexpr bool kHalves = Shape::kHalves;
  static constexpr int kSlots = Shape::kSumSlots;
  /// The step groups between the one that is put and the one that is added up.
  static constexpr unsigned kDelay = kSlots / 2;
  static_assert(kSlots <= SumBarriers::kMostSlots);
  static constexpr int kSelectors = kHalves && !kExact ? kBlockSteps : 2 * kBlockSteps;
  static constexpr int kTurnBlocks = Shape::kTurnBlocks;
  static constexpr int kGroupTurns = kSweepBlocks / kTurnBlocks;
  static constexpr bool kHasRests = kExact && Shape::kSumsRestsApart;
  /// True if weighted sums of dC are conjugated at the end: complex states enter mma unconjugated.
  static constexpr bool kConjugates = Shape::kComponents == 2;

 public:
  /// True if mma takes the weights itself.
  static constexpr bool kWeighted = !kExact;

  /// The sums of a block of steps: [0] of dB and [1] of dC or, if kWeighted with four channels, [0]
  /// of both.
  struct Block {
    float sums[2][kWeighted ? 2 : 1][4] = {};
    // The sums of what tf32 cuts off. They are separate, since an mma that adds to the sums of the
    // mma before it waits long for that.
    float rests[2][4] = {};
    // If kWeighted: those of the next step, which goes through the same mma.
    Pack<float, 4> states[2];
    float weights[2];
  };

  /// To be called by all threads of the block. `warp` is one of the `warps` warps that hold the
  /// same states. `target` is the tile's row of partial sums for step 0. From step `first_added`
  /// on, the first of a chunk, sums are added to the values there instead of stored.
  __device__ __forceinline__ ChannelSums(const SumBarriers& barriers, int slots, int warp,
                                         int warps, float* target, int steps, int first_added,
                                         bool has_z)
      : full_(shared_address(&barriers)),
        slots_(slots),
        warp_(warp),
        warps_(warps),
        target_(target),
        steps_(steps),
        first_added_(first_added),
        has_z_(has_z),
        own_(slots + warp * Shape::kSumBytes + static_cast<int>(threadIdx.x) % kWarpSize * 16),
        turns_to_wait_(warp + static_cast<int>(kDelay) * kGroupTurns) {
    const int lane = threadIdx.x % kWarpSize;
    const int column = lane / 4;
#pragma unroll
    for (int i = 0; i < kSelectors; ++i) {
      const bool is_own = (kWeighted && kHalves ? column / 2 : column) == i;
      const uint32_t value = kWeighted ? 0xffffffffu : bit_cast<uint32_t>(1.0f);
      // The shuffle hides the value from ptxas, which would otherwise rebuild it for every use.
      select_[i] = __shfl_sync(kFullMask, is_own ? value : 0u, lane);
    }
    if (warp == 0 && lane == 0) {
      for (int slot = 0; slot < kSlots; ++slot) {
        const SharedBarrier full = full_of(slot);
        full.initialize(warps * kWarpSize);
        empty_of(full).initialize(kGroupTurns * kWarpSize);
      }
    }
    __syncthreads();
  }

  /// Adds the contributions of the block's step j to dB and dC (kinds 0 and 1): weight·states,
  /// conjugated for dC. Steps come last one first.
  __device__ __forceinline__ void add_weighted(Block& block, int j, const float (&weights)[2],
                                               const Pack<float, 4> (&states)[2]) const {
    static_assert(kWeighted);
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
      const uint32_t mask = select_[kHalves ? j : 2 * j + kind];
      const float own = bit_cast<float>(bit_cast<uint32_t>(weights[kind]) & mask);
      if (j % 2 != 0) {
        block.states[kind] = states[kind];
        block.weights[kind] = own;
        continue;
      }
      const Pack<float, 4>& now = states[kind];
      const Pack<float, 4>& behind = block.states[kind];
#pragma unroll
      for (int s = 0; s < 4; s += 2) {
        const float a[4] = {now.v[s], now.v[s + 1], behind.v[s], behind.v[s + 1]};
        mma_tf32(block.sums[kHalves ? kind : 0][s / 2], a, own, block.weights[kind]);
      }
    }
  }

  /// Adds the products of the block's step j to dB (kind 0) or dC (kind 1).
  __device__ __forceinline__ void add(Block& block, int kind, int j,
                                      const Pack<float, 4>& products) const {
    // k < 4 has products 0 and 2 in rows g and g + 8, k >= 4 has products 1 and 3, so that pairs of
    // states are adjacent in the result.
    float a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = products.v[(i >> 1) | (i & 1) << 1];
    const auto selected = [&](int half) { return bit_cast<float>(select_[j * 2 + half]); };
    float (&sums)[4] = block.sums[kind][0];
    if constexpr (kExact) {
      float rest[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) rest[i] = a[i] - tf32_part(a[i]);
      mma_tf32(kHasRests ? block.rests[kind] : sums, rest, selected(0), selected(1));
    }
    mma_tf32(sums, a, selected(0), selected(1));
  }

  /// Stores the sums of block kBlock of a step group, which begins with `first_step`, for the sum
  /// over warps. Blocks come last one first.
  template <int kBlock>
  __device__ __forceinline__ void put(const Block& block, int first_step) {
    const SharedBarrier full = full_of(count_);
    if constexpr (kBlock == kSweepBlocks - 1) {
      // Initially, the phase before the first one counts as complete.
      empty_of(full).wait((count_ / kSlots & 1) ^ 1);
    }
    char* const own = shared_memory() + own_ + slot_offset(count_);
#pragma unroll
    for (int v = 0; v < Shape::kSumVectors; ++v) {
      Pack<float, 4> vector;
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const bool is_odd = threadIdx.x & 4;
        if constexpr (kHalves) {
          const float other = is_odd ? sum_of(block, 0, s, 1) : sum_of(block, 1, s, 0);
          vector.v[s] = (is_odd ? sum_of(block, 1, s, 1) : sum_of(block, 0, s, 0)) +
                        __shfl_xor_sync(kFullMask, other, 4);
        } else {
          vector.v[s] = sum_of(block, v, s, 0);
        }
      }
      store_pack(reinterpret_cast<float*>(own + (kBlock * Shape::kSumVectors + v) * kVectorBytes),
                 vector);
    }
    if constexpr (kBlock == kSweepBlocks - 1) {
      add_warps_in_turn(kDelay, first_step + kBlockSteps);
    }
    if constexpr (kBlock == 0) {
      __syncwarp();  // before the warp's planes are read
      full.signal();
      ++count_;
    }
  }

  /// Adds up the step groups that are left; the one put last begins with `first_step`.
  __device__ __forceinline__ void finish(int first_step) {
#pragma unroll 1
    for (unsigned delay = kDelay; delay > 0; --delay) add_warps_in_turn(delay, first_step);
  }

 private:
  static constexpr int kVectorBytes = kWarpSize * 16;
  static constexpr int kStepFloats = Shape::kRow / static_cast<int>(sizeof(float));
  static constexpr int kHalfFloats = kStepFloats / 2;
  /// Corrects the mean loss of cutting to tf32: 1/(1 − 2^-11·E[1/m]) for mantissas m as they are
  /// commonly distributed.
  static constexpr float kCutCorrection = kExact ? 1.0f : 1.000352f;
  /// Without z, the weights of dC are dout itself, which is not cut.
  __device__ __forceinline__ float cut_correction(int kind) const {
    const bool cuts_weights = kind == 0 ? kCutsInput : has_z_;
    return kWeighted && cuts_weights ? kCutCorrection * kCutCorrection : kCutCorrection;
  }

  /// Returns the sum of a kind for one of the lane's four states, from where a lane with `bit` as
  /// its bit 2 holds it.
  static __device__ __forceinline__ float sum_of(const Block& block, int kind, int state, int bit) {
    if constexpr (kWeighted) {
      const auto& pairs = block.sums[kHalves ? kind : 0];
      return pairs[state / 2][state % 2 * 2 + (kHalves ? bit : kind)];
    } else {
      const float sum = block.sums[kind][0][state];
      return kHasRests ? sum + block.rests[kind][state] : sum;
    }
  }

  /// Returns the "full" barrier of the step group with this number.
  __device__ __forceinline__ SharedBarrier full_of(unsigned group) const {
    return SharedBarrier(full_ + group % kSlots * static_cast<uint32_t>(sizeof(BarrierState)));
  }
  __device__ __forceinline__ int slot_offset(unsigned group) const {
    return static_cast<int>(group % kSlots) * warps_ * Shape::kSumBytes;
  }
  static __device__ __forceinline__ SharedBarrier empty_of(const SharedBarrier& full) {
    return SharedBarrier(full.address + static_cast<uint32_t>(offsetof(SumBarriers, empty)));
  }

  /// Adds the blocks for which it is this warp's turn, of the step group `delay` groups before the
  /// next one. The group put last begins with `first_step`.
  __device__ __forceinline__ void add_warps_in_turn(unsigned delay, int first_step) {
    first_step += (static_cast<int>(delay) - 1) * kSweepSteps;
#pragma unroll 1
    for (; turns_to_wait_ < kGroupTurns; turns_to_wait_ += warps_) {
      const int block = turns_to_wait_ * kTurnBlocks;
      add_warps(count_ - delay, block, first_step + block * kBlockSteps);
      if (kGroupTurns == 1) {
        turns_to_wait_ += warps_;
        break;
      }
    }
    turns_to_wait_ -= kGroupTurns;
  }

  /// The sums of one vector of each of kTurnBlocks blocks.
  struct TurnSums {
    Pack<float, 4> blocks[kTurnBlocks] = {};
  };
  __device__ __forceinline__ TurnSums sum_over_warps(int at, float scale) const {
    TurnSums sums;
#pragma unroll(Shape::kSumUnroll)
    for (int w = 0; w < warps_; ++w) {
#pragma unroll
      for (int b = 0; b < kTurnBlocks; ++b) {
        const auto other = load_pack<float, 4>(reinterpret_cast<const float*>(
            shared_memory() + at + b * Shape::kSumVectors * kVectorBytes));
#pragma unroll
        for (int i = 0; i < 4; ++i) sums.blocks[b].v[i] += other.v[i];
      }
      at += Shape::kSumBytes;
    }
#pragma unroll
    for (int b = 0; b < kTurnBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.blocks[b].v[i] *= scale;
    }
    return sums;
  }

  __device__ __forceinline__ void add_warps(unsigned group, int block, int first_step) {
    const int lane = threadIdx.x % kWarpSize;
    const SharedBarrier full = full_of(group);
    full.wait(group / kSlots & 1);
    const int at = slots_ + slot_offset(group) + block * Shape::kSumVectors * kVectorBytes;
    const bool is_added = first_step >= first_added_;
    if constexpr (!Shape::kAddsApart) {
      add_block(at, first_step, lane, is_added);
    } else if (is_added) {
      add_block(at, first_step, lane, std::true_type{});
    } else {
      add_block(at, first_step, lane, std::false_type{});
    }
    empty_of(full).signal();
  }

  __device__ __forceinline__ void add_block(int slot_at, int first_step, int lane, auto is_added) {
    const int g = lane / 4;
    const int tig = lane % 4;
    const auto store = [&](int step, int at, auto values) {
      step += first_step;
      if (step < steps_) store_or_add(target_ + step * kStepFloats + at, values, is_added);
    };
    if constexpr (kHalves) {
      const int kind = g & 1;
      const int part = g >> 1;
      const TurnSums sums = sum_over_warps(slot_at + lane * 16, cut_correction(kind));
#pragma unroll
      for (int b = 0; b < kTurnBlocks; ++b) {
        store(b * kBlockSteps + tig, kind * kHalfFloats + part * 4, sums.blocks[b]);
      }
    } else {
#pragma unroll
      for (int kind = 0; kind < 2; ++kind) {
        static_assert(kTurnBlocks == 1);
        const TurnSums sums =
            sum_over_warps(slot_at + kind * kVectorBytes + lane * 16, cut_correction(kind));
        Pack<float, 4> sum = sums.blocks[0];
        if constexpr (kWeighted && kConjugates) {
          if (kind == 1) sum = {sum.v[0], -sum.v[1], sum.v[2], -sum.v[3]};
        }
        store(tig, kind * kHalfFloats + g * 4, sum);
      }
    }
  }

  uint32_t full_;  // the first slot's barrier
  int slots_;
  int warp_;
  int warps_;
  float* target_;
  int steps_;
  int first_added_;
  bool has_z_;
  unsigned count_ = 0;  // of step groups put so far
  int own_;             // place of this lane's sums in the first slot
  int turns_to_wait_;
  uint32_t select_[kSelectors];  // a mask of weights, or the B operand itself
};

}  // namespace selective_scan::cuda::streamed
