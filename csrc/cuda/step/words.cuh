// The exchange of values between blocks, without a barrier.
//
// A value and the number of its exchange are one word of 8 or 16 bytes, which is written and read
// as a whole. A block that needs the value reads the word until it has the number that is due.
// Numbers grow from exchange to exchange and from launch to launch, and begin anew at 2^31, so
// nothing is ever cleared: an older word would be taken for a new one only after about 2^31
// exchanges in which nobody wrote it. A word can be overwritten as soon as all blocks have read it:
// between two exchanges of the same kind there is always another one in which every block waits for
// all others.
#pragma once

#include "../kit/elements.cuh"
#include "plan.h"

namespace selective_scan::cuda::step {

using Word = unsigned long long;

__device__ __forceinline__ uint32_t value_of(Word word) {
  return static_cast<uint32_t>(word);
}
__device__ __forceinline__ bool has_arrived(Word word, uint32_t epoch) {
  return static_cast<uint32_t>(word >> 32) == epoch;
}

__device__ __forceinline__ void send(Word* target, uint32_t value, uint32_t epoch) {
  const Word word = static_cast<Word>(epoch) << 32 | value;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(target), "l"(word) : "memory");
}
__device__ __forceinline__ void send(Word* target, float value, uint32_t epoch) {
  send(target, bit_cast<uint32_t>(value), epoch);
}

__device__ __forceinline__ Word read(const Word* source) {
  Word word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(source) : "memory");
  return word;
}

/// Two consecutive words.
struct WordPair {
  Word low, high;
};
__device__ __forceinline__ bool has_arrived(const WordPair& pair, uint32_t epoch) {
  return has_arrived(pair.low, epoch) && has_arrived(pair.high, epoch);
}
__device__ __forceinline__ WordPair read(const WordPair* source) {
  WordPair pair;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(pair.low), "=l"(pair.high)
               : "l"(source)
               : "memory");
  return pair;
}

/// A word of the stream has 16 bytes, so that it includes the sum of its squares. The sum's sign
/// bit is set: it lies where words of 8 bytes have the number of an exchange, which never has it.
struct StreamWord {
  uint32_t low;  // a float, or two values of two bytes
  uint32_t signed_squares;
  uint32_t high;
  uint32_t epoch;

  __device__ __forceinline__ static uint32_t signed_bits(float squares) {
    return bit_cast<uint32_t>(squares) | 0x80000000;
  }
  __device__ __forceinline__ float squares() const {
    return bit_cast<float>(signed_squares & 0x7fffffff);
  }
};
__device__ __forceinline__ bool has_arrived(const StreamWord& word, uint32_t epoch) {
  return word.epoch == epoch;
}
__device__ __forceinline__ void send(StreamWord* target, const StreamWord& word) {
  asm volatile(
      "{\n"
      " .reg .b64 first, second;\n"
      " .reg .b128 word;\n"
      " mov.b64 first, {%1, %2};\n"
      " mov.b64 second, {%3, %4};\n"
      " mov.b128 word, {first, second};\n"
      " st.relaxed.gpu.global.b128 [%0], word;\n"
      "}" ::"l"(target),
      "r"(word.low), "r"(word.signed_squares), "r"(word.high), "r"(word.epoch)
      : "memory");
}
__device__ __forceinline__ StreamWord read(const StreamWord* source) {
  StreamWord word;
  asm volatile(
      "{\n"
      " .reg .b64 first, second;\n"
      " .reg .b128 word;\n"
      " ld.relaxed.gpu.global.b128 word, [%4];\n"
      " mov.b128 {first, second}, word;\n"
      " mov.b64 {%0, %1}, first;\n"
      " mov.b64 {%2, %3}, second;\n"
      "}"
      : "=r"(word.low), "=r"(word.signed_squares), "=r"(word.high), "=r"(word.epoch)
      : "l"(source)
      : "memory");
  return word;
}

/// Receives `count` elements of T, of which those with nearest(index) == index are sent. The
/// block's compute threads call visit(index, word) for each of these. A thread has every
/// kComputeThreads-th element, kBatch at a time.
///
/// A warp reads again until all of its lanes have their words: lanes that went on alone would each
/// run the code that follows. A lane without a word reads one that its warp reads anyway. Behind a
/// branch, the words would take registers throughout the kernel; and if all such lanes read the
/// same word, that part of the L2 cache would serve them one after the other.
template <int kBatch, class T, class Nearest, class Visit>
__device__ __forceinline__ void receive_by(const T* source, int count, uint32_t epoch,
                                           const Nearest& nearest, const Visit& visit) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize;
#pragma unroll 1
  for (int first = thread; first - lane < count; first += kBatch * kComputeThreads) {
    const auto source_of = [&](int index) { return index < count ? nearest(index) : first - lane; };
    T words[kBatch];
    bool are_complete;
    do {
      are_complete = true;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        words[i] = read(source + source_of(first + i * kComputeThreads));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) are_complete &= has_arrived(words[i], epoch);
    } while (!__all_sync(kFullMask, are_complete));
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = first + i * kComputeThreads;
      if (source_of(index) == index) visit(index, words[i]);
    }
  }
}

/// Calls receive_by() with a kBatch that holds all of a thread's elements, but at most kMost.
template <int kBatch = 1, class T, class Nearest, class Visit>
__device__ __forceinline__ void receive_nearest(const T* source, int count, uint32_t epoch,
                                                const Nearest& nearest, const Visit& visit) {
  constexpr int kMost = 8;
  if constexpr (kBatch == kMost) {
    receive_by<kBatch>(source, count, epoch, nearest, visit);
  } else if (count <= kBatch * kComputeThreads) [[likely]] {
    receive_by<kBatch>(source, count, epoch, nearest, visit);
  } else {
    receive_nearest<2 * kBatch>(source, count, epoch, nearest, visit);
  }
}

/// Receives `count` words, or pairs of words.
template <class T, class Visit>
__device__ __forceinline__ void receive(const T* source, int count, uint32_t epoch,
                                        const Visit& visit) {
  receive_nearest(source, count, epoch, [](int index) { return index; }, visit);
}

/// Receives [count][kRows] words, of which the first `rows` columns are sent.
template <int kRows, class Visit>
__device__ __forceinline__ void receive_columns(const Word* source, int count, int rows,
                                                uint32_t epoch, const Visit& visit) {
  const auto nearest = [&](int index) {
    const int row = index % kRows;
    return row < rows ? index : index - row;
  };
  receive_nearest(source, count * kRows, epoch, nearest, visit);
}

}  // namespace selective_scan::cuda::step
