// The data of a block's compute threads: the call, the block's shares of it, and shared memory.
#pragma once

#include "inputs.cuh"
#include "products.cuh"
#include "words.cuh"

namespace selective_scan::cuda::step {

/// The exchanges of a layer, in order. The first layer's input is exchanged as the stream of a
/// layer before it.
enum Exchange : uint32_t { kX = 1, kProjections, kY, kStream };
constexpr uint32_t kExchanges = 4;

/// Returns the number of the exchange before a launch's first one, from the last one so far. No
/// exchange of the launch has the highest bit in its number, by which words of the stream differ
/// from it.
__device__ __forceinline__ uint32_t first_epoch(uint32_t last) {
  constexpr uint32_t kMostOfLaunch = kExchanges * (kMostLayers + 2);
  return last < 0x80000000 - kMostOfLaunch ? last : 0;
}

/// The factor of a row of the stream before it is rounded to W, which is a power of two about as
/// large as the last norm's scale, and the inverse of that factor.
struct Scale {
  float before;
  float inverse;
};

template <class W, int kRows>
struct Block {
  static constexpr int kWordValues = sizeof(W) == 2 ? 2 : 1;

  const StepArgs& args;
  const BlockMatrices<W>& matrices;
  const StepParams& params;
  const StepPlan& plan;
  const ExchangeLayout& exchange;
  Share channels;
  Share outputs;
  int rows;
  WeightRing ring;
  uint32_t inverse_channels;  // inverse_of(channels.count)
  int side_by_side;           // batch entries, see entries_beside()
  uint32_t epoch;             // of the last exchange of the stream
  bool is_odd_tile = false;

  __device__ __forceinline__ Block(const BlockMatrices<W>& matrices, const WeightRing& ring)
      : args(matrices.args),
        matrices(matrices),
        params(args.params),
        plan(args.plan),
        exchange(plan.exchange),
        channels(matrices.channels),
        outputs(matrices.outputs),
        rows(static_cast<int>(params.rows())),
        ring(ring),
        inverse_channels(inverse_of(channels.count)),
        side_by_side(entries_beside(channels.count)),
        epoch(first_epoch(value_of(*words(ExchangeLayout::kEpoch)))) {}

  __device__ __forceinline__ Word* words(int64_t offset) const {
    return static_cast<Word*>(args.workspace) + offset;
  }

  __device__ __forceinline__ BlockInputs inputs() const { return BlockInputs(matrices); }

  // SharedLayout describes these.
  template <class T>
  static __device__ __forceinline__ T* shared(int at) {
    return reinterpret_cast<T*>(shared_memory() + at);
  }
  __device__ __forceinline__ Activations<W> activations() const {
    return {shared<W>(plan.shared.activations), plan.activation_pitch};
  }
  __device__ __forceinline__ float* in() const { return shared<float>(plan.shared.in); }
  __device__ __forceinline__ float* gates() const { return shared<float>(plan.shared.gates); }
  __device__ __forceinline__ float* x() const { return shared<float>(plan.shared.x); }
  __device__ __forceinline__ float* projections() const {
    return shared<float>(plan.shared.projections);
  }
  __device__ __forceinline__ float* residual() const { return shared<float>(plan.shared.residual); }
  __device__ __forceinline__ float* squares() const { return shared<float>(plan.shared.squares); }
  __device__ __forceinline__ float& norm_scale(int row) const {
    return shared<float>(plan.shared.norm_scale)[row];
  }
  /// Returns a row's scale. Layers with even and with odd numbers have one each.
  __device__ __forceinline__ Scale& scale(int row, int layer) const {
    return shared<Scale>(plan.shared.scale)[layer % 2 * kRows + row];
  }

  /// Returns the cell of number `index` among the own channels of `rows` rows.
  __device__ __forceinline__ Cell channel_at(int index, int rows) const {
    if (index >= channels.count * rows) return {0, 0, false};
    const int row = static_cast<int>(__umulhi(index, inverse_channels));
    return {index - row * channels.count, row, true};
  }

  template <class Visit>
  static __device__ __forceinline__ void for_each_item(int count, const Visit& visit) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kComputeThreads) visit(i);
  }
};

}  // namespace selective_scan::cuda::step
