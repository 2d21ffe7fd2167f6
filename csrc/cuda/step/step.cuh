// A few tokens through a stack of layers, in one launch.
//
// Mapping. As many blocks as the GPU holds at a time, one per multiprocessor, stay for the whole
// stack. A block has some of the layers' inner channels: their rows of in_proj, their convolution,
// their rows of dt_proj, their states and their gate (channels.cuh). It also has some rows of
// x_proj, of out_proj and of the head. It receives the other blocks' parts of a row of activations
// from them (words.cuh), four times per layer: the stream, x, dt with B and C, and y.
//
// A block has 14 warps. 12 compute: 8 of these multiply, while the other 4 finish tiles and do the
// convolution during the product that gives z; all 12 receive and scan. One warp fetches weights
// (ring.cuh), and one fetches the channels' other inputs (inputs.cuh).
//
// Rows are those of all steps and batch entries, and products take them together (products.cuh). In
// the convolution and the scan, which take steps one after another, a thread goes through them. No
// sum depends on the number of rows, or on which block comes first.
//
// Shared memory: SharedLayout. Bound by memory for large layers, and for small ones by four
// exchanges per layer, of about a microsecond each.
#pragma once

#include "channels.cuh"

namespace selective_scan::cuda::step {

// --- the stream ---

/// Returns the power of two in a norm's scale, or 1 if it or its inverse is not a normal number.
__device__ __forceinline__ Scale power_of_two(float scale) {
  constexpr uint32_t kExponent = 0x7f800000, kBoth = 0x7f000000;
  const uint32_t exponent = bit_cast<uint32_t>(scale) & kExponent;
  if (exponent == 0 || exponent >= kBoth) return {1, 1};
  return {bit_cast<float>(exponent), bit_cast<float>(kBoth - exponent)};
}

/// Returns the factor of a row's norm, without its weight.
template <class W, int kRows>
__device__ __forceinline__ float norm_scale_of(const Block<W, kRows>& own, float squares) {
  return rsqrtf(fmaf(squares, own.plan.inverse_dim, own.plan.eps));
}

/// Stores an own channel of a row of the stream before `layer`, and sends it in the form that the
/// layer's product takes. Threads call this as in TileResults.
template <class W, int kRows>
__device__ __forceinline__ void put_stream(const Block<W, kRows>& own, int layer, Cell result,
                                           float value, float norm_weight, uint32_t epoch) {
  const auto [local, row, exists] = result;
  if (exists) own.residual()[value_index<kRows>(local, row)] = value;
  float squares = value * value;
  const auto add_other = [&](int stride) {
    squares += __shfl_xor_sync(kFullMask, squares, stride);
  };
  if (has_norm(own.args, layer)) value *= own.scale(row, layer).before * norm_weight;
  const float next = __shfl_xor_sync(kFullMask, value, 1);
  add_other(1);
  StreamWord word;
  constexpr int kValues = 2 * Block<W, kRows>::kWordValues;
  if constexpr (kValues == 4) {
    word.low = bit_cast<uint32_t>(Pack<W, 2>{{to_element<W>(value), to_element<W>(next)}});
    word.high = __shfl_xor_sync(kFullMask, word.low, 2);
    add_other(2);
  } else {
    word.low = bit_cast<uint32_t>(value);
    word.high = bit_cast<uint32_t>(next);
  }
  word.signed_squares = StreamWord::signed_bits(squares);
  word.epoch = epoch;
  if (!exists || local % kValues != 0) return;
  auto* const words = reinterpret_cast<StreamWord*>(own.words(own.exchange.stream));
  send(words + row * own.plan.stream_pairs.count + (own.outputs.first + local) / kValues, word);
}

/// Finds the factors of the product's sums from the rows' norms, and the scales of the next layer's
/// stream. The warps that do not multiply call this during the product. Each row has some of their
/// lanes, so that all rows are found at once; the lanes add in the same order as a whole warp
/// would.
template <class W, int kRows>
__device__ __forceinline__ void find_norm_scales(const Block<W, kRows>& own, int layer) {
  constexpr int kLanes = kFinishThreads / kRows, kParts = kWarpSize / kLanes;
  const int thread = static_cast<int>(threadIdx.x) - kProductThreads;
  const int row = thread / kLanes, words = own.plan.stream_pairs.count;
  const bool exists = row < own.rows;
  if (!__any_sync(kFullMask, exists)) return;
  const Scale scale = own.scale(row, layer);
  if (!has_norm(own.args, layer)) {
    if (!exists) return;
    own.norm_scale(row) = 1;
    own.scale(row, layer + 1) = scale;
    return;
  }
  const float* const of_row = own.squares() + (exists ? row * words : 0);
  float squares[kParts] = {};
#pragma unroll 2
  for (int first = thread % kLanes; first < words; first += kWarpSize) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int i = first + part * kLanes;
      if (i < words) squares[part] += of_row[i];
    }
  }
#pragma unroll
  for (int stride = kParts / 2; stride > 0; stride /= 2) {
#pragma unroll
    for (int part = 0; part < stride; ++part) squares[part] += squares[part + stride];
  }
  const float whole = norm_scale_of(own, sum_of_lanes<kLanes>(squares[0]));
  if (!exists) return;
  own.norm_scale(row) = whole * scale.inverse;
  own.scale(row, layer + 1) = power_of_two(whole);
}

/// Stores to the activations four values of two bytes, or two floats, that blocks have sent.
template <class W, int kRows>
__device__ __forceinline__ void put_activations(const Block<W, kRows>& own, RowPairs of_row,
                                                int pair, uint32_t low, uint32_t high) {
  constexpr int kPairBytes = 2 * static_cast<int>(sizeof(uint32_t));
  auto* const target = reinterpret_cast<char*>(own.activations().data);
  const int row_bytes = own.plan.activation_pitch * static_cast<int>(sizeof(W));
  const int row = static_cast<int>(__umulhi(pair, of_row.inverse));
  const int padding = row * (row_bytes - of_row.count * kPairBytes);
  store_pack(reinterpret_cast<uint32_t*>(target + padding + pair * kPairBytes),
             Pack<uint32_t, 2>{{low, high}});
}

/// Receives x or y in the form that a product takes.
template <class W, int kRows>
__device__ __forceinline__ void receive_inner(const Block<W, kRows>& own, int64_t offset,
                                              uint32_t epoch) {
  const RowPairs of_row = own.plan.inner_pairs;
  receive(reinterpret_cast<const WordPair*>(own.words(offset)), own.rows * of_row.count, epoch,
          [&](int index, const WordPair& words) {
            put_activations(own, of_row, index, value_of(words.low), value_of(words.high));
          });
  meet();
}

/// Receives the stream in the form that the product of a layer, or of the head, takes. The norm's
/// scales are found during the product.
template <class W, int kRows>
__device__ __forceinline__ void receive_stream(const Block<W, kRows>& own, int layer) {
  const RowPairs of_row = own.plan.stream_pairs;
  receive(reinterpret_cast<const StreamWord*>(own.words(own.exchange.stream)),
          own.rows * of_row.count, own.epoch, [&](int index, const StreamWord& word) {
            put_activations(own, of_row, index, word.low, word.high);
            own.squares()[index] = word.squares();
          });
  meet();
  if (!is_multiplier()) find_norm_scales(own, layer);
}

/// Starts the stack: sends its input as the first layer's stream.
template <class W, int kRows>
__device__ __forceinline__ void begin(Block<W, kRows>& own) {
  const ArrayView& hidden = own.params.hidden;
  const int64_t steps = own.params.steps;
  const Norm norm = norm_of(own.args, 0);
  const auto value_at = [&](int row, int channel) {
    const int64_t at =
        row / steps * hidden.batch + row % steps * hidden.step + channel * hidden.channel;
    return RawElement(hidden.data, hidden.dtype, at).value(hidden.dtype);
  };
  const int lane = threadIdx.x % kWarpSize;
  for (int row = static_cast<int>(threadIdx.x) / kWarpSize; row < own.rows; row += kComputeWarps) {
    Scale scale{1, 1};
    // Only float16 cannot hold every possible stream without its norm's scale.
    if (std::is_same_v<W, Half> && norm.weight != nullptr) {
      float squares = 0;
      for (int i = lane; i < own.params.dim; i += kWarpSize) {
        const float value = value_at(row, i);
        squares = fmaf(value, value, squares);
      }
      scale = power_of_two(norm_scale_of(own, sum_of_lanes<kWarpSize>(squares)));
    }
    if (lane == 0) own.scale(row, 0) = scale;
  }
  meet();
  if (!is_multiplier()) {
    for_each_tile(own.matrices.of(Product::kOut, 0), [&](int tile) {
      TileResults<kRows>{tile, own.outputs.count, own.rows}.for_each(
          [&](const Cell& cell) {
            return cell.exists ? value_at(cell.row, own.outputs.first + cell.local) : 0.0f;
          },
          [&](const Cell& cell, float value) {
            const int channel = own.outputs.first + cell.local;
            const float weight =
                cell.exists ? Source{norm.weight, norm.dtype, channel}.fetch().value(norm.dtype)
                            : 0;
            put_stream(own, 0, cell, value, weight, own.epoch + kStream);
          });
    });
  }
  own.epoch += kExchanges;
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

/// Ends the stack if there is no head, after receive_stream() if there is a norm.
template <class W, int kRows>
__device__ __forceinline__ void end(const Block<W, kRows>& own, int layer) {
  const Norm norm = norm_of(own.args, layer);
  meet();
  own.for_each_item(own.outputs.count * own.rows, [&](int i) {
    const int row = i / own.outputs.count, local = i % own.outputs.count;
    float value = own.residual()[value_index<kRows>(local, row)];
    if (norm.weight != nullptr) {
      value *= own.norm_scale(row) * own.scale(row, layer).before *
               RawElement(norm.weight, norm.dtype, own.outputs.first + local).value(norm.dtype);
    }
    store(own, row, own.outputs.first + local, value);
  });
}

// --- products ---

/// Takes the result of a row of a matrix and a row of activations. Threads call this as in
/// TileResults.
template <class W, int kRows>
__device__ __forceinline__ void take(const Block<W, kRows>& own, Product product, int layer,
                                     Cell result, float sum) {
  const auto [local, row, exists] = result;
  if (product == Product::kOut) {
    const float* const given = own.inputs().acquire_outputs(layer) + (exists ? local : 0);
    sum += given[kOutBias * own.outputs.count];
    if (exists && has_norm(own.args, layer)) sum += own.residual()[value_index<kRows>(local, row)];
    put_stream(own, layer + 1, result, sum, given[kNextNorm * own.outputs.count],
               own.epoch + kStream);
    return;
  }
  if (!exists) return;
  if (product == Product::kX) {
    const int projection = own.matrices.projections.first + local;
    send(own.words(own.exchange.projections) + projection * kRows + row, sum,
         own.epoch + kProjections);
  } else {
    sum *= own.norm_scale(row);
    if (product == Product::kHead) return store(own, row, own.matrices.words.first + local, sum);
    if (product == Product::kIn) {
      own.in()[value_index<kRows>(local, row)] = sum;
    } else {
      // Nobody waits for z, so its gate is computed here.
      const float* const bias = own.inputs().acquire(layer) + kZBias * own.channels.count;
      own.gates()[value_index<kRows>(local, row)] = device_silu(sum + bias[local]);
    }
  }
}

/// Multiplies the rows with a matrix and passes the results to take(). When a thread returns, the
/// results of other threads may still be missing.
template <class W, int kRows>
__device__ __forceinline__ void multiply(Block<W, kRows>& own, Product product, int layer) {
  const MatrixRows matrix = own.matrices.of(product, layer);
  if (matrix.count == 0) return;
  const Activations<W> activations = own.activations();
  using Sums = TileSums<W, kRows>;
  constexpr int kRoom = Sums::kSummands * kTileRows * row_pitch(kRows);
  for_each_tile(matrix, [&](int tile) {
    // One of two rooms is read while the other is filled.
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
    TileResults<kRows>{tile, matrix.count, own.rows}.for_each(
        [&](const Cell& cell) {
          return tile_sum<Sums::kSummands, kRows>(room, cell.local % kTileRows, cell.row);
        },
        [&](const Cell& cell, float sum) { take(own, product, layer, cell, sum); });
  });
}

/// Runs the compute threads.
template <int kEntries, class W, int kRows>
__device__ __forceinline__ void compute(Block<W, kRows>& own) {
  begin(own);
  const int layers = static_cast<int>(own.params.layers);
  const bool has_head = own.params.head != nullptr;
#pragma unroll 1
  for (int layer = 0;; ++layer) {
    if (layer == layers && !has_head && !has_norm(own.args, layer)) break;
    if (layer < layers) fetch_dt_proj(own, own.args.layers[layer]);
    // Reading the stream before the block has sent its own part would hinder the blocks that send.
    meet();
    receive_stream(own, layer);
    if (layer == layers) break;
    const StepLayer& weights = own.args.layers[layer];
    multiply(own, Product::kIn, layer);
    convolve(own, weights, layer);
    multiply(own, Product::kZ, layer);
    if (own.matrices.projections.count > 0) {
      receive_inner(own, own.exchange.x, own.epoch + kX);
    }
    multiply(own, Product::kX, layer);
    scan<kEntries>(own, weights, own.inputs().acquire(layer));
    // The same holds for y, unless there is so much of it that some can be received meanwhile.
    if (own.rows * own.plan.inner_pairs.count <= 2 * kComputeThreads) meet();
    receive_inner(own, own.exchange.y, own.epoch + kY);
    multiply(own, Product::kOut, layer);
    own.inputs().release(layer);
    own.epoch += kExchanges;
  }
  if (has_head) {
    multiply(own, Product::kHead, layers);
  } else {
    end(own, layers);
  }
  // Every block has sent by now, so it has read the epoch before the epoch changes.
  if (blockIdx.x == 0 && threadIdx.x == 0) *own.words(ExchangeLayout::kEpoch) = own.epoch;
}

template <class W, int kRows, int kEntries>
__global__ void __launch_bounds__(kThreads, 1) step_kernel(const __grid_constant__ StepArgs args) {
  if constexpr (!kHasAsyncCopies) return;
  const BlockMatrices<W> matrices(args, static_cast<int>(blockIdx.x));
  WeightRing ring(args.plan);
  const BlockInputs inputs(matrices);
  if (threadIdx.x == 0) {
    ring.initialize();
    inputs.initialize();
  }
  __syncthreads();
  if (threadIdx.x < kComputeThreads) {
    Block<W, kRows> own(matrices, ring);
    compute<kEntries>(own);
  } else if (threadIdx.x < kComputeThreads + kWarpSize) {
    fetch_weights(matrices, ring);
  } else {
    fetch_inputs(args, matrices.channels, inputs);
  }
}

}  // namespace selective_scan::cuda::step
