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

/// The norm in front of a layer, and behind the last one.
struct Norm {
  const void* weight;  // null: none, the stream is multiplied as it is
  DType dtype;
};
template <class W, int kRows>
__device__ __forceinline__ Norm norm_of(const Block<W, kRows>& own, int layer) {
  const StepParams& params = own.params;
  if (layer == params.layers) return {params.final_norm, params.final_norm_dtype};
  return {own.args.layers[layer].norm, params.norm_dtype};
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
  const Activations<W> activations = own.activations();
  receive_pairs(
      own.words(own.exchange.residual), own.params.dim, own.rows, own.epoch,
      [&](PairPlace place) {
        return Norms{Source{norm.weight, norm.dtype, 2 * place.pair}.fetch(),
                     Source{norm.weight, norm.dtype, 2 * place.pair + 1}.fetch()};
      },
      [&](PairPlace place, uint32_t low_bits, uint32_t high_bits, const Norms& norms) {
        float low = bit_cast<float>(low_bits), high = bit_cast<float>(high_bits);
        if (norm.weight != nullptr) {
          const float squares = fmaf(low, low, high * high);
          float& sum = own.squares(place.row)[threadIdx.x];
          sum = place.pair < kComputeThreads ? squares : sum + squares;
          const float before = own.scale(place.row, layer).before;
          low *= before * norms.low.value(norm.dtype);
          high *= before * norms.high.value(norm.dtype);
        }
        store_pack(activations.data + place.row * activations.pitch + 2 * place.pair,
                   Pack<W, 2>{{from_real<W>(low), from_real<W>(high)}});
      });
}

/// Finds what the sums of rows that were put into the activations are multiplied with, beside the
/// product, by those that do not multiply; and what the next layer's stream is multiplied with.
template <class W, int kRows>
__device__ __forceinline__ void find_norm_scales(const Block<W, kRows>& own, Norm norm, int layer) {
  const int lane = threadIdx.x % kWarpSize;
  const int pairs = static_cast<int>(own.params.dim) / 2;
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / kWarpSize - kProductWarps; row < own.rows;
       row += kFinishWarps) {
    const Scale scale = own.scale(row, layer);
    if (norm.weight == nullptr) {
      own.norm_scale(row) = 1;
      own.scale(row, layer + 1) = scale;
      continue;
    }
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kComputeThreads; i += kWarpSize) {
      if (i + lane < pairs) squares += own.squares(row)[i + lane];
    }
    squares = sum_of_lanes<kWarpSize>(squares);
    const float whole = rsqrtf(fmaf(squares, own.plan.inverse_dim, own.plan.eps));
    own.norm_scale(row) = whole * scale.inverse;
    own.scale(row, layer + 1) = power_of_two(whole);
  }
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
      [&](PairPlace place, uint32_t low, uint32_t high, RawElement) {
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
  fill_normed(own, norm_of(own, layer), layer);
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
    const Norm norm = norm_of(own, 0);
    if (norm.weight == nullptr) return;
    fill_normed(own, norm, 0);
    meet();
    if (!is_multiplier()) find_norm_scales(own, norm, 0);
    meet();
    own.for_each_item(own.rows, [&](int row) { own.scale(row, 0) = own.scale(row, 1); });
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
  const Norm norm = norm_of(own, layer);
  if (norm.weight != nullptr) fill_normed(own, norm, layer);
  meet();
  if (!is_multiplier()) find_norm_scales(own, norm, layer);
  meet();
  own.for_each_item(own.outputs.count * own.rows, [&](int i) {
    const int row = i / own.outputs.count, local = i % own.outputs.count;
    float value = own.residual()[local * kRows + row];
    if (norm.weight != nullptr) {
      value *= own.norm_scale(row) * own.scale(row, layer).before *
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
    sum *= own.norm_scale(row);
    if (product == Product::kHead) return store(own, row, own.matrices.words.first + local, sum);
    if (product == Product::kIn) {
      own.in()[local * kRows + row] = sum;
    } else {
      // Nobody waits for z, so that what becomes of it is done here.
      const float* const bias = own.inputs().acquire(layer) + kZBias * own.channels.count;
      own.gates()[local * kRows + row] = device_silu(sum + bias[local]);
    }
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
  using Sums = TileSums<W, kRows>;
  constexpr int kRoom = Sums::kSummands * kTileRows * kRows;
  if (!is_multiplier() && (product == Product::kIn || product == Product::kHead)) {
    find_norm_scales(own, norm_of(own, layer), layer);
  }
  for_each_tile(matrix, [&](int tile) {
    // Of two rooms one is being read while the other is filled.
    own.is_odd_tile = !own.is_odd_tile;
    float* const room =
        own.template shared<float>(own.plan.shared.sums) + (own.is_odd_tile ? kRoom : 0);
    if (is_multiplier()) {
      Sums sums;
      for_each_stage<W>(matrix, [&](int column, int columns) {
        sums.add(own.ring.acquire(), activations, column, columns, own.rows);
        own.ring.release();
      });
      sums.leave(room, own.rows);
    }
    meet();
    if (is_multiplier()) return;
    finish_tile<Sums::kSummands, kRows>(room, own.rows, [&](int tile_row, int row, float sum) {
      const int local = tile * kTileRows + tile_row;
      if (local < matrix.count) take(own, product, layer, local, row, sum);
    });
  });
}

/// What the threads that compute do.
template <class W, int kRows>
__device__ __forceinline__ void compute(Block<W, kRows>& own) {
  begin(own);
  const int layers = static_cast<int>(own.params.layers);
#pragma unroll 1
  for (int layer = 0; layer < layers; ++layer) {
    const StepLayer& weights = own.args.layers[layer];
    fetch_dt_proj(own, weights);
    multiply(own, Product::kIn, layer);
    convolve(own, weights, layer);
    multiply(own, Product::kZ, layer);
    multiply(own, Product::kX, layer);
    scan(own, weights, own.inputs().acquire(layer));
    own.inputs().release(layer);
    multiply(own, Product::kOut, layer);
    own.epoch += kExchanges;
  }
  if (own.params.head == nullptr) {
    end(own, layers);
  } else {
    multiply(own, Product::kHead, layers);
  }
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
