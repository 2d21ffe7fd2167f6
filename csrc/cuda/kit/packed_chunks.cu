#include "packed_chunks.cuh"

#include "launch_tools.h"

namespace selective_scan::cuda {
namespace {

constexpr int kThreads = 1024;

static_assert(kMostPackedSegments <= kThreads);

/// Cuts the chunks into segments, one per thread, after kThreads threads have written the chunks.
__device__ void write_segments(const PackedSequences& packed, const PackedCuts& cuts,
                               const PackedChunk* chunks, int count, PackedSegment* segments) {
  __shared__ int lengths[kThreads];
  __shared__ int summaries[kThreads];
  PackedSegment own;
  own.number = static_cast<int>(threadIdx.x);
  own.first_chunk = cuts.first_chunk(own.number, packed, chunks, count);
  own.chunks = cuts.first_chunk(own.number + 1, packed, chunks, count) - own.first_chunk;
  lengths[own.number] = own.chunks;
  const int summary = cuts.summarized_chunks(own, chunks);
  summaries[own.number] = summary;
  __syncthreads();
  if (own.number >= cuts.segments) return;
  int place = 0, summary_place = 0;  // the number of segments before this one
#pragma unroll 8
  for (int other = 0; other < cuts.segments; ++other) {
    const bool is_before = other < own.number;
    place += lengths[other] > own.chunks || (lengths[other] == own.chunks && is_before);
    summary_place += summaries[other] > summary || (summaries[other] == summary && is_before);
  }
  PackedSegment& segment = segments[place];
  segment.number = own.number;
  segment.first_chunk = own.first_chunk;
  segment.chunks = own.chunks;
  segments[summary_place].summarized = place;
}

/// Runs as one block. It counts the chunks of kThreads sequences at a time and then writes them,
/// one chunk per thread at a time, however long the sequences are. Bound by latency.
__global__ void __launch_bounds__(kThreads)
    write_packed_chunks_kernel(const __grid_constant__ PackedSequences packed,
                               const __grid_constant__ PackedCuts cuts, int64_t most,
                               PackedChunk* memory) {
  __shared__ int64_t behind[kThreads];  // chunks of all sequences up to and including this one
  __shared__ int begins[kThreads];
  __shared__ int ends[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  PackedChunk* const chunks = memory + 1;
  int64_t written = 0;
  for (int64_t first = 0; first < packed.count; first += kThreads) {
    const auto number = [&](int64_t index) {
      return packed.reversed ? packed.count - 1 - index : index;
    };
    int64_t begin = 0, end = 0;
    if (first + thread < packed.count) {
      begin = packed.begin(number(first + thread));
      end = packed.end(number(first + thread));
    }
    begins[thread] = static_cast<int>(begin);
    ends[thread] = static_cast<int>(end);
    int64_t sum = ceil_div(end - begin, kChunk);
    for (int distance = 1; distance < kThreads; distance *= 2) {
      behind[thread] = sum;
      __syncthreads();
      if (thread >= distance) sum += behind[thread - distance];
      __syncthreads();
    }
    behind[thread] = sum;
    __syncthreads();
    // Sequences overlap if boundaries do not rise: there may be more chunks than there is room for.
    const int64_t count = min(behind[kThreads - 1], most - written);
    for (int64_t at = thread; at < count; at += kThreads) {
      int low = 0;  // the sequences before this one end at or before chunk `at`
      for (int step = kThreads / 2; step > 0; step /= 2) {
        if (behind[low + step - 1] <= at) low += step;
      }
      const auto within = static_cast<int>(at - (low == 0 ? 0 : behind[low - 1]));
      PackedChunk chunk;
      chunk.first_step = begins[low] + within * kChunk;
      chunk.sequence = static_cast<int>(number(first + low));
      chunk.saved = static_cast<int>(first_saved_state(begins[low])) + within;
      chunk.steps = static_cast<int16_t>(min(ends[low] - chunk.first_step, kChunk));
      chunk.is_first = within == 0;
      chunk.is_last = chunk.first_step + kChunk >= ends[low];
      chunks[written + at] = chunk;
    }
    written += count;
    __syncthreads();
  }
  for (int64_t at = written + thread; at < most; at += kThreads) chunks[at] = PackedChunk{};
  if (thread == 0) {
    PackedChunk head;
    head.first_step = static_cast<int>(written);
    memory[0] = head;
  }
  __syncthreads();
  write_segments(packed, cuts, chunks, static_cast<int>(written),
                 reinterpret_cast<PackedSegment*>(chunks + most));
}

}  // namespace

cudaError_t write_packed_chunks(const PackedSequences& packed, const PackedCuts& cuts, void* memory,
                                cudaStream_t stream) {
  return launch_kernel(write_packed_chunks_kernel, {1, kThreads}, stream, packed, cuts,
                       most_packed_chunks(packed), static_cast<PackedChunk*>(memory));
}

}  // namespace selective_scan::cuda
