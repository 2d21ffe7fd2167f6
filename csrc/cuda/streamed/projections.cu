#include "projections.h"

#include "../elements.cuh"
#include "bulk_copy.cuh"

namespace selective_scan::cuda::streamed {
namespace {

constexpr int kThreads = 256;
constexpr int kSlab = 64;  // values of a step that a block converts at a time

/// B or C of one (batch, group), and how its elements are visited.
struct Source {
  ArrayView view;
  int64_t origin;
  int components;
  int values;         // dstate · components; those behind are zero
  bool along_states;  // states, rather than steps, lie together in memory

  __device__ Source(const ScanParams& params, const ArrayView& view, bool variable, int64_t batch,
                    int64_t group)
      : view(view),
        origin(batch * view.batch + group * view.group),
        components(params.is_complex ? 2 : 1),
        values(variable ? static_cast<int>(params.dstate) * components : 0),
        along_states(view.state == components) {}

  __device__ float load(int value, int64_t step) const {
    const int state = components == 2 ? value >> 1 : value;
    const int component = components == 2 ? value & 1 : 0;
    return load_element<float>(
        view.data, view.dtype,
        origin + state * view.state + component * view.imag + step * view.step);
  }
};

/// A block converts one chunk of one (batch, group), through shared memory so that both reads and
/// writes are of neighbours. Bound by latency: it is a few megabytes.
__global__ void __launch_bounds__(kThreads)
    convert_projections_kernel(const __grid_constant__ ScanParams params, int values_per_step,
                               int64_t chunks, float* stream) {
  __shared__ float tile[kSlab][kChunk + 1];
  start_dependents();
  const int64_t sequence = blockIdx.x / chunks;
  const int64_t chunk = blockIdx.x % chunks;
  const int64_t batch = sequence / params.groups;
  const int64_t group = sequence % params.groups;
  const int64_t first_step = chunk * kChunk;
  const int64_t left = params.seqlen - first_step;
  const int steps = left < kChunk ? static_cast<int>(left) : kChunk;
  float* rows = stream + static_cast<int64_t>(blockIdx.x) * kChunk * 2 * values_per_step;

  for (int half = 0; half < 2; ++half) {
    const Source source(params, half == 0 ? params.B : params.C,
                        half == 0 ? params.variable_B : params.variable_C, batch, group);
    for (int first = 0; first < values_per_step; first += kSlab) {
      const int count = values_per_step - first < kSlab ? values_per_step - first : kSlab;
      for (int i = threadIdx.x; i < count * kChunk; i += kThreads) {
        const int step = source.along_states ? i / count : i % kChunk;
        const int value = source.along_states ? i % count : i / kChunk;
        tile[value][step] = first + value < source.values && step < steps
                                ? source.load(first + value, first_step + step)
                                : 0.0f;
      }
      __syncthreads();
      for (int i = threadIdx.x; i < count * kChunk; i += kThreads) {
        const int step = i / count;
        const int value = i % count;
        rows[(2 * step + half) * values_per_step + first + value] = tile[value][step];
      }
      __syncthreads();
    }
  }
}

}  // namespace

cudaError_t convert_projections(const ScanParams& params, int padded_states, void* stream_memory,
                                cudaStream_t stream) {
  const ProjectionStream layout(params, padded_states);
  const int64_t blocks = params.batch * params.groups * layout.chunks;
  if (blocks == 0) return cudaSuccess;
  convert_projections_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      params, padded_states * (params.is_complex ? 2 : 1), layout.chunks,
      static_cast<float*>(stream_memory));
  return cudaGetLastError();
}

}  // namespace selective_scan::cuda::streamed
