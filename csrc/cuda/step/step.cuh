// A few tokens through a stack of layers, in one launch.
//
// Mapping. As many blocks as the GPU holds at a time, one a multiprocessor, stay for the whole
// stack. A block has some channels of the layers' inside: of them it has the rows of in_proj, the
// convolution, the rows of dt_proj, the states, and their gate. It has some rows of x_proj, of
// out_proj and of the head, too. What a row of activations is made of by others it receives from
// them (exchange.cuh), four times a layer: the stream's residual, x, dt with B and C, and y. Within
// a block 8 warps compute and one fetches weights (ring.cuh).
//
// Rows are those of all steps and batch entries; products take them together. Where steps follow
// one another, in the convolution and the scan, a thread goes through them.
//
// Shared memory: SharedLayout. Bound by: memory, for large layers; for small ones by four exchanges
// a layer, of about a microsecond each.
#pragma once

#include "../../core/method_table.h"
#include "../kit/states.cuh"
#include "exchange.cuh"
#include "kernels.h"
#include "products.cuh"

namespace selective_scan::cuda::step {

/// Exchanges of a layer, in their order.
enum Exchange : uint32_t { kX = 1, kProjections, kY, kResidual };
constexpr uint32_t kExchanges = 4;

/// Calls f.operator()<kMethod>() for a method that is known at run time.
template <class F>
__device__ __forceinline__ void with_method(Method method, const F& f) {
  const auto call = [&]<int kIndex>() {
    constexpr auto kMethod = static_cast<Method>(kIndex);
    if constexpr (is_built(kMethod)) {
      if (method == kMethod) f.template operator()<kMethod>();
    }
  };
  [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
    (call.template operator()<kIndices>(), ...);
  }(std::make_integer_sequence<int, kNumMethods>());
}

/// The rows of matrices that a block has.
template <class W>
struct BlockMatrices {
  const StepArgs& args;
  int block;
  Share channels;

  __device__ __forceinline__ BlockMatrices(const StepArgs& args, int block)
      : args(args),
        block(block),
        channels(channels_of(args.params.inner, block, args.plan.blocks)) {}

  __device__ __forceinline__ MatrixRows in_proj(int layer) const {
    const auto* const data = static_cast<const W*>(args.layers[layer].in_proj);
    const int64_t dim = args.params.dim;
    const W* const x = data + channels.first * dim;
    return {reinterpret_cast<const char*>(x),
            reinterpret_cast<const char*>(x + args.params.inner * dim), channels.count,
            2 * channels.count, static_cast<int>(dim)};
  }
  __device__ __forceinline__ MatrixRows x_proj(int layer) const {
    return part_of(args.layers[layer].x_proj, own_projections(), args.params.inner);
  }
  __device__ __forceinline__ MatrixRows out_proj(int layer) const {
    return part_of(args.layers[layer].out_proj, own_outputs(), args.params.inner);
  }
  __device__ __forceinline__ MatrixRows head() const {
    return part_of(args.params.head, own_words(), args.params.dim);
  }

  __device__ __forceinline__ Share own_projections() const {
    return share_of(args.params.projections(), block, args.plan.blocks);
  }
  __device__ __forceinline__ Share own_outputs() const {
    return share_of(args.params.dim, block, args.plan.blocks);
  }
  __device__ __forceinline__ Share own_words() const {
    return share_of(args.params.vocabulary, block, args.plan.blocks);
  }

 private:
  __device__ __forceinline__ MatrixRows part_of(const void* matrix, Share rows,
                                                int64_t columns) const {
    const W* const first = static_cast<const W*>(matrix) + rows.first * columns;
    return {reinterpret_cast<const char*>(first), nullptr, rows.count, rows.count,
            static_cast<int>(columns)};
  }
};

/// What the warp that fetches does.
template <class W>
__device__ __forceinline__ void fetch_weights(const BlockMatrices<W>& matrices, WeightRing& ring) {
  const StepArgs& args = matrices.args;
  const auto fetch = [&](const MatrixRows& rows) {
    for_each_stage<W>(rows, [&](int /*group*/, int tile, int column, int columns) {
      ring.fetch<W>(rows, tile, column, columns);
    });
  };
  const int lane = threadIdx.x % kWarpSize;
  for (int layer = 0; layer < args.params.layers; ++layer) {
    prefetch_states(matrices, layer, lane);
    fetch(matrices.in_proj(layer));
    fetch(matrices.x_proj(layer));
    fetch(matrices.out_proj(layer));
  }
  if (args.params.head != nullptr) fetch(matrices.head());
}

/// Asks for what threads are going to read of a layer by themselves.
template <class W>
__device__ __forceinline__ void prefetch_states(const BlockMatrices<W>& matrices, int layer,
                                                int lane) {
  const StepParams& params = matrices.args.params;
  const StepLayer& own = matrices.args.layers[layer];
  const auto prefetch = [&](const void* data, DType dtype, int64_t first, int64_t count) {
    const char* const begin = static_cast<const char*>(data) + first * element_size(dtype);
    const int64_t bytes = count * element_size(dtype);
    constexpr int kLine = 128;
    for (int64_t at = lane * kLine; at < bytes; at += kWarpSize * kLine) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(begin + at));
    }
  };
  const Share channels = matrices.channels;
  prefetch(own.A_log, params.A_dtype, channels.first * params.dstate,
           channels.count * params.dstate);
  prefetch(own.conv, params.weight_dtype, channels.first * params.width,
           channels.count * params.width);
  if (params.state.state != 1 || params.state.channel != params.dstate) return;
  for (int64_t entry = 0; entry < params.batch; ++entry) {
    const int64_t slot = params.slot(entry);
    if (slot == StepParams::kNoSlot) continue;
    prefetch(own.state, params.state.dtype,
             slot * params.state.batch + channels.first * params.state.channel,
             channels.count * params.dstate);
  }
}

/// What the threads that compute do.
template <class W, int kRows>
class Stack {
  static constexpr bool kIsPacked = sizeof(W) == 2;  // two values a word

 public:
  __device__ __forceinline__ Stack(const BlockMatrices<W>& matrices, const WeightRing& ring,
                                   char* shared)
      : args_(matrices.args),
        params_(matrices.args.params),
        matrices_(matrices),
        ring_(ring),
        channels_(matrices.channels),
        outputs_(matrices.own_outputs()),
        rows_(static_cast<int>(matrices.args.params.rows())),
        activations_{reinterpret_cast<W*>(shared + args_.plan.shared.activations),
                     args_.plan.columns + 16 / static_cast<int>(sizeof(W))},
        sums_(floats(shared, args_.plan.shared.sums)),
        xz_(floats(shared, args_.plan.shared.xz)),
        x_(floats(shared, args_.plan.shared.x)),
        y_(floats(shared, args_.plan.shared.y)),
        projections_(floats(shared, args_.plan.shared.projections)),
        residual_(floats(shared, args_.plan.shared.residual)),
        scale_(floats(shared, args_.plan.shared.scale)),
        dt_proj_(reinterpret_cast<W*>(shared + args_.plan.shared.dt_proj)),
        words_(static_cast<Word*>(args_.workspace)),
        epoch_(static_cast<uint32_t>(read_word(words_ + args_.plan.exchange.epoch))) {}

  __device__ __forceinline__ void run() {
    begin();
    for (int layer = 0; layer < params_.layers; ++layer) {
      fetch_dt_proj(layer);
      find_x(layer);
      find_projections(layer);
      scan(layer);
      find_residual(layer);
      epoch_ += kExchanges;
    }
    end();
    // By now every block has sent, and so has read the number before it changes.
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      words_[args_.plan.exchange.epoch] = epoch_;
    }
  }

 private:
  static __device__ __forceinline__ float* floats(char* shared, int at) {
    return reinterpret_cast<float*>(shared + at);
  }
  __device__ __forceinline__ bool has_norm() const { return args_.layers[0].norm != nullptr; }
  __device__ __forceinline__ int64_t hidden_offset(int row) const {
    return row / params_.steps * params_.hidden.batch + row % params_.steps * params_.hidden.step;
  }
  __device__ __forceinline__ float hidden(int row, int64_t channel) const {
    return load_element<float>(params_.hidden.data, params_.hidden.dtype,
                               hidden_offset(row) + channel * params_.hidden.channel);
  }
  static __device__ __forceinline__ float optional(const void* vector, DType dtype, int64_t at) {
    return vector == nullptr ? 0.0f : load_element<float>(vector, dtype, at);
  }
  template <class Finish>
  static __device__ __forceinline__ void for_each_item(int count, const Finish& visit) {
    for (int i = threadIdx.x; i < count; i += kComputeThreads) visit(i);
  }
  __device__ __forceinline__ Word* words_at(int64_t offset) const { return words_ + offset; }
  __device__ __forceinline__ float scale_of(float squares) const {
    return rsqrtf(squares / static_cast<float>(params_.dim) + static_cast<float>(params_.eps));
  }

  /// The stream as it comes: own channels, and the scale of its rows.
  __device__ __forceinline__ void begin() {
    for_each_item(outputs_.count * rows_, [&](int i) {
      const int channel = i / rows_, row = i % rows_;
      residual_[channel * kRows + row] = hidden(row, outputs_.first + channel);
    });
    const int lane = threadIdx.x % kWarpSize;
    for (int row = threadIdx.x / kWarpSize; row < rows_; row += kComputeWarps) {
      float squares = 0;
      for (int64_t k = lane; k < params_.dim; k += kWarpSize) {
        const float value = hidden(row, k);
        squares = fmaf(value, value, squares);
      }
      squares = sum_of_warp(squares);
      if (lane == 0) scale_[row] = has_norm() ? scale_of(squares) : 1.0f;
    }
  }
  static __device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
      value += __shfl_xor_sync(kFullMask, value, mask);
    }
    return value;
  }

  /// Starts copying the block's rows of dt_proj.
  __device__ __forceinline__ void fetch_dt_proj(int layer) {
    constexpr int kAccess = 8;
    const auto* const source = reinterpret_cast<const char*>(
        static_cast<const W*>(args_.layers[layer].dt_proj) + channels_.first * params_.rank);
    const int bytes =
        channels_.count * static_cast<int>(params_.rank) * static_cast<int>(sizeof(W));
    for (int at = threadIdx.x * kAccess; at < bytes; at += kComputeThreads * kAccess) {
      __pipeline_memcpy_async(reinterpret_cast<char*>(dt_proj_) + at, source + at, kAccess);
    }
    __pipeline_commit();
  }

  /// Receives the scale of the stream's rows.
  __device__ __forceinline__ void receive_scale() {
    constexpr int kBatch = 5;  // 132 blocks are one
    const int lane = threadIdx.x % kWarpSize;
    const int blocks = args_.plan.blocks;
    for (int row = threadIdx.x / kWarpSize; row < rows_; row += kComputeWarps) {
      const Word* const words = words_at(args_.plan.exchange.squares) + row * blocks;
      float squares = 0;
      for (int first = lane; first < blocks; first += kBatch * kWarpSize) {
        Word batch[kBatch];
        bool is_complete;
        do {
          is_complete = true;
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const int block = first + i * kWarpSize;
            batch[i] = block < blocks ? read_word(words + block) : make_word(0, epoch_);
          }
#pragma unroll
          for (int i = 0; i < kBatch; ++i) is_complete &= has_arrived(batch[i], epoch_);
        } while (!is_complete);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          squares += bit_cast<float>(static_cast<uint32_t>(batch[i]));
        }
      }
      squares = sum_of_warp(squares);
      if (lane == 0) scale_[row] = scale_of(squares);
    }
    meet();
  }

  /// Puts columns of the normed stream into the activations; `is_first`: of hidden. Else the scale
  /// of the rows is received beside the first of them.
  __device__ __forceinline__ void fill_normed(bool is_first, const void* norm, DType norm_dtype,
                                              int first, int count) {
    const auto put = [&](int row, int pair, float low, float high) {
      const int column = first + 2 * pair;
      float factors[2] = {scale_[row], scale_[row]};
      if (norm != nullptr) {
        factors[0] *= load_element<float>(norm, norm_dtype, column);
        factors[1] *= load_element<float>(norm, norm_dtype, column + 1);
      }
      store_pack(activations_.data + row * activations_.pitch + 2 * pair,
                 Pack<W, 2>{{from_real<W>(low * factors[0]), from_real<W>(high * factors[1])}});
    };
    const int pairs = count / 2;
    if (is_first) {
      for_each_item(rows_ * pairs, [&](int i) {
        const int row = i / pairs, pair = i % pairs;
        put(row, pair, hidden(row, first + 2 * pair), hidden(row, first + 2 * pair + 1));
      });
      return;
    }
    receive_pairs(
        words_at(args_.plan.exchange.residual) + first, params_.dim, rows_, pairs, epoch_,
        [&] {
          if (first == 0 && norm != nullptr) receive_scale();
        },
        [&](int row, int pair, uint32_t low, uint32_t high) {
          put(row, pair, bit_cast<float>(low), bit_cast<float>(high));
        });
  }

  /// Puts columns of x or y, as blocks have sent it, into the activations.
  __device__ __forceinline__ void fill_sent(int64_t offset, uint32_t epoch, int first, int count) {
    constexpr int kValues = kIsPacked ? 2 : 1;  // of a word
    const int64_t pitch = params_.inner / kValues;
    receive_pairs(
        words_at(offset) + first / kValues, pitch, rows_, count / (2 * kValues), epoch, [] {},
        [&](int row, int pair, uint32_t low, uint32_t high) {
          W* const target = activations_.data + row * activations_.pitch + pair * 2 * kValues;
          store_pack(reinterpret_cast<uint32_t*>(target), Pack<uint32_t, 2>{{low, high}});
        });
  }
  /// Sends own channels of x or y, which lie in `values`.
  __device__ __forceinline__ void send_channels(int64_t offset, uint32_t epoch,
                                                const float* values) {
    constexpr int kValues = kIsPacked ? 2 : 1;
    const int count = channels_.count / kValues;
    const int64_t pitch = params_.inner / kValues;
    for_each_item(rows_ * count, [&](int i) {
      const int row = i / count, at = i % count;
      Word* const target = words_at(offset) + row * pitch + channels_.first / kValues + at;
      const float* const value = values + at * kValues * kRows + row;
      if constexpr (kIsPacked) {
        const Pack<W, 2> pair{{from_real<W>(value[0]), from_real<W>(value[kRows])}};
        send(target, bit_cast<uint32_t>(pair), epoch);
      } else {
        send(target, value[0], epoch);
      }
    });
  }

  template <class Fill, class Finish>
  __device__ __forceinline__ void product(const MatrixRows& matrix, const Fill& fill,
                                          const Finish& finish) {
    multiply<W, kRows>(matrix, ring_, activations_, args_.plan.columns, sums_, rows_, fill, finish);
    meet();
  }

  // --- the parts of a layer ---

  /// x and z of own channels, and x behind its convolution, which is sent.
  __device__ __forceinline__ void find_x(int layer) {
    const StepLayer& own = args_.layers[layer];
    product(
        matrices_.in_proj(layer),
        [&](int first, int count) {
          fill_normed(layer == 0, own.norm, params_.norm_dtype, first, count);
        },
        [&](int local, int row, float value) {
          const int64_t channel = local < channels_.count
                                      ? channels_.first + local
                                      : params_.inner + channels_.first + local - channels_.count;
          xz_[local * kRows + row] = value + optional(own.in_bias, params_.bias_dtype, channel);
        });
    for_each_item(channels_.count * static_cast<int>(params_.batch),
                  [&](int i) { convolve(own, i % channels_.count, i / channels_.count); });
    meet();
    send_channels(args_.plan.exchange.x, epoch_ + kX, x_);
  }

  __device__ __forceinline__ void convolve(const StepLayer& layer, int local, int entry) {
    constexpr int kMostTaps = 8;
    const int width = static_cast<int>(params_.width);
    const int64_t channel = channels_.first + local;
    const int64_t slot = params_.slot(entry);
    const int64_t offset = slot * params_.conv_state.batch + channel * params_.conv_state.channel;
    const W* const weights = static_cast<const W*>(layer.conv) + channel * width;
    const bool has_state = slot != StepParams::kNoSlot;
    // The last tap is that of the step itself.
    float taps[kMostTaps], seen[kMostTaps];
#pragma unroll
    for (int k = 0; k < kMostTaps; ++k) {
      const int at = k - (kMostTaps - width);
      taps[k] = at >= 0 ? to_real(weights[at]) : 0.0f;
      seen[k] = at >= 0 && k < kMostTaps - 1 && has_state
                    ? load_element<float>(layer.conv_state, params_.conv_state.dtype,
                                          offset + at * params_.conv_state.step)
                    : 0.0f;
    }
    const float bias = optional(layer.conv_bias, params_.conv_bias_dtype, channel);
    for (int step = 0; step < params_.steps; ++step) {
      const int row = entry * static_cast<int>(params_.steps) + step;
      seen[kMostTaps - 1] = xz_[local * kRows + row];
      float sum = bias;
#pragma unroll
      for (int k = 0; k < kMostTaps; ++k) sum = fmaf(taps[k], seen[k], sum);
      x_[local * kRows + row] = sum * device_sigmoid(sum);
#pragma unroll
      for (int k = 0; k + 1 < kMostTaps; ++k) seen[k] = seen[k + 1];
    }
    if (!has_state) return;
#pragma unroll
    for (int k = 0; k < kMostTaps - 1; ++k) {
      const int at = k - (kMostTaps - width);
      if (at < 0) continue;
      store_element(layer.conv_state, params_.conv_state.dtype,
                    offset + at * params_.conv_state.step, seen[k]);
    }
  }

  /// Own rows of x_proj, whose results are sent.
  __device__ __forceinline__ void find_projections(int layer) {
    const MatrixRows matrix = matrices_.x_proj(layer);
    const int first_row = matrices_.own_projections().first;
    const int64_t count = params_.projections();
    product(
        matrix,
        [&](int first, int columns) {
          fill_sent(args_.plan.exchange.x, epoch_ + kX, first, columns);
        },
        [&](int local, int row, float value) {
          send(words_at(args_.plan.exchange.projections) + row * count + first_row + local, value,
               epoch_ + kProjections);
        });
  }

  /// y of own channels, which is sent.
  __device__ __forceinline__ void scan(int layer) {
    const int count = static_cast<int>(params_.projections());
    receive(words_at(args_.plan.exchange.projections), rows_ * count, epoch_ + kProjections,
            [&](int index, uint32_t value) {
              projections_[index % count * kRows + index / count] = bit_cast<float>(value);
            });
    __pipeline_wait_prior(0);
    meet();
    with_method(params_.method, [&]<Method kMethod>() { scan_by<kMethod>(args_.layers[layer]); });
    meet();
    send_channels(args_.plan.exchange.y, epoch_ + kY, y_);
  }

  /// Four lanes share a channel's states.
  template <Method kMethod>
  __device__ __forceinline__ void scan_by(const StepLayer& layer) {
    constexpr int kLanes = 4;
    constexpr int kMost = kMaxStates / kLanes;
    const int lane = threadIdx.x % kLanes;
    const int items = channels_.count * static_cast<int>(params_.batch);
    const int dstate = static_cast<int>(params_.dstate), rank = static_cast<int>(params_.rank);
    const int own = ceil_div(dstate, kLanes);
    for (int first = 0; first < items; first += kComputeThreads / kLanes) {
      const int item = first + static_cast<int>(threadIdx.x) / kLanes;
      const bool exists = item < items;
      const int local = exists ? item % channels_.count : 0;
      const int entry = exists ? item / channels_.count : 0;
      const int64_t channel = channels_.first + local;
      const int64_t slot = params_.slot(entry);
      const bool has_state = exists && slot != StepParams::kNoSlot;
      const int64_t offset = slot * params_.state.batch + channel * params_.state.channel;
      Pole<float> poles[kMost];
      float h[kMost];
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        const int n = lane * own + i;
        const bool is_own = i < own && n < dstate;
        const float A_log =
            is_own ? load_element<float>(layer.A_log, params_.A_dtype, channel * dstate + n) : 0;
        poles[i] = make_pole<DeviceMath>(-DeviceMath::exp(A_log), params_.method);
        h[i] = is_own && has_state ? load_element<float>(layer.state, params_.state.dtype,
                                                         offset + n * params_.state.state)
                                   : 0.0f;
      }
      const float bias = optional(layer.dt_bias, params_.dt_bias_dtype, channel);
      const float D = load_element<float>(layer.D, params_.D_dtype, channel);
      for (int step = 0; step < params_.steps; ++step) {
        const int row = entry * static_cast<int>(params_.steps) + step;
        float dt = 0;
        for (int r = lane; r < rank; r += kLanes) {
          dt = fmaf(to_real(dt_proj_[local * rank + r]), projections_[r * kRows + row], dt);
        }
        const float delta = step_size(sum_of_lanes(dt) + bias, params_.delta_softplus);
        const float x = x_[local * kRows + row];
        float y = 0;
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
          const int n = lane * own + i;
          if (i >= own || n >= dstate) continue;
          const float* const B = projections_ + (rank + n) * kRows + row;
          const auto value = coefficients<kMethod>(delta, poles[i]);
          h[i] = value.abar * h[i] + held_input<kMethod>(delta, x, value) * B[0];
          y = fmaf(B[dstate * kRows], h[i], y);
        }
        y = sum_of_lanes(y);
        const float z = xz_[(channels_.count + local) * kRows + row];
        if (lane == 0 && exists) {
          y_[local * kRows + row] = fmaf(D, x, y) * (z * device_sigmoid(z));
        }
      }
      if (!has_state) continue;
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        const int n = lane * own + i;
        if (i >= own || n >= dstate) continue;
        store_element(layer.state, params_.state.dtype, offset + n * params_.state.state, h[i]);
      }
    }
  }
  static __device__ __forceinline__ float sum_of_lanes(float value) {
    value += __shfl_xor_sync(kFullMask, value, 1);
    return value + __shfl_xor_sync(kFullMask, value, 2);
  }

  /// Own channels of the stream, which are sent with the sum of their squares.
  __device__ __forceinline__ void find_residual(int layer) {
    const StepLayer& own = args_.layers[layer];
    product(
        matrices_.out_proj(layer),
        [&](int first, int count) { fill_sent(args_.plan.exchange.y, epoch_ + kY, first, count); },
        [&](int local, int row, float value) {
          value += optional(own.out_bias, params_.bias_dtype, outputs_.first + local);
          float& residual = residual_[local * kRows + row];
          residual = has_norm() ? residual + value : value;
        });
    const uint32_t epoch = epoch_ + kResidual;
    for_each_item(outputs_.count * rows_, [&](int i) {
      const int row = i / outputs_.count, local = i % outputs_.count;
      send(words_at(args_.plan.exchange.residual) + row * params_.dim + outputs_.first + local,
           residual_[local * kRows + row], epoch);
    });
    for_each_item(rows_, [&](int row) {
      float squares = 0;
      for (int local = 0; local < outputs_.count; ++local) {
        const float value = residual_[local * kRows + row];
        squares = fmaf(value, value, squares);
      }
      send(words_at(args_.plan.exchange.squares) + row * args_.plan.blocks + blockIdx.x, squares,
           epoch);
    });
  }

  /// The results.
  __device__ __forceinline__ void end() {
    const auto store = [&](int row, int64_t channel, float value) {
      const int64_t entry = row / params_.steps;
      const bool is_padding = params_.slot(entry) == StepParams::kNoSlot;
      store_element(params_.out.data, params_.out.dtype,
                    entry * params_.out.batch + row % params_.steps * params_.out.step +
                        channel * params_.out.channel,
                    is_padding ? 0.0f : value);
    };
    const void* const norm = params_.final_norm;
    if (params_.head != nullptr) {
      if (norm == nullptr) {
        for_each_item(rows_, [&](int row) { scale_[row] = 1.0f; });
      }
      const int first_word = matrices_.own_words().first;
      product(
          matrices_.head(),
          [&](int first, int count) {
            fill_normed(false, norm, params_.final_norm_dtype, first, count);
          },
          [&](int local, int row, float value) { store(row, first_word + local, value); });
      return;
    }
    if (norm != nullptr) receive_scale();
    for_each_item(outputs_.count * rows_, [&](int i) {
      const int row = i / outputs_.count, local = i % outputs_.count;
      float value = residual_[local * kRows + row];
      if (norm != nullptr) {
        value *= scale_[row] *
                 load_element<float>(norm, params_.final_norm_dtype, outputs_.first + local);
      }
      store(row, outputs_.first + local, value);
    });
  }

  const StepArgs& args_;
  const StepParams& params_;
  const BlockMatrices<W>& matrices_;
  WeightRing ring_;
  Share channels_;
  Share outputs_;
  int rows_;
  Activations<W> activations_;
  float* sums_;
  float* xz_;
  float* x_;
  float* y_;
  float* projections_;
  float* residual_;
  float* scale_;
  W* dt_proj_;
  Word* words_;
  uint32_t epoch_;  // of the last exchange that is complete
};

template <class W, int kRows>
__global__ void __launch_bounds__(kThreads, 1) step_kernel(const __grid_constant__ StepArgs args) {
  extern __shared__ __align__(128) char shared[];
  WeightRing ring(shared, args.plan);
  if (threadIdx.x == 0) ring.initialize();
  __syncthreads();
  const BlockMatrices<W> matrices(args, static_cast<int>(blockIdx.x));
  if (threadIdx.x >= kComputeThreads) {
    fetch_weights(matrices, ring);
  } else {
    Stack<W, kRows>(matrices, ring, shared).run();
  }
}

}  // namespace selective_scan::cuda::step
