// Values on their way from block to block, without a barrier.
//
// A value and the number of its exchange are one word of 8 bytes, which is written and read as one.
// Whoever needs the value reads the word until it has the number that is due. Numbers grow from
// exchange to exchange and from launch to launch, so that nothing is ever cleared: an older word
// would be taken for a new one only after 2^32 exchanges, in which nobody wrote it. A word can be
// written anew as soon as all have read it: between two exchanges of one kind in a layer there is
// always one in which every block waits for all others.
#pragma once

#include "../kit/elements.cuh"
#include "plan.h"

namespace selective_scan::cuda::step {

using Word = unsigned long long;

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
__device__ __forceinline__ void read_words(const Word* source, Word (&words)[2]) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(words[0]), "=l"(words[1])
               : "l"(source)
               : "memory");
}

/// So many words of a thread are on their way at once.
constexpr int kWordBatch = 4;

/// Receives [count][kRows] words at `source`, of which the first `rows` columns are sent: the
/// block's threads that compute call visit(index, value) for each.
template <int kRows, class Visit>
__device__ __forceinline__ void receive(const Word* source, int count, int rows, uint32_t epoch,
                                        const Visit& visit) {
  for (int first = threadIdx.x; first < count * kRows; first += kWordBatch * kComputeThreads) {
    Word words[kWordBatch];
    const auto exists = [&](int index) { return index < count * kRows && index % kRows < rows; };
    bool are_complete;
    do {
      are_complete = true;
#pragma unroll
      for (int i = 0; i < kWordBatch; ++i) {
        const int index = first + i * kComputeThreads;
        words[i] = exists(index) ? read_word(source + index) : make_word(0, epoch);
        are_complete &= has_arrived(words[i], epoch);
      }
    } while (!are_complete);
#pragma unroll
    for (int i = 0; i < kWordBatch; ++i) {
      const int index = first + i * kComputeThreads;
      if (exists(index)) visit(index, static_cast<uint32_t>(words[i]));
    }
  }
}

/// A pair of words of a row of them.
struct PairPlace {
  int row;
  int pair;
};

/// Receives rows of `columns` words at `source`, an even number, in pairs. Thread t has the pairs
/// t, t + kComputeThreads and so on of each row, so that what a row's threads do depends on no
/// other row. For each such round all threads call visit(place, exists, low, high, fetch(place));
/// what fetch() asks for comes beside the words.
template <class Fetch, class Visit>
__device__ __forceinline__ void receive_pairs(const Word* source, int64_t columns, int rows,
                                              uint32_t epoch, const Fetch& fetch,
                                              const Visit& visit) {
  const int count = static_cast<int>(columns) / 2;
  const int thread = threadIdx.x;
  PairPlace next{0, thread};
#pragma unroll 1
  while (next.row < rows) {
    Word words[kWordBatch][2];
    PairPlace places[kWordBatch];
    bool exists[kWordBatch];
    decltype(fetch(next)) fetched[kWordBatch];
#pragma unroll
    for (int i = 0; i < kWordBatch; ++i) {
      places[i] = next;
      exists[i] = next.row < rows && next.pair < count;
      if (exists[i]) fetched[i] = fetch(next);
      next.pair += kComputeThreads;
      if (next.pair - thread >= count) next = {next.row + 1, thread};
    }
    bool are_complete;
    do {
      are_complete = true;
#pragma unroll
      for (int i = 0; i < kWordBatch; ++i) {
        if (exists[i]) read_words(source + places[i].row * columns + 2 * places[i].pair, words[i]);
      }
#pragma unroll
      for (int i = 0; i < kWordBatch; ++i) {
        if (!exists[i]) continue;
        are_complete &= has_arrived(words[i][0], epoch) && has_arrived(words[i][1], epoch);
      }
    } while (!are_complete);
#pragma unroll
    for (int i = 0; i < kWordBatch; ++i) {
      if (places[i].row >= rows) break;
      visit(places[i], exists[i], static_cast<uint32_t>(words[i][0]),
            static_cast<uint32_t>(words[i][1]), fetched[i]);
    }
  }
}

}  // namespace selective_scan::cuda::step
