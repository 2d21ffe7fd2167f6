#include "packed_bc.h"

#include <algorithm>

#include "bulk_copy.cuh"
#include "elements.cuh"
#include "launch_tools.h"
#include "packed_chunks.cuh"

namespace selective_scan::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kSlab = 32;               // values of a step that a block converts at a time
constexpr int kItems = kSlab / kWarps;  // elements per lane

/// The blocks that a multiprocessor holds at a time.
constexpr int kResidentBlocks = 1280 / kThreads;

static_assert(kChunk == kWarpSize && kSlab == kWarpSize, "one of either a lane");

/// Some elements of B or C. Item i is state i, with real and imaginary parts counted separately, or
/// step i, counted from the lane's first.
struct LaneItems {
  ArrayView view;
  int64_t origin;
  int64_t pair;  // from items 0 and 1 to items 2 and 3, and so on
  int64_t odd;   // from item 0 to item 1
  int count;     // of items that exist

  __device__ __forceinline__ LaneItems(const ArrayView& view, bool is_complex, bool along_steps)
      : view(view),
        origin(0),
        pair(along_steps  ? 2 * view.step
             : is_complex ? view.state
                          : 2 * view.state),
        odd(along_steps  ? view.step
            : is_complex ? view.imag
                         : view.state),
        count(0) {}
  __device__ __forceinline__ int64_t index(int i) const {
    return origin + (i >> 1) * pair + (i & 1) * odd;
  }
  /// Issues all loads before the first value is used.
  template <class Element>
  __device__ __forceinline__ void load(float (&values)[kItems]) const {
    Element elements[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      elements[i] = i < count ? static_cast<const Element*>(view.data)[index(i)] : Element{};
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) values[i] = to_real(elements[i]);
  }
};

/// A block converts kSlab values of every step of one chunk of one (batch, group) at a time,
/// through shared memory, so that both reads and writes are contiguous. This is usually a few
/// megabytes and bound by latency. For larger arrays, resident blocks loop over all chunks, and
/// issue slots are the bound.
template <bool kPacked>
__global__ void __launch_bounds__(kThreads, fitting_blocks(kThreads, kResidentBlocks))
    convert_projections_kernel(const __grid_constant__ ScanParams params, int slice_values,
                               int sequences, int chunks, float* stream, ClearedWords cleared,
                               [[maybe_unused]] PackedChunks packed_chunks) {
  __shared__ float tile[kSlab][kChunk + 1];
  start_dependents();
  if (blockIdx.y == 0) {
    for (int i = static_cast<int>(blockIdx.x) * kThreads + threadIdx.x; i < cleared.count;
         i += static_cast<int>(gridDim.x) * kThreads) {
      cleared.words[i] = 0;
    }
  }
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int components = params.is_complex ? 2 : 1;

  // Lanes lie along steps and items along values, or the reverse if values are contiguous in
  // memory. All values of a lane belong to B, or all to C.
  const bool lanes_along_values = params.B.state == components && params.C.state == components;
  const int first_value = lanes_along_values ? lane : warp * kItems;
  const int first_step = lanes_along_values ? warp * kItems : lane;

  const int row_slabs = 2 * slice_values / kSlab;
  const int slice = static_cast<int>(blockIdx.y) / row_slabs;
  const int slab = static_cast<int>(blockIdx.y) % row_slabs * kSlab;
  const int in_row = slab + first_value;  // of B | C
  const bool is_C = in_row >= slice_values;
  const int value = slice * slice_values + (is_C ? in_row - slice_values : in_row);
  const int groups = static_cast<int>(params.groups);
  const int values_left = static_cast<int>(params.dstate) * components - value;
  const int slices = static_cast<int>(gridDim.y) / row_slabs;

  for (int index = static_cast<int>(blockIdx.x); index < sequences * chunks;
       index += static_cast<int>(gridDim.x)) {
    const int sequence = index / chunks;
    int64_t step = static_cast<int64_t>(index % chunks) * kChunk + first_step;
    int64_t steps_left = params.seqlen - step;
    if constexpr (kPacked) {
      const PackedChunk chunk = packed_chunks[index % chunks];
      step = chunk.first_step + first_step;
      steps_left = chunk.steps - first_step;
    }
    LaneItems items(is_C ? params.C : params.B, params.is_complex, lanes_along_values);
    items.origin = sequence / groups * items.view.batch + sequence % groups * items.view.group +
                   value / components * items.view.state + value % components * items.view.imag +
                   step * items.view.step;
    if (values_left > 0 && steps_left > 0) {
      items.count = !lanes_along_values   ? values_left
                    : steps_left < kItems ? static_cast<int>(steps_left)
                                          : kItems;
    }
    float values[kItems];
    with_element<float>(items.view.dtype, [&](auto type) { items.load<decltype(type)>(values); });
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (lanes_along_values) {
        tile[first_value][first_step + i] = values[i];
      } else {
        tile[first_value + i][first_step] = values[i];
      }
    }
    __syncthreads();

    constexpr int kQuad = 4;
    constexpr int kQuads = kSlab / kQuad;
    float* const rows =
        stream + (static_cast<int64_t>(index) * slices + slice) * kChunk * 2 * slice_values + slab;
#pragma unroll
    for (int i = threadIdx.x; i < kQuads * kChunk; i += kThreads) {
      const int row = i / kQuads;
      const int column = i % kQuads * kQuad;
      Pack<float, kQuad> quad;
#pragma unroll
      for (int j = 0; j < kQuad; ++j) quad.v[j] = tile[column + j][row];
      store_pack(rows + row * 2 * slice_values + column, quad);
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t convert_projections(const ScanParams& params, int padded_states, void* stream_memory,
                                cudaStream_t stream, const PackedCuts& cuts, int slices,
                                ClearedWords cleared) {
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  const PackedBC layout(params, padded_states);
  const int64_t sequences = params.batch * params.groups;
  const int64_t blocks = sequences * layout.chunks;
  if (blocks == 0) return cudaSuccess;
  const int values_per_step = padded_states * (params.is_complex ? 2 : 1);
  const int64_t slabs = 2 * values_per_step / kSlab;
  const int64_t resident = ceil_div(int64_t{kResidentBlocks} * device.multiprocessors, slabs);
  LaunchShape shape{std::min(blocks, resident), kThreads};
  shape.rows = slabs;
  void* const packed_chunks = static_cast<char*>(stream_memory) + layout.projection_bytes(params);
  if (params.packed.present()) {
    const cudaError_t error = write_packed_chunks(params.packed, cuts, packed_chunks, stream);
    if (error != cudaSuccess) return error;
  }
  const auto kernel = params.packed.present() ? convert_projections_kernel<true>
                                              : convert_projections_kernel<false>;
  return launch_kernel(kernel, shape, stream, params, values_per_step / slices,
                       static_cast<int>(sequences), static_cast<int>(layout.chunks),
                       static_cast<float*>(stream_memory), cleared, PackedChunks(packed_chunks));
}

}  // namespace selective_scan::cuda
