// The partial sums of the backward pass, added up in a fixed order.
#include "gradient_sums.h"

#include <algorithm>

#include "batch_sums.cuh"
#include "dependent_launch.cuh"
#include "launch_tools.h"
#include "states.cuh"

namespace selective_scan::cuda {
namespace {

constexpr int kReduceSteps = 32;   // whose dB and dC a block adds up at a time
constexpr int kReduceStates = 16;  // likewise
constexpr int kBatchBytes = 64;    // of a thread's loads on their way at a time
constexpr int kReduceBlocks = 5;   // on a multiprocessor, where T is float

struct ReduceArgs {
  BackwardParams params;
  BackwardWorkspace workspace;
  int padded_states;
  int slice_states = 0;  // padded, of a slice of them
  int tiles = 0;
  int64_t tile_stride = 0;  // of partial sums, and that of slices
  int64_t slice_stride = 0;
  // Work items of dB and dC: how many there are, and of one (batch, group).
  int64_t projection_items = 0;
  int64_t step_items = 1;
  int64_t state_items = 1;
};

/// Of packed sequences in chunks.
struct PackedReduceArgs : ReduceArgs {
  PackedChunks chunks;
};

/// Values that nobody reads again.
template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> load_once(const T* source) {
  if constexpr (sizeof(T) * kCount == sizeof(float4)) {
    return bit_cast<Pack<T, kCount>>(__ldcs(reinterpret_cast<const float4*>(source)));
  } else {
    return load_pack<T, kCount>(source);
  }
}

/// dB and dC: adds the tiles. A block takes kReduceSteps steps and kReduceStates states of one
/// (batch, group) at a time. A thread adds kVector states of a step, which lie together; results
/// are written along steps, through shared memory.
///
/// Bound by memory, if only enough loads are on their way. So these are batches: of tiles, or where
/// there is one tile only, of as many times kReduceSteps steps, which then make up a work item. All
/// loads of a whole batch come without a branch or predicate, or the compiler would have each wait
/// for the one before.
template <class T, int kVector, class Args>
struct TileSums {
  static constexpr bool kPacked = std::is_same_v<Args, PackedReduceArgs>;
  static_assert(kReduceSteps == kChunk);
  static constexpr int kVectors = kReduceStates / kVector;  // of a step's dB or dC
  static constexpr int kStride = kReduceThreads / (2 * kVectors);
  static constexpr int kSums = kReduceSteps / kStride;  // of a thread
  static constexpr int kBatch = kBatchBytes / (kSums * kVector * static_cast<int>(sizeof(T)));
  using Terms = Pack<T, kVector>[kSums];
  using Results = T[2 * kReduceStates][kReduceSteps + 1];

  static SELECTIVE_SCAN_HD int item_steps(int tiles) {
    return tiles == 1 ? kBatch * kReduceSteps : kReduceSteps;
  }

  const Args& args;
  Results& results;
  // Of the work item:
  const T* source;  // of the first tile
  int64_t dB, dC;   // where they begin; of packed sequences that of the first step of all
  int steps;        // that exist
  int states;
  // Of the thread:
  int n = threadIdx.x % kVectors * kVector;
  int kind = threadIdx.x / kVectors % 2;
  int first_t = threadIdx.x / (2 * kVectors);

  int64_t first_step;

  __device__ TileSums(const Args& args, Results& results, int64_t item)
      : args(args), results(results) {
    const BackwardParams& params = args.params;
    const int64_t block = item / args.step_items;
    const int64_t sequence = block / args.state_items;  // batch · groups + group
    const int first_state = static_cast<int>(block % args.state_items) * kReduceStates;
    const int most = item_steps(args.tiles);
    first_step = item % args.step_items * most;
    int64_t left = params.seqlen - first_step;
    if constexpr (kPacked) left = int64_t{args.chunks.count()} * kChunk - first_step;
    steps = left < most ? static_cast<int>(left) : most;
    states = static_cast<int>(params.dstate) - first_state;
    source = static_cast<const T*>(args.workspace.dBC_partials) +
             first_state / args.slice_states * args.slice_stride +
             (sequence * params.seqlen + first_step) * 2 * args.slice_states +
             first_state % args.slice_states;
    const auto target = [&](const ArrayView& view) {
      return sequence / params.groups * view.batch + sequence % params.groups * view.group +
             first_state * view.state + (kPacked ? 0 : first_step * view.step);
    };
    dB = target(params.dB);
    dC = target(params.dC);
  }

  /// To be called by all threads of the block together, as is write().
  __device__ void add() {
    const int step_sums = 2 * args.slice_states;
    const T* own = source + first_t * step_sums + kind * args.slice_states + n;
    const bool has_terms = n < states && first_t < steps;
    const auto load = [&](Terms& terms, int first) {  // by threads that have terms
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        if (first + i == 0 || first + first_t + i * kStride < steps) {
          terms[i] = load_once<T, kVector>(own + (first + i * kStride) * step_sums);
        }
      }
    };
    if (args.tiles == 1) {
      Terms terms[kBatch] = {};
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (has_terms) load(terms[k], k * kReduceSteps);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) write(terms[k], k * kReduceSteps);
      return;
    }
    Terms sums = {};
    const auto add_batch = [&](int count) {
      Terms terms[kBatch] = {};
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (k < count) load(terms[k], 0);
        own += args.tile_stride;
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
#pragma unroll
          for (int v = 0; v < kVector; ++v) sums[i].v[v] += terms[k][i].v[v];
        }
      }
    };
    if (has_terms) {
      int left = args.tiles;
#pragma unroll 1
      for (; left >= kBatch; left -= kBatch) add_batch(kBatch);
      add_batch(left);
    }
    write(sums, 0);
  }

  /// Stores what threads have of kReduceSteps steps, which begin with the item's step `first`.
  __device__ void write(const Terms& sums, int first) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        results[kind * kReduceStates + n + v][first_t + i * kStride] = sums[i].v[v];
      }
    }
    __syncthreads();
    const int t = threadIdx.x % kReduceSteps;
    int64_t step = first + t;
    bool exists = first + t < steps;
    if constexpr (kPacked) {
      if (exists) {
        const PackedChunk chunk = args.chunks[(first_step + first) / kChunk];
        step = chunk.first_step + t;
        exists = t < chunk.steps;
      }
    }
    const auto store = [&](const ArrayView& view, int64_t begin, int kind) {
      const int64_t at = begin + step * view.step;
#pragma unroll
      for (int n = threadIdx.x / kReduceSteps; n < kReduceStates;
           n += kReduceThreads / kReduceSteps) {
        if (n < states) {
          store_component(view, at + n * view.state, results[kind * kReduceStates + n][t]);
        }
      }
    };
    if (exists) {
      if (args.params.variable_B) store(args.params.dB, dB, 0);
      if (args.params.variable_C) store(args.params.dC, dC, 1);
    }
    __syncthreads();
  }
};

/// Two sorts of work: see TileSums, for the first `projection_blocks` blocks, and sum_batches().
template <class T, int kVector, class Args>
__global__ void __launch_bounds__(kReduceThreads, kVector == 4 ? kReduceBlocks : 3)
    reduce_kernel(const __grid_constant__ Args args, const __grid_constant__ BatchSums sums,
                  unsigned projection_blocks) {
  using Sums = TileSums<T, kVector, Args>;
  __shared__ typename Sums::Results results;
  wait_for_primary();
  if (blockIdx.x < projection_blocks) {
    for (int64_t item = blockIdx.x; item < args.projection_items; item += projection_blocks) {
      Sums(args, results, item).add();
    }
    return;
  }
  const unsigned batch_blocks = gridDim.x - projection_blocks;
  for (int64_t index = blockIdx.x - projection_blocks; index < sums.work_items();
       index += batch_blocks) {
    sum_batches<T>(args.params, args.workspace, args.padded_states, sums, index);
  }
}

template <class T, class Args>
cudaError_t reduce(Args args, const Geometry& geometry, cudaStream_t stream) {
  const BackwardParams& params = args.params;
  const BackwardWorkspace& workspace = args.workspace;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  args.slice_states = args.padded_states / workspace.slices;
  const BatchSums sums(params, workspace, geometry.segments * params.batch);
  const auto launch = [&]<int kVector>() {
    if (workspace.dBC_partials != nullptr) {
      const int64_t sequences = params.batch * params.groups;
      args.tiles = static_cast<int>(geometry.sums_per_group);
      args.tile_stride = sequences * params.seqlen * 2 * args.slice_states;
      args.slice_stride = args.tiles * args.tile_stride;
      args.step_items = ceil_div(params.seqlen, TileSums<T, kVector, Args>::item_steps(args.tiles));
      args.state_items = ceil_div(params.dstate, kReduceStates);
      args.projection_items = sequences * args.step_items * args.state_items;
    }
    // Where there are many items of few tiles each, it would take long for as many blocks to begin.
    const int64_t resident = int64_t{kReduceBlocks} * device.multiprocessors;
    const int64_t projection_blocks =
        args.projection_items > 4 * resident ? resident : args.projection_items;
    constexpr int64_t kMostBlocks = 1 << 30;
    const int64_t batch_blocks = std::min(sums.work_items(), kMostBlocks);
    // Its launch may overlap the end of the scan; the work begins when that is complete.
    const LaunchShape shape{projection_blocks + batch_blocks, kReduceThreads, 0, true};
    return launch_kernel(reduce_kernel<T, kVector, Args>, shape, stream, args, sums,
                         static_cast<unsigned>(projection_blocks));
  };
  constexpr int kVector = sizeof(T) < 16 ? 16 / sizeof(T) : 1;
  if constexpr (kVector > 2 && !TileSums<T, kVector, Args>::kPacked) {
    if (args.slice_states % kVector != 0) return launch.template operator()<1>();
  }
  return launch.template operator()<kVector>();
}

}  // namespace

template <class T>
cudaError_t reduce_gradients(const BackwardParams& params, const Geometry& geometry,
                             int padded_states, const BackwardWorkspace& workspace,
                             cudaStream_t stream) {
  return reduce<T>(ReduceArgs{params, workspace, padded_states}, geometry, stream);
}

cudaError_t reduce_packed_gradients(const BackwardParams& params, const PackedChunks& chunks,
                                    const Geometry& geometry, int padded_states,
                                    const BackwardWorkspace& workspace, cudaStream_t stream) {
  return reduce<float>(PackedReduceArgs{{params, workspace, padded_states}, chunks}, geometry,
                       stream);
}

template cudaError_t reduce_gradients<float>(const BackwardParams&, const Geometry&, int,
                                             const BackwardWorkspace&, cudaStream_t);
template cudaError_t reduce_gradients<double>(const BackwardParams&, const Geometry&, int,
                                              const BackwardWorkspace&, cudaStream_t);
template cudaError_t reduce_gradients<Complex<float>>(const BackwardParams&, const Geometry&, int,
                                                      const BackwardWorkspace&, cudaStream_t);
template cudaError_t reduce_gradients<Complex<double>>(const BackwardParams&, const Geometry&, int,
                                                       const BackwardWorkspace&, cudaStream_t);

}  // namespace selective_scan::cuda
