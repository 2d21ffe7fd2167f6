// dB and dC: sums over channels, by the tensor cores within a warp and through shared memory over
// the block's warps.
//
// A lane's four products of a step (its states' contributions to dB or dC) are the A operand of one
// m16n8k8 mma, whose k runs over the two lowest lane bits: up to four channels. The B operand is a
// constant that selects: column n of the result gets the sums of one step and of one pair of the
// four products, so one accumulator takes four steps. Lane (g, tig) = (lane / 4, lane % 4) then
// holds columns 2·tig and 2·tig + 1 of rows g and g + 8.
//
// mma reads tf32: it cuts products to 11 bits. That is enough for 2-byte gradients; what it loses
// on average is given back. For fp32 gradients what is cut off goes through a second mma, which
// leaves an error of 2^-22.
//
// A warp leaves its sums of a group of blocks in one of two slots; warps take turns at adding the
// warps' sums of a block, in their order, and writing them to the tile's partial sums in global
// memory. They do so a block later, when the slower warps have left theirs too. At the slots'
// barriers every lane arrives for itself: that is as fast as one for its warp, and tools that look
// for races can follow it.
#pragma once

#include <cstddef>

#include "../elements.cuh"
#include "../projections.cuh"
#include "backward_shape.h"

namespace selective_scan::cuda::streamed {

/// D += A·B. None of the operands is rounded: mma ignores the low bits.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(bit_cast<uint32_t>(a[0])), "r"(bit_cast<uint32_t>(a[1])), "r"(bit_cast<uint32_t>(a[2])),
        "r"(bit_cast<uint32_t>(a[3])), "r"(bit_cast<uint32_t>(b0)), "r"(bit_cast<uint32_t>(b1)));
}

/// The part of x that mma reads.
__device__ __forceinline__ float tf32_part(float x) {
  return bit_cast<float>(bit_cast<uint32_t>(x) & 0xffffe000u);
}

template <class Shape, bool kExact>
class ChannelSums {
  /// Lane bits 0 and 1 that are not channels are parts, which need columns of their own.
  static constexpr int kPartBits = Shape::kChannelBits < 2 ? 2 - Shape::kChannelBits : 0;
  static constexpr int kSteps = kBlockSteps >> kPartBits;  // of an accumulator
  static constexpr int kAccumulators = 1 << kPartBits;
  /// Of eight channels a lane's bit 2 is the third bit; the sum over it is left to the last sum.
  static constexpr bool kHalves = Shape::kChannelBits == 3;
  static constexpr int kSlots = SumBarriers::kSlots;

 public:
  /// Sums of a block of steps; [0] of dB, [1] of dC.
  struct Block {
    float sums[2][kAccumulators][4] = {};
  };

  /// To be called by all threads of the block. `target` is the tile's row of partial sums of step
  /// 0.
  __device__ __forceinline__ ChannelSums(const SumBarriers& barriers, int slots, int warp,
                                         int warps, float* target, int steps)
      : barriers_(static_cast<uint32_t>(__cvta_generic_to_shared(&barriers))),
        slots_(slots),
        warp_(warp),
        warps_(warps),
        target_(target),
        steps_(steps),
        own_(slots + warp * Shape::kSumBytes + static_cast<int>(threadIdx.x) % kWarpSize * 16),
        blocks_to_turn_(warp + kGroupBlocks) {
    const int lane = threadIdx.x % kWarpSize;
    const int part = lane & ((1 << kPartBits) - 1) << Shape::kChannelBits;
    const int column = lane / 4;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const int wanted = (i << kPartBits) | (part >> Shape::kChannelBits);
      select_[i] = column == wanted ? 1.0f : 0.0f;
      // Unknown to the compiler, which would build it again for every use.
      asm volatile("" : "+f"(select_[i]));
    }
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < kSlots; ++slot) {
        full(slot).initialize(warps * kWarpSize);
        empty(slot).initialize(kGroupBlocks * kWarpSize);
      }
    }
    __syncthreads();
  }

  /// Adds the products of the block's step j to dB (kind 0) or dC (kind 1).
  __device__ __forceinline__ void add(Block& block, int kind, int j,
                                      const Pack<float, 4>& products) const {
    // Rows g hold the first state, rows g + 8 the second, of k < 4 and of k >= 4: pairs that lie
    // together in the result.
    float a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = products.v[kPartBits == 0 ? (i >> 1) | (i & 1) << 1 : i];
    const int pair = j % kSteps * 2;
    float (&sums)[4] = block.sums[kind][j / kSteps];
    if constexpr (kExact) {
      float rest[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) rest[i] = a[i] - tf32_part(a[i]);
      mma_tf32(sums, rest, select_[pair], select_[pair + 1]);
    }
    mma_tf32(sums, a, select_[pair], select_[pair + 1]);
  }

  /// Hands over the kBlock-th block of a group, which begins with `first_step`. Blocks come last
  /// one first.
  template <int kBlock>
  __device__ __forceinline__ void put(const Block& block, int first_step) {
    const int slot = count_ & (kSlots - 1);
    if constexpr (kBlock == kGroupBlocks - 1) {
      // At first the phase before the first one counts as complete.
      empty(slot).wait((count_ / kSlots & 1) ^ 1);
    }
    char* const own = shared_memory() + own_ + slot * warps_ * Shape::kSumBytes;
#pragma unroll
    for (int v = 0; v < Shape::kSumVectors; ++v) {
      const float (&sums)[4] = block.sums[v / kAccumulators][v % kAccumulators];
      const Pack<float, 4> vector = {sums[0], sums[kPartBits == 0 ? 1 : 2],
                                     sums[kPartBits == 0 ? 2 : 1], sums[3]};
      store_pack(reinterpret_cast<float*>(own + (kBlock * Shape::kSumVectors + v) * kVectorBytes),
                 vector);
    }
    if constexpr (kBlock == kGroupBlocks - 1) {
      add_warps_in_turn(first_step + kBlockSteps);
    }
    if constexpr (kBlock == 0) {
      __syncwarp();  // for who reads the warp's planes next
      full(slot).arrive();
      ++count_;
    }
  }

  /// Adds up what is left, which begins with `first_step`.
  __device__ __forceinline__ void finish(int first_step) { add_warps_in_turn(first_step); }

 private:
  static constexpr int kVectorBytes = kWarpSize * 16;
  static constexpr int kStepFloats = Shape::kRow / static_cast<int>(sizeof(float));
  static constexpr int kHalfFloats = kStepFloats / 2;
  /// 1/(1 − 2^-11·E[1/m]) for mantissas m as they commonly are: the mean loss of cutting to tf32.
  static constexpr float kCutCorrection = kExact ? 1.0f : 1.000352f;

  __device__ __forceinline__ Barrier full(int slot) const {
    return {barriers_ + slot * static_cast<uint32_t>(sizeof(uint64_t))};
  }
  __device__ __forceinline__ Barrier empty(int slot) const {
    return {full(slot).address + static_cast<uint32_t>(offsetof(SumBarriers, empty))};
  }

  /// Adds those blocks of the group put last for which it is this warp's turn.
  __device__ __forceinline__ void add_warps_in_turn(int first_step) {
#pragma unroll 1
    for (; blocks_to_turn_ < kGroupBlocks; blocks_to_turn_ += warps_) {
      add_warps(count_ - 1, blocks_to_turn_, first_step + blocks_to_turn_ * kBlockSteps);
    }
    blocks_to_turn_ -= kGroupBlocks;
  }

  __device__ __forceinline__ Pack<float, 4> sum_over_warps(int at, int stride, int at_too) const {
    Pack<float, 4> sum{};
#pragma unroll 4
    for (int w = 0; w < warps_; ++w) {
      const auto add = [&](int address) {
        const auto other =
            load_pack<float, 4>(reinterpret_cast<const float*>(shared_memory() + address));
#pragma unroll
        for (int i = 0; i < 4; ++i) sum.v[i] += other.v[i];
      };
      add(at);
      if constexpr (kHalves) add(at_too);
      at += stride;
      at_too += stride;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum.v[i] *= kCutCorrection;
    return sum;
  }

  __device__ __forceinline__ void add_warps(int index, int block, int first_step) {
    const int lane = threadIdx.x % kWarpSize;
    const int slot = index & (kSlots - 1);
    full(slot).wait(index / kSlots & 1);
    add_block(slots_ + slot * warps_ * Shape::kSumBytes + block * Shape::kSumVectors * kVectorBytes,
              first_step, lane);
    empty(slot).arrive();
  }

  __device__ __forceinline__ void add_block(int slot_at, int first_step, int lane) {
    const int g = lane / 4;
    const int tig = lane % 4;
    const auto store = [&](int step, int at, auto values) {
      step += first_step;
      if (step < steps_) store_pack(target_ + step * kStepFloats + at, values);
    };
    if constexpr (kHalves) {
      // Lane (kind, part, tig); neighbouring parts begin with different halves: no bank conflicts.
      const int kind = lane >> 4;
      const int part = g & 3;
      const int at = slot_at + kind * kVectorBytes + (part * 8 + tig) * 16;
      const int odd = (part & 1) * 64;
      const auto sum = sum_over_warps(at + odd, Shape::kSumBytes, at + (64 - odd));
      store(tig, kind * kHalfFloats + part * 4, sum);
    } else {
#pragma unroll
      for (int v = 0; v < Shape::kSumVectors; ++v) {
        const int kind = v / kAccumulators;
        const auto sum =
            sum_over_warps(slot_at + v * kVectorBytes + lane * 16, Shape::kSumBytes, 0);
        if constexpr (kPartBits == 0) {
          store(tig, kind * kHalfFloats + g * 4, sum);
        } else {
          const int step = v % kAccumulators * kSteps + tig / 2;
          const int at = kind * kHalfFloats + g * 8 + tig % 2 * 2;
          store(step, at, Pack<float, 2>{sum.v[0], sum.v[1]});
          store(step, at + 4, Pack<float, 2>{sum.v[2], sum.v[3]});
        }
      }
    }
  }

  uint32_t barriers_;
  int slots_;
  int warp_;
  int warps_;
  float* target_;
  int steps_;
  int count_ = 0;
  int own_;  // where this lane's sums go in slot 0
  int blocks_to_turn_;
  float select_[2 * kSteps];
};

}  // namespace selective_scan::cuda::streamed
