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

/// So many words of a thread are on their way at once. A warp asks again until all of its lanes
/// have theirs: lanes that went on by themselves would each go through what follows.
constexpr int kWordBatch = 4;

/// Receives [count][kRows] words at `source`, of which the first `rows` columns are sent: the
/// block's threads that compute call visit(index, value) for each.
template <int kRows, class Visit>
__device__ __forceinline__ void receive(const Word* source, int count, int rows, uint32_t epoch,
                                        const Visit& visit) {
  for (int turn = 0; turn < count * kRows; turn += kWordBatch * kComputeThreads) {
    const int first = turn + static_cast<int>(threadIdx.x);
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
    } while (!__all_sync(kFullMask, are_complete));
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

/// Receives pairs of words, kBatch of a thread at a time, from `next` on; see receive_pairs().
template <int kBatch, class Fetch, class Visit>
__device__ __forceinline__ void receive_pairs_at(PairPlace& next, const Word* source, int count,
                                                 int rows, uint32_t epoch, const Fetch& fetch,
                                                 const Visit& visit) {
  const int thread = static_cast<int>(threadIdx.x);
  Word words[kBatch][2];
  PairPlace places[kBatch];
  bool exists[kBatch];
  decltype(fetch(next)) fetched[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
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
    for (int i = 0; i < kBatch; ++i) {
      const int64_t pair = int64_t{places[i].row} * count + places[i].pair;
      if (exists[i]) read_words(source + 2 * pair, words[i]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (!exists[i]) continue;
      are_complete &= has_arrived(words[i][0], epoch) && has_arrived(words[i][1], epoch);
    }
  } while (!__all_sync(kFullMask, are_complete));
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (!exists[i]) continue;
    visit(places[i], static_cast<uint32_t>(words[i][0]), static_cast<uint32_t>(words[i][1]),
          fetched[i]);
  }
}

/// Receives rows of `columns` words at `source`, an even number, in pairs: visit(place, low, high,
/// fetch(place)) is called for each, and what fetch() asks for comes beside the words. Thread t has
/// the pairs t, t + kComputeThreads and so on of each row, in this order, so that what it does of a
/// row depends on no other row.
template <class Fetch, class Visit>
__device__ __forceinline__ void receive_pairs(const Word* source, int64_t columns, int rows,
                                              uint32_t epoch, const Fetch& fetch,
                                              const Visit& visit) {
  const int count = static_cast<int>(columns) / 2;
  PairPlace next{0, static_cast<int>(threadIdx.x)};
  if (rows == 1 && count <= kComputeThreads) {
    receive_pairs_at<1>(next, source, count, rows, epoch, fetch, visit);
    return;
  }
#pragma unroll 1
  while (next.row < rows) {
    receive_pairs_at<kWordBatch>(next, source, count, rows, epoch, fetch, visit);
  }
}

}  // namespace selective_scan::cuda::step
