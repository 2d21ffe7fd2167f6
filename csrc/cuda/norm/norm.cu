// The RMS norm of rows to which a residual is added first, forward and backward.
//
// Mapping. A team of warps owns a row: a thread keeps kVectors vectors of neighboring channels in
// registers, from the loads of all inputs of the row to the last store. The teams of a block
// process different rows independently, and so do blocks. The teams' sums for dweight are added
// within a block at its end, and over blocks by add_up(). The assignment of rows depends on the
// sizes and the device alone.
//
// Bound by memory. If rows are not aligned to vectors, threads load single elements.

#include <algorithm>

#include "../../core/norm_params.h"
#include "../kit/barriers.cuh"
#include "../kit/dependent_launch.cuh"
#include "../kit/elements.cuh"
#include "../kit/launch_tools.h"
#include "../kit/shuffle.cuh"
#include "../launch.h"
#include "../sums/sums.h"

namespace selective_scan::cuda {
namespace {

constexpr int kVector = 8;  // channels
constexpr int kMostWarps = 24;

/// The most threads of a block, and the number of blocks that a multiprocessor has room for: as
/// many threads as leave each one the registers for kVectors vectors of all inputs of a row.
template <class R, int kVectors>
struct Room {
  static constexpr int kFloats = static_cast<int>(sizeof(R) / sizeof(float)) * kVectors;
  static constexpr int kForward = 256 * kVectors;
  static constexpr int kForwardBlocks = std::max(1, 4 / (kFloats * kVectors));
  static constexpr int kBackward = kVectors > 1 ? 512 : 768 / kFloats;
};

/// Returns the number of a thread's vectors: one, except for rows whose team would be large.
constexpr int vectors_of(int64_t channels) {
  return channels > 8 * kWarpSize * kVector ? 2 : 1;
}
static_assert(kMostNormChannels == 2 * kVector * Room<float, 2>::kForward);

/// A vector of a row, as it lies in memory: all loads of a row are issued before anything is
/// converted.
template <class R>
struct Raw {
  Pack<uint4, kVector * sizeof(R) / sizeof(uint4)> words{};

  template <class Element>
  using Words = Pack<uint4, kVector * sizeof(Element) / sizeof(uint4)>;

  template <class Element>
  __device__ __forceinline__ R value(int i) const {
    Words<Element> own;
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(own) / sizeof(uint4)); ++w) own.v[w] = words.v[w];
    return to_real(bit_cast<Pack<Element, kVector>>(own).v[i]);
  }
};

/// The vector of a row that a thread has.
struct RowVector {
  int64_t channel;
  int64_t count;  // channels of the vector that exist; at most 0 if none
  bool is_vector;

  template <class R>
  __device__ __forceinline__ Raw<R> fetch(const ArrayView& view, int64_t row) const {
    Raw<R> raw;
    if (count <= 0 || !view.present()) return raw;
    const int64_t size = element_size(view.dtype);
    const char* const source =
        static_cast<const char*>(view.data) + (row * view.batch + channel) * size;
    if (is_vector) {
#pragma unroll
      for (int w = 0; w < static_cast<int>(sizeof(raw) / sizeof(uint4)); ++w) {
        if (w * static_cast<int64_t>(sizeof(uint4)) < kVector * size) {
          raw.words.v[w] = reinterpret_cast<const uint4*>(source)[w];
        }
      }
      return raw;
    }
    with_element<R>(view.dtype, [&](auto type) {
      using Element = decltype(type);
      Pack<Element, kVector> pack{};
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (i < count) pack.v[i] = reinterpret_cast<const Element*>(source)[i];
      }
      const auto words = bit_cast<typename Raw<R>::template Words<Element>>(pack);
#pragma unroll
      for (int w = 0; w < static_cast<int>(sizeof(words) / sizeof(uint4)); ++w) {
        raw.words.v[w] = words.v[w];
      }
    });
    return raw;
  }

  template <class R>
  __device__ __forceinline__ void store(const ArrayView& view, int64_t row,
                                        const Pack<R, kVector>& values) const {
    if (count <= 0 || !view.present()) return;
    const int64_t at = row * view.batch + channel;
    if (is_vector) {
      char* const target = static_cast<char*>(view.data) + at * element_size(view.dtype);
      store_elements<R, kVector>(target, view.dtype, values);
      return;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i < count) store_element(view.data, view.dtype, at + i, values.v[i]);
    }
  }
};

/// Calls use(i, value) for the values of a vector.
template <class R, class Use>
__device__ __forceinline__ void for_each(const Raw<R>& raw, DType dtype, const Use& use) {
  with_element<R>(dtype, [&](auto type) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) use(i, raw.template value<decltype(type)>(i));
  });
}

/// The team that a thread belongs to.
template <class R, int kVectors>
struct Team {
  int warps, index, count;  // warps of the team; its index in the block; the block's teams
  RowVector vectors[kVectors];
  int turn = 0;

  __device__ __forceinline__ Team(const NormParams& params, int warps, bool has_vectors)
      : warps(warps) {
    const int threads = warps * kWarpSize;
    index = threadIdx.x / threads;
    count = blockDim.x / threads;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t channel = int64_t{threadIdx.x % threads + v * threads} * kVector;
      vectors[v] = {channel, params.channels - channel, has_vectors};
    }
  }

  /// Calls visit(row) for each of the team's rows. A team without a row meets nevertheless:
  /// racecheck loses track of the block's barrier if some of its warps met less often at others.
  template <class Visit>
  __device__ __forceinline__ void for_each_row(int64_t rows, const Visit& visit) {
    const int64_t step = int64_t{gridDim.x} * count;
    for (int64_t first = int64_t{blockIdx.x} * count; first < rows; first += step) {
      if (first + index < rows) {
        visit(first + index);
      } else if (warps > 1) {
        meet(1 + index, warps);
      }
    }
  }

  /// Sums each of the values over the team's threads, in a fixed order.
  template <int kCount>
  __device__ __forceinline__ void add_up(R (&values)[kCount]) {
    __shared__ R of_warps[2][kMostWarps * kCount];
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (R& value : values) value += shuffle_xor<kWarpSize>(value, distance);
    }
    if (warps == 1) return;
    // The buffers alternate: a warp that comes back to this one has met all others since they read
    // it.
    R* const sums = of_warps[turn];
    turn ^= 1;
    const int warp = threadIdx.x / kWarpSize;
    if (threadIdx.x % kWarpSize == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[warp * kCount + i] = values[i];
    }
    meet(1 + index, warps);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = 0;
      for (int w = 0; w < warps; ++w) values[i] += sums[(index * warps + w) * kCount + i];
    }
  }
};

template <class R>
__device__ __forceinline__ R scale_of(const NormParams& params, R sum_of_squares) {
  return R(1) / sqrt(sum_of_squares / static_cast<R>(params.channels) + static_cast<R>(params.eps));
}

template <class R, int kVectors>
__device__ __forceinline__ void load_weight(const NormParams& params,
                                            const RowVector (&vectors)[kVectors],
                                            Pack<R, kVector> (&weight)[kVectors]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const auto raw = vectors[v].template fetch<R>(params.weight, 0);
    const bool is_one = !params.weight.present();
    for_each(raw, params.weight.dtype,
             [&](int i, R value) { weight[v].v[i] = is_one ? R(1) : value; });
  }
}

template <class R, int kVectors>
__global__ void __launch_bounds__(Room<R, kVectors>::kForward,
                                  fitting_blocks(Room<R, kVectors>::kForward,
                                                 Room<R, kVectors>::kForwardBlocks))
    forward_kernel(const __grid_constant__ NormForwardParams params, int team_warps,
                   bool has_vectors) {
  Team<R, kVectors> team(params, team_warps, has_vectors);
  wait_for_primary();
  Pack<R, kVector> weight[kVectors];
  load_weight<R>(params, team.vectors, weight);
  team.for_each_row(params.rows, [&](int64_t row) {
    Raw<R> hidden[kVectors], residual[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      hidden[v] = team.vectors[v].template fetch<R>(params.hidden, row);
      residual[v] = team.vectors[v].template fetch<R>(params.residual, row);
    }
    Pack<R, kVector> total[kVectors];
    R sums[1] = {0};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      for_each(hidden[v], params.hidden.dtype, [&](int i, R value) { total[v].v[i] = value; });
      for_each(residual[v], params.residual.dtype, [&](int i, R value) { total[v].v[i] += value; });
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[0] += total[v].v[i] * total[v].v[i];
    }
    team.add_up(sums);
    const R scale = scale_of(params, sums[0]);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      team.vectors[v].store(params.total, row, total[v]);
#pragma unroll
      for (int i = 0; i < kVector; ++i) total[v].v[i] *= scale * weight[v].v[i];
      team.vectors[v].store(params.normed, row, total[v]);
    }
  });
}

/// `parts` gets one row of dweight per block.
template <class R, int kVectors>
__global__ void __launch_bounds__(Room<R, kVectors>::kBackward)
    backward_kernel(const __grid_constant__ NormBackwardParams params, R* parts, int team_warps,
                    bool has_vectors) {
  extern __shared__ __align__(16) char shared[];
  Team<R, kVectors> team(params, team_warps, has_vectors);
  Pack<R, kVector> weight[kVectors], dweight[kVectors]{};
  load_weight<R>(params, team.vectors, weight);
  team.for_each_row(params.rows, [&](int64_t row) {
    Raw<R> totals[kVectors], dnormed[kVectors], dtotals[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      totals[v] = team.vectors[v].template fetch<R>(params.total, row);
      dnormed[v] = team.vectors[v].template fetch<R>(params.dnormed, row);
      dtotals[v] = team.vectors[v].template fetch<R>(params.dtotal, row);
    }
    Pack<R, kVector> total[kVectors], gradient[kVectors];
    R sums[2] = {0, 0};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      for_each(totals[v], params.total.dtype, [&](int i, R value) { total[v].v[i] = value; });
      for_each(dnormed[v], params.dnormed.dtype, [&](int i, R value) { gradient[v].v[i] = value; });
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        sums[0] += total[v].v[i] * total[v].v[i];
        sums[1] += gradient[v].v[i] * weight[v].v[i] * total[v].v[i];
      }
    }
    team.add_up(sums);
    const R scale = scale_of(params, sums[0]);
    const R pull = scale * scale * scale * sums[1] / static_cast<R>(params.channels);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const R scaled = gradient[v].v[i] * scale;
        dweight[v].v[i] += scaled * total[v].v[i];
        gradient[v].v[i] = scaled * weight[v].v[i] - pull * total[v].v[i];
      }
      for_each(dtotals[v], params.dtotal.dtype, [&](int i, R value) { gradient[v].v[i] += value; });
      team.vectors[v].store(params.dresidual, row, gradient[v]);
      team.vectors[v].store(params.dhidden, row, gradient[v]);
    }
  });
  if (parts == nullptr) return;

  R* const of_teams = reinterpret_cast<R*>(shared);  // [team][channel]
  const int team_channels = team_warps * kWarpSize * kVector * kVectors;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    store_pack(of_teams + team.index * team_channels + team.vectors[v].channel, dweight[v]);
  }
  __syncthreads();
  R* const part = parts + blockIdx.x * params.channels;
  for (int channel = threadIdx.x; channel < params.channels; channel += blockDim.x) {
    R sum = 0;
    for (int i = 0; i < team.count; ++i) sum += of_teams[i * team_channels + channel];
    part[channel] = sum;
  }
}

/// How rows are divided among teams and blocks.
struct Shape {
  int team_warps, team_channels, teams;  // teams of a block
  LaunchShape launch;

  /// Blocks have at most `most_threads` threads, and there are at most as many as the device runs
  /// at once.
  Shape(const NormParams& params, int vectors, int most_threads, int blocks_of_multiprocessor,
        const Device& device) {
    const int64_t warp_channels = int64_t{kWarpSize} * kVector * vectors;
    team_warps = static_cast<int>(ceil_div(params.channels, warp_channels));
    team_channels = team_warps * static_cast<int>(warp_channels);
    teams = most_threads / (team_warps * kWarpSize);
    launch.threads = teams * team_warps * kWarpSize;
    const int blocks = blocks_of_multiprocessor * most_threads / launch.threads;
    launch.blocks =
        std::min(ceil_div(params.rows, int64_t{teams}), int64_t{device.multiprocessors} * blocks);
  }
};

template <class... Views>
bool are_aligned(int64_t channels, const Views&... views) {
  const auto is_aligned = [](const ArrayView& view) {
    return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 &&
           view.batch * element_size(view.dtype) % 16 == 0;
  };
  return channels % kVector == 0 && (is_aligned(views) && ...);
}

template <class R, int kVectors>
cudaError_t run(const NormForwardParams& params, const Device& device, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  using Own = Room<R, kVectors>;
  Shape shape(params, kVectors, Own::kForward, Own::kForwardBlocks, device);
  shape.launch.is_dependent = true;
  const bool has_vectors = are_aligned(params.channels, params.weight, params.hidden,
                                       params.residual, params.normed, params.total);
  return launch_kernel(forward_kernel<R, kVectors>, shape.launch, stream, params, shape.team_warps,
                       has_vectors);
}

template <class R, int kVectors>
cudaError_t run(const NormBackwardParams& params, const Device& device, cudaStream_t stream,
                const ScratchMemory& memory) {
  Shape shape(params, kVectors, Room<R, kVectors>::kBackward, 1, device);
  const bool has_vectors = are_aligned(params.channels, params.weight, params.total, params.dnormed,
                                       params.dtotal, params.dhidden, params.dresidual);
  R* parts = nullptr;
  if (params.dweight.present()) {
    shape.launch.shared_bytes = shape.teams * shape.team_channels * static_cast<int>(sizeof(R));
    parts = static_cast<R*>(
        memory(std::max<int64_t>(shape.launch.blocks, 1) * params.channels * sizeof(R)));
  }
  if (params.rows > 0) {
    const cudaError_t error = launch_kernel(backward_kernel<R, kVectors>, shape.launch, stream,
                                            params, parts, shape.team_warps, has_vectors);
    if (error != cudaSuccess) return error;
  }
  if (parts == nullptr) return cudaSuccess;
  Sums sums;
  sums.is_double = params.is_double;
  sums.parameters.add({parts, true, shape.launch.blocks, params.channels, 0, 1, 1, params.channels,
                       params.dweight, 0, 1});
  return add_up(sums, stream);
}

/// Runs a pass; `memory` is what it takes beyond the parameters.
template <class Params, class... Memory>
cudaError_t choose(const Params& params, cudaStream_t stream, const Memory&... memory) {
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess || params.channels == 0) return error;
  const bool is_one = vectors_of(params.channels) == 1;
  if (params.is_double) {
    return is_one ? run<double, 1>(params, device, stream, memory...)
                  : run<double, 2>(params, device, stream, memory...);
  }
  return is_one ? run<float, 1>(params, device, stream, memory...)
                : run<float, 2>(params, device, stream, memory...);
}

}  // namespace

cudaError_t launch(const NormForwardParams& params, const ScratchMemory&, cudaStream_t stream) {
  return choose(params, stream);
}

cudaError_t launch(const NormBackwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream) {
  return choose(params, stream, memory);
}

}  // namespace selective_scan::cuda
