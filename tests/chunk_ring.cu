// Reads arrays through a ChunkRing and compares what every warp sees with what was written. Prints
// the number of differences; compiled and run by test_chunk_ring.py.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "cuda/kit/bulk_copy.cuh"

using namespace selective_scan::cuda;

namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

__host__ __device__ uint32_t word_at(int64_t index) {
  return static_cast<uint32_t>(index) * 2654435761u + 12345u;
}

__global__ void write_words(uint32_t* words, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += stride) {
    words[i] = word_at(i);
  }
}

/// Checks every word that the ring delivers. Warps pause at odd times, so that they drift apart as
/// far as the ring allows.
template <int kSlots>
__global__ void read_words(const uint32_t* words, int chunk_words, int chunks, bool backwards,
                           unsigned long long* differences) {
  extern __shared__ __align__(16) char shared[];
  auto& barriers = *reinterpret_cast<RingBarriers<kSlots>*>(shared);
  const int chunk_bytes = chunk_words * static_cast<int>(sizeof(uint32_t));
  const int64_t first = backwards && chunks > 0 ? chunks - 1 : 0;
  ChunkRing<kSlots> ring(barriers, shared + sizeof(barriers), words + first * chunk_words,
                         backwards ? -chunk_bytes : chunk_bytes, chunk_bytes, chunks);
  ring.start();
  unsigned long long wrong = 0;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  for (int k = 0; k < chunks; ++k) {
    const auto* slot = reinterpret_cast<const uint32_t*>(ring.acquire());
    const int64_t chunk = backwards ? chunks - 1 - k : k;
    if ((k * 7 + warp * 5 + blockIdx.x) % 11 == 0) {
      const long long begin = clock64();
      while (clock64() - begin < 3000) continue;
    }
    for (int i = lane; i < chunk_words; i += kWarpSize) {
      wrong += slot[i] != word_at(chunk * chunk_words + i);
    }
    ring.release();
  }
  if (wrong != 0) atomicAdd(differences, wrong);
}

template <int kSlots>
void run(const uint32_t* words, unsigned long long* differences) {
  for (int chunk_words : {64, 1024, 2048}) {
    const int bytes = static_cast<int>(sizeof(RingBarriers<kSlots>)) + kSlots * chunk_words * 4;
    for (int chunks : {0, 1, 2, kSlots - 1, kSlots, kSlots + 1, 61}) {
      for (int warps : {1, 5, kMaxWarps}) {
        for (bool backwards : {false, true}) {
          read_words<kSlots><<<40, warps * kWarpSize, bytes>>>(words, chunk_words, chunks,
                                                               backwards, differences);
          check(cudaGetLastError());
        }
      }
    }
  }
}

}  // namespace

int main() {
  constexpr int64_t kWords = 61 * 2048;
  uint32_t* words = nullptr;
  unsigned long long* differences = nullptr;
  check(cudaMalloc(&words, kWords * sizeof(uint32_t)));
  check(cudaMalloc(&differences, sizeof(*differences)));
  check(cudaMemset(differences, 0, sizeof(*differences)));
  write_words<<<64, 256>>>(words, kWords);
  run<3>(words, differences);
  run<4>(words, differences);
  unsigned long long total = 0;
  check(cudaMemcpy(&total, differences, sizeof(total), cudaMemcpyDeviceToHost));
  std::printf("%llu\n", total);
  return 0;
}
