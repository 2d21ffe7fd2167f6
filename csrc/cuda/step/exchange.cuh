// Values on their way from block to block, without a barrier.
//
// A value and the number of its exchange are one word of 8 bytes, which is written and read as one.
// Whoever needs the value reads the word until it has the number that is due. Numbers grow from
// exchange to exchange and from launch to launch, so that nothing is ever cleared. A word can be
// written anew as soon as all have read it: between two exchanges of one kind in a layer there is
// always one in which every block waits for all others.
#pragma once

#include <cstdint>

#include "plan.h"

namespace selective_scan::cuda::step {

using Word = unsigned long long;

struct WordPair {
  Word v[2];
};

__device__ __forceinline__ Word make_word(uint32_t value, uint32_t epoch) {
  return static_cast<Word>(epoch) << 32 | value;
}
__device__ __forceinline__ bool has_arrived(Word word, uint32_t epoch) {
  return static_cast<uint32_t>(word >> 32) == epoch;
}

__device__ __forceinline__ void send(Word* target, uint32_t value, uint32_t epoch) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(target), "l"(make_word(value, epoch))
               : "memory");
}
__device__ __forceinline__ void send(Word* target, float value, uint32_t epoch) {
  send(target, bit_cast<uint32_t>(value), epoch);
}

__device__ __forceinline__ Word read_word(const Word* source) {
  Word word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(source) : "memory");
  return word;
}
__device__ __forceinline__ WordPair read_pair(const Word* source) {
  WordPair pair;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(pair.v[0]), "=l"(pair.v[1])
               : "l"(source)
               : "memory");
  return pair;
}

/// Calls visit(index, value) for words [0, count) at `source`, with the threads of the block that
/// compute; several words of a thread are on their way at a time.
template <class Visit>
__device__ __forceinline__ void receive(const Word* source, int count, uint32_t epoch,
                                        const Visit& visit) {
  constexpr int kBatch = 4;
  for (int first = threadIdx.x; first < count; first += kBatch * kComputeThreads) {
    Word words[kBatch];
    bool is_complete;
    do {
      is_complete = true;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int index = first + i * kComputeThreads;
        words[i] = index < count ? read_word(source + index) : make_word(0, epoch);
        is_complete &= has_arrived(words[i], epoch);
      }
    } while (!is_complete);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = first + i * kComputeThreads;
      if (index < count) visit(index, static_cast<uint32_t>(words[i]));
    }
  }
}

/// The same of pairs of words: of every row those of `count` pairs that lie from `source` on, rows
/// being `pitch` words apart. visit(row, pair, low, high) is called when all threads that compute
/// have called meanwhile() once, while the first words are on their way.
template <class Meanwhile, class Visit>
__device__ __forceinline__ void receive_pairs(const Word* source, int64_t pitch, int rows,
                                              int count, uint32_t epoch, const Meanwhile& meanwhile,
                                              const Visit& visit) {
  constexpr int kBatch = 4;
  const int all = rows * count;
  int first = threadIdx.x;
  bool is_first = true;
  do {
    WordPair pairs[kBatch];
    const Word* at[kBatch];
    int row[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = first + i * kComputeThreads;
      row[i] = index / count;
      at[i] = source + row[i] * pitch + 2 * (index - row[i] * count);
    }
    const auto read_all = [&] {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i * kComputeThreads < all) pairs[i] = read_pair(at[i]);
      }
    };
    read_all();
    if (is_first) meanwhile();
    is_first = false;
    const auto are_complete = [&] {
      bool are = true;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i * kComputeThreads >= all) continue;
        are &= has_arrived(pairs[i].v[0], epoch) && has_arrived(pairs[i].v[1], epoch);
      }
      return are;
    };
    while (!are_complete()) read_all();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = first + i * kComputeThreads;
      if (index >= all) continue;
      visit(row[i], index - row[i] * count, static_cast<uint32_t>(pairs[i].v[0]),
            static_cast<uint32_t>(pairs[i].v[1]));
    }
    first += kBatch * kComputeThreads;
  } while (first < all);
}

}  // namespace selective_scan::cuda::step
