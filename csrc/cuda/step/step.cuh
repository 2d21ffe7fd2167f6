// A few tokens through a stack of layers, in one launch.
//
// Mapping. As many blocks as the GPU holds at a time, one a multiprocessor, stay for the whole
// stack. A block has some channels of the layers' inside: of them it has the rows of in_proj, the
// convolution, the rows of dt_proj, the states, and their gate (channels.cuh). It has some rows of
// x_proj, of out_proj and of the head, too. What a row of activations is made of by others it
// receives from them (words.cuh), four times a layer: the stream's residual, x, dt with B and C,
// and y.
//
// A block has 14 warps. 12 compute: 8 of these multiply, the other 4 finish tiles meanwhile and do
// the convolution beside the product that makes z; all of them receive and scan. One warp fetches
// weights (ring.cuh), one what else channels are given (inputs.cuh).
//
// Rows are those of all steps and batch entries; products take them together (products.cuh). Where
// steps follow one another, in the convolution and the scan, a thread goes through them. No sum
// depends on how many rows there are, or on which block comes first.
//
// Shared memory: SharedLayout. Bound by: memory, for large layers; for small ones by four exchanges
// a layer, of about a microsecond each.
#pragma once

#include "channels.cuh"

namespace selective_scan::cuda::step {

// --- the stream ---

/// The norm in front of a product.
struct Norm {
  const void* weight;  // null: none, the stream is multiplied as it is
  DType dtype;
};
template <class W, int kRows>
__device__ __forceinline__ Norm norm_of(const Block<W, kRows>& own, Product product, int layer) {
  const StepParams& params = own.params;
  if (product == Product::kHead) return {params.final_norm, params.final_norm_dtype};
  return {own.args.layers[layer].norm, params.norm_dtype};
}

/// The norm's scale of a row, when all its squares are there.
template <class W, int kRows>
__device__ __forceinline__ float norm_scale(const Block<W, kRows>& own, int row) {
  float squares = 0;
#pragma unroll
  for (int warp = 0; warp < kComputeWarps; ++warp) squares += own.squares()[warp * kRows + row];
  return rsqrtf(fmaf(squares, own.plan.inverse_dim, own.plan.eps));
}

/// The power of two in a norm's scale; 1 where it or its inverse is no normal number.
__device__ __forceinline__ Scale power_of_two(float scale) {
  constexpr uint32_t kExponent = 0x7f800000, kBoth = 0x7f000000;
  const uint32_t exponent = bit_cast<uint32_t>(scale) & kExponent;
  if (exponent == 0 || exponent >= kBoth) return {1, 1};
  return {bit_cast<float>(exponent), bit_cast<float>(kBoth - exponent)};
}

/// Own channels of a row of the stream, which are sent.
template <class W, int kRows>
__device__ __forceinline__ void put_residual(const Block<W, kRows>& own, int local, int row,
                                             float value, uint32_t epoch) {
  own.residual()[local * kRows + row] = value;
  send(own.words(own.exchange.residual) + row * own.params.dim + own.outputs.first + local, value,
       epoch);
}

/// Puts the stream into the activations, normed, for which it sums up squares.
template <class W, int kRows>
__device__ __forceinline__ void fill_normed(const Block<W, kRows>& own, Norm norm, int layer) {
  struct Norms {
    RawElement low, high;
  };
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const Activations<W> activations = own.activations();
  receive_pairs(
      own.words(own.exchange.residual), own.params.dim, own.rows, own.epoch,
      [&](PairPlace place) {
        return Norms{Source{norm.weight, norm.dtype, 2 * place.pair}.fetch(),
                     Source{norm.weight, norm.dtype, 2 * place.pair + 1}.fetch()};
      },
      [&](PairPlace place, bool exists, uint32_t low_bits, uint32_t high_bits, const Norms& norms) {
        float low = exists ? bit_cast<float>(low_bits) : 0.0f;
        float high = exists ? bit_cast<float>(high_bits) : 0.0f;
        if (norm.weight != nullptr) {
          const float squares = sum_of_lanes<kWarpSize>(fmaf(low, low, high * high));
          if (lane == 0) {
            float& sum = own.squares()[warp * kRows + place.row];
            sum = place.pair < kComputeThreads ? squares : sum + squares;
          }
          const float before = own.scale(place.row, layer).before;
          low *= before * norms.low.value(norm.dtype);
          high *= before * norms.high.value(norm.dtype);
        }
        if (!exists) return;
        store_pack(activations.data + place.row * activations.pitch + 2 * place.pair,
                   Pack<W, 2>{{from_real<W>(low), from_real<W>(high)}});
      });
}

/// Puts x or y, as blocks have sent it, into the activations.
template <class W, int kRows>
__device__ __forceinline__ void fill_sent(const Block<W, kRows>& own, int64_t offset,
                                          uint32_t epoch) {
  constexpr int kWordValues = Block<W, kRows>::kWordValues;
  const Activations<W> activations = own.activations();
  receive_pairs(
      own.words(offset), own.params.inner / kWordValues, own.rows, epoch,
      [](PairPlace) { return RawElement{}; },
      [&](PairPlace place, bool exists, uint32_t low, uint32_t high, RawElement) {
        if (!exists) return;
        W* const target =
            activations.data + place.row * activations.pitch + place.pair * 2 * kWordValues;
        store_pack(reinterpret_cast<uint32_t*>(target), Pack<uint32_t, 2>{{low, high}});
      });
}

/// What a product multiplies with, which is there when all threads have met.
template <class W, int kRows>
__device__ __forceinline__ void fill(const Block<W, kRows>& own, Product product, int layer) {
  if (product == Product::kX) return fill_sent(own, own.exchange.x, own.epoch + kX);
  if (product == Product::kOut) return fill_sent(own, own.exchange.y, own.epoch + kY);
  fill_normed(own, norm_of(own, product, layer), layer);
}

/// The stream as it comes.
template <class W, int kRows>
__device__ __forceinline__ void begin(Block<W, kRows>& own) {
  const ArrayView& hidden = own.params.hidden;
  const int64_t steps = own.params.steps;
  own.for_each_item(own.outputs.count * own.rows, [&](int i) {
    const int local = i % own.outputs.count, row = i / own.outputs.count;
    const int64_t at = row / steps * hidden.batch + row % steps * hidden.step +
                       (own.outputs.first + local) * hidden.channel;
    put_residual(own, local, row, RawElement(hidden.data, hidden.dtype, at).value(hidden.dtype),
                 own.epoch + kResidual);
  });
  own.for_each_item(own.rows, [&](int row) { own.scale(row, 0) = {1, 1}; });
  own.epoch += kExchanges;
  meet();
  // Float16 alone does not hold whatever the stream may be without its norm's scale.
  if constexpr (std::is_same_v<W, Half>) {
    if (own.args.layers[0].norm == nullptr) return;
    fill(own, Product::kIn, 0);
    meet();
    own.for_each_item(own.rows,
                      [&](int row) { own.scale(row, 0) = power_of_two(norm_scale(own, row)); });
    meet();
  }
}

template <class W, int kRows>
__device__ __forceinline__ void store(const Block<W, kRows>& own, int row, int64_t channel,
                                      float value) {
  const ArrayView& out = own.params.out;
  const int64_t entry = row / own.params.steps, step = row % own.params.steps;
  const bool is_padding = own.params.slot(entry) == StepParams::kNoSlot;
  store_element(out.data, out.dtype, entry * out.batch + step * out.step + channel * out.channel,
                is_padding ? 0.0f : value);
}

/// Ends the stack where there is no head.
template <class W, int kRows>
__device__ __forceinline__ void end(const Block<W, kRows>& own, int layer) {
  const Norm norm = norm_of(own, Product::kHead, layer);
  if (norm.weight != nullptr) fill(own, Product::kHead, layer);
  meet();
  own.for_each_item(own.outputs.count * own.rows, [&](int i) {
    const int row = i / own.outputs.count, local = i % own.outputs.count;
    float value = own.residual()[local * kRows + row];
    if (norm.weight != nullptr) {
      value *= norm_scale(own, row) *
               RawElement(norm.weight, norm.dtype, own.outputs.first + local).value(norm.dtype);
    }
    store(own, row, own.outputs.first + local, value);
  });
}

// --- products ---

/// The result of a row of a matrix and a row of activations.
template <class W, int kRows>
__device__ __forceinline__ void take(const Block<W, kRows>& own, Product product, int layer,
                                     int local, int row, float sum) {
  if (product == Product::kX) {
    const int projection = own.matrices.projections.first + local;
    send(own.words(own.exchange.projections) + projection * kRows + row, sum,
         own.epoch + kProjections);
  } else if (product == Product::kOut) {
    const StepLayer& weights = own.args.layers[layer];
    const DType dtype = own.params.out_bias_dtype;
    sum += Source{weights.out_bias, dtype, own.outputs.first + local}.fetch().value(dtype);
    if (weights.norm != nullptr) sum += own.residual()[local * kRows + row];
    put_residual(own, local, row, sum, own.epoch + kResidual);
  } else {
    if (norm_of(own, product, layer).weight != nullptr) {
      const float scale = norm_scale(own, row);
      sum *= scale * own.scale(row, layer).inverse;
      if (local == 0) own.scale(row, layer + 1) = power_of_two(scale);
    }
    if (product == Product::kHead) return store(own, row, own.matrices.words.first + local, sum);
    const int place = product == Product::kIn ? local : own.channels.count + local;
    own.xz()[place * kRows + row] = sum;
  }
}

/// A product of the rows with a matrix: take() gets the results. When a thread is back, those of
/// others may not be there yet.
template <class W, int kRows>
__device__ __forceinline__ void multiply(Block<W, kRows>& own, Product product, int layer) {
  const MatrixRows matrix = own.matrices.of(product, layer);
  if (matrix.count == 0) return;
  const Activations<W> activations = own.activations();
  if (product != Product::kZ) {
    fill(own, product, layer);
    meet();
  }
  for_each_tile(matrix, [&](int tile) {
    TileSums<W, kRows> sums;
    if (threadIdx.x < kProductWarps * kWarpSize) {
      for_each_stage<W>(matrix, [&](int column, int columns) {
        sums.add(own.ring.acquire(), activations, column, columns, own.rows);
        own.ring.release();
      });
    }
    own.is_odd_tile = !own.is_odd_tile;  // others may still read the sums of the tile before
    constexpr int kSums = kProductWarps * kTileRows * kRows;
    float* const room =
        own.template shared<float>(own.plan.shared.sums) + (own.is_odd_tile ? kSums : 0);
    sums.finish(room, own.rows, [&](int tile_row, int row, float sum) {
      const int local = tile * kTileRows + tile_row;
      if (local < matrix.count) take(own, product, layer, local, row, sum);
    });
  });
}

/// What the threads that compute do.
template <class W, int kRows>
__device__ __forceinline__ void compute(Block<W, kRows>& own) {
  begin(own);
  for_each_product(own.params, [&](Product product, int layer) {
    const StepLayer& weights = own.args.layers[layer];
    if (product == Product::kIn) fetch_dt_proj(own, weights);
    if (product == Product::kHead && own.params.head == nullptr) return end(own, layer);
    multiply(own, product, layer);
    if (product == Product::kIn) convolve(own, weights, layer);
    if (product == Product::kX) {
      scan(own, weights, own.inputs().acquire(layer));
      own.inputs().release(layer);
    }
    if (product == Product::kOut) own.epoch += kExchanges;
  });
  // By now every block has sent, and so has read the number before it changes.
  if (blockIdx.x == 0 && threadIdx.x == 0) *own.words(ExchangeLayout::kEpoch) = own.epoch;
}

template <class W, int kRows>
__global__ void __launch_bounds__(kThreads, 1) step_kernel(const __grid_constant__ StepArgs args) {
  if constexpr (!kHasAsyncCopies) return;
  const BlockMatrices<W> matrices(args, static_cast<int>(blockIdx.x));
  WeightRing ring(args.plan);
  const ChannelInputs inputs(args, matrices.channels);
  if (threadIdx.x == 0) {
    ring.initialize();
    inputs.initialize();
  }
  __syncthreads();
  if (threadIdx.x < kComputeThreads) {
    Block<W, kRows> own(matrices, ring);
    compute(own);
  } else if (threadIdx.x < kComputeThreads + kWarpSize) {
    fetch_weights(matrices, ring);
  } else {
    fetch_inputs(args, matrices.channels, inputs);
  }
}

}  // namespace selective_scan::cuda::step
