// The phases of a token's step through a stack of layers.
//
// Rows of activations lie in memory that all threads share, in the compute type; each is written in
// one phase and read in a later one. The convolution is that of the operator of its own, called
// with views of these rows, and so is a step of the states.
#pragma once

#include <cmath>
#include <cstdint>

#include "../conv/update.h"
#include "../selective/lanes.h"
#include "../update/advance.h"
#include "../work.h"
#include "kernels.h"
#include "products.h"

namespace selective_scan::cpu {

template <class R>
class StepPhases {
  using T = typename R::Scalar;
  static constexpr int64_t kWidth = R::kWidth;
  static constexpr DType kCompute = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
  /// Channels that are convolved at a time.
  static constexpr int64_t kBlockChannels = 128;
  /// Logits that are computed before they are stored.
  static constexpr int64_t kBlockLogits = 128;

  /// Rows of whole vectors.
  struct Memory {
    Arena arena;

    void take(Activations<T>& activations, int64_t rows, int64_t length) {
      activations.pitch = round_up(length, kWidth);
      activations.data = arena.take<T>(rows * activations.pitch);
    }
  };

  /// This memory belongs to all threads.
  struct Shared : Memory {
    Activations<T> residual;  // (row, channel of dim)
    Activations<T> x;         // (row, channel of inner): before and after the convolution, then y
    Activations<T> z;         // (row, channel of inner), and so is delta
    Activations<T> delta;
    Activations<T> projected;  // (row, dt or B or C)

    Shared(const StepParams& params, void* base) : Memory{{static_cast<char*>(base)}} {
      this->take(residual, params.rows(), params.dim);
      for (Activations<T>* rows : {&x, &z, &delta}) this->take(*rows, params.rows(), params.inner);
      this->take(projected, params.rows(), params.projections());
    }
  };

  /// This memory belongs to one thread. Rows of states are whole vectors, with zeros behind what
  /// there is.
  struct Scratch : Memory {
    Activations<T> normalized;  // (row, channel of dim)
    Activations<T> B;           // (row, state), and so is C
    Activations<T> C;
    Activations<T> A;  // (channel of a vector, state), and so are staged states
    Activations<T> h;
    Activations<T> logits;  // (row, logit of a block)

    Scratch(const StepParams& params, void* base) : Memory{{static_cast<char*>(base)}} {
      this->take(normalized, params.rows(), params.dim);
      for (Activations<T>* rows : {&B, &C}) this->take(*rows, params.rows(), params.dstate);
      for (Activations<T>* channels : {&A, &h}) this->take(*channels, kWidth, params.dstate);
      this->take(logits, params.head ? params.rows() : 0, kBlockLogits);
    }
  };

 public:
  static int64_t shared_bytes(const StepParams& params) {
    return Shared(params, nullptr).arena.bytes;
  }
  static int64_t scratch_bytes(const StepParams& params) {
    return Scratch(params, nullptr).arena.bytes;
  }

  static void begin(const StepParams& params, void* base) {
    const Shared shared(params, base);
    for_each_row(params, [&](int64_t row, int64_t entry, int64_t step) {
      load_tile<R>(hidden_section(params.hidden, params, entry, step), shared.residual.row(row), 0);
    });
  }

  static void run(const StepParams& params, const StepTask& task, void* base, StepWorker& worker) {
    const Shared shared(params, base);
    const Scratch scratch(params, worker.scratch);
    const StepLayer& layer = params.layer[task.phase == StepPhase::kLast ? 0 : task.layer];
    switch (task.phase) {
      case StepPhase::kInputs:
        return take_inputs(params, layer, task, shared, scratch, worker);
      case StepPhase::kProjections:
        return project(params, layer, task, shared);
      case StepPhase::kScan:
        return scan(params, layer, task, shared, scratch);
      case StepPhase::kOutputs:
        return give_outputs(params, layer, task, shared);
      case StepPhase::kLast:
        return params.head ? give_logits(params, task, shared, scratch, worker)
                           : give_rows(params, task, shared, scratch);
    }
  }

 private:
  // --- norms ------------------------------------------------------------------------------------

  /// One row by its root mean square, times the norm's weights.
  static void normalize(const StepParams& params, const void* weights, DType dtype, const T* row,
                        T* out) {
    const int64_t whole = params.dim / kWidth * kWidth, left = params.dim - whole;
    R squares(T(0));
    for (int64_t i = 0; i < whole; i += kWidth) {
      const R r = R::load(row + i);
      squares = multiply_add(r, r, squares);
    }
    if (left > 0) {
      const R r = Converter<R, T>::load_part(row + whole, left);
      squares = multiply_add(r, r, squares);
    }
    T sum = 0;
    for (int lane = 0; lane < kWidth; ++lane) sum += squares.lane(lane);
    const R scale(T(1) / std::sqrt(sum / static_cast<T>(params.dim) + static_cast<T>(params.eps)));
    visit_dtype(dtype, [&](auto* element) {
      using Element = std::remove_pointer_t<decltype(element)>;
      const Element* weight = static_cast<const Element*>(weights);
      for (int64_t i = 0; i < whole; i += kWidth) {
        (R::load(row + i) * scale * Converter<R, Element>::load(weight + i)).store(out + i);
      }
      if (left > 0) {
        const R scaled = Converter<R, T>::load_part(row + whole, left) * scale;
        Converter<R, T>::store_part(scaled * Converter<R, Element>::load_part(weight + whole, left),
                                    out + whole, left);
      }
    });
  }

  /// The rows of the residual behind a norm, or as they are where there is none.
  static Activations<const T> normalized_rows(const StepParams& params, int64_t layer,
                                              const void* weights, DType dtype,
                                              const Shared& shared, const Scratch& scratch,
                                              StepWorker& worker) {
    if (!weights) return {shared.residual.data, shared.residual.pitch};
    if (worker.normalized != layer) {
      for (int64_t row = 0; row < params.rows(); ++row) {
        normalize(params, weights, dtype, shared.residual.row(row), scratch.normalized.row(row));
      }
      worker.normalized = layer;
    }
    return {scratch.normalized.data, scratch.normalized.pitch};
  }

  // --- a layer ----------------------------------------------------------------------------------

  static void take_inputs(const StepParams& params, const StepLayer& layer, const StepTask& task,
                          const Shared& shared, const Scratch& scratch, StepWorker& worker) {
    Product<R> product;
    product.matrix = {layer.in_proj, params.weight_dtype, params.dim, layer.in_bias,
                      params.in_bias_dtype};
    product.in =
        normalized_rows(params, task.layer, layer.norm, params.norm_dtype, shared, scratch, worker);
    product.rows = params.rows();
    product.out = shared.x;
    product.run(task.first, task.count, task.first);
    product.out = shared.z;
    product.run(params.inner + task.first, task.count, task.first);
    convolve(params, layer, task, shared.x);
  }

  static void convolve(const StepParams& params, const StepLayer& layer, const StepTask& task,
                       const Activations<T>& rows) {
    ConvUpdateParams conv;
    conv.batch = params.batch;
    conv.dim = task.count;
    conv.seqlen = params.steps;
    conv.width = params.width;
    conv.silu = true;
    conv.is_double = params.is_double;
    conv.slots = params.slots;
    conv.state_len = params.width - 1;
    conv.conv_state_indices = params.slot_indices;
    conv.x = conv.out = steps_view(params, rows);
    conv.weight = channels_view(layer.conv, params.weight_dtype, params.width);
    conv.weight.step = 1;
    conv.bias = channels_view(layer.conv_bias, params.conv_bias_dtype, 1);
    conv.conv_state = params.conv_state;
    conv.conv_state.data = layer.conv_state;
    for (ArrayView* view : {&conv.x, &conv.out, &conv.weight, &conv.bias, &conv.conv_state}) {
      if (view->present()) view->data = element_at(*view, task.first * view->channel);
    }
    ConvSplit split;
    split.block_channels = kBlockChannels;
    split.tile_steps = ConvBlock<R>::kTileElements / kBlockChannels;
    for (int64_t entry = 0; entry < params.batch; ++entry) {
      for (int64_t block = 0; block * kBlockChannels < task.count; ++block) {
        ConvUpdate<R>::run(conv, split, entry, block);
      }
    }
  }

  static void project(const StepParams& params, const StepLayer& layer, const StepTask& task,
                      const Shared& shared) {
    Product<R> product;
    product.matrix = {layer.x_proj, params.weight_dtype, params.inner};
    product.in = {shared.x.data, shared.x.pitch};
    product.rows = params.rows();
    product.out = shared.projected;
    product.run(task.first, task.count, task.first);
  }

  static void scan(const StepParams& params, const StepLayer& layer, const StepTask& task,
                   const Shared& shared, const Scratch& scratch) {
    Product<R> product;
    product.matrix = {layer.dt_proj, params.weight_dtype, params.rank};
    product.in = {shared.projected.data, shared.projected.pitch};
    product.rows = params.rows();
    product.out = shared.delta;
    product.run(task.first, task.count, task.first);

    stage_projections(params, shared, scratch);
    const auto advance = TileSteps<R>::kMethods[params.method];
    for (int64_t done = 0; done < task.count; done += kWidth) {
      const int64_t first = task.first + done, left = task.count - done;
      const int64_t channels = left < kWidth ? left : kWidth;
      stage_poles(params, layer, first, channels, scratch);
      const R dt_bias = load_channels(layer.dt_bias, params.dt_bias_dtype, first, channels);
      const R D = load_channels(layer.D, params.D_dtype, first, channels);
      for (int64_t entry = 0; entry < params.batch; ++entry) {
        const int64_t slot = params.slot(entry);
        StateTile<R> tile = states_of(params, layer, slot, first, channels, scratch);
        for (int64_t step = 0; step < params.steps; ++step) {
          const int64_t row = entry * params.steps + step;
          T* const x = shared.x.row(row) + first;
          if (slot == StepParams::kNoSlot) {
            R(T(0)).store(x);
            continue;
          }
          R delta = R::load(shared.delta.row(row) + first) + dt_bias;
          if (params.delta_softplus) delta = VectorMath::softplus(delta);
          alignas(64) T deltas[kWidth], sums[kWidth];
          finite_step(delta).store(deltas);
          tile.delta = deltas;
          tile.x = x;
          tile.B.data = scratch.B.row(row);
          tile.C.data = scratch.C.row(row);
          advance(tile, sums);
          tile.before = {tile.after.data, tile.after.pitch, 0};
          const R z = R::load(shared.z.row(row) + first);
          const R y = R::load(sums) + D * R::load(x);
          (y * (z * VectorMath::sigmoid(z))).store(x);
        }
        if (slot != StepParams::kNoSlot && tile.after.data == scratch.h.data) {
          store_tile<R>(state_section(params, layer, slot, first, channels), scratch.h.data,
                        scratch.h.pitch);
        }
      }
    }
  }

  /// B and C of all rows.
  static void stage_projections(const StepParams& params, const Shared& shared,
                                const Scratch& scratch) {
    for (int64_t row = 0; row < params.rows(); ++row) {
      const T* projected = shared.projected.row(row) + params.rank;
      for (int64_t n = 0; n < params.dstate; n += kWidth) {
        const int64_t left = params.dstate - n;
        Converter<R, T>::load_part(projected + n, left).store(scratch.B.row(row) + n);
        Converter<R, T>::load_part(projected + params.dstate + n, left)
            .store(scratch.C.row(row) + n);
      }
    }
  }

  static void stage_poles(const StepParams& params, const StepLayer& layer, int64_t first,
                          int64_t channels, const Scratch& scratch) {
    visit_dtype(params.A_dtype, [&](auto* element) {
      using Element = std::remove_pointer_t<decltype(element)>;
      for (int64_t channel = 0; channel < channels; ++channel) {
        const Element* logs =
            static_cast<const Element*>(layer.A_log) + (first + channel) * params.dstate;
        T* const poles = scratch.A.row(channel);
        for (int64_t n = 0; n < params.dstate; n += kWidth) {
          (-VectorMath::exp(Converter<R, Element>::load_part(logs + n, params.dstate - n)))
              .store(poles + n);
        }
      }
    });
  }

  /// The states of a vector of channels: where they lie, if whole vectors of the compute type do.
  static StateTile<R> states_of(const StepParams& params, const StepLayer& layer, int64_t slot,
                                int64_t first, int64_t channels, const Scratch& scratch) {
    StateTile<R> tile;
    tile.channels = channels;
    tile.states = scratch.A.pitch;
    tile.A = {scratch.A.data, scratch.A.pitch, 0};
    tile.after = {scratch.h.data, scratch.h.pitch, 0};
    if (slot != StepParams::kNoSlot) {
      const Section section = state_section(params, layer, slot, first, channels);
      if (section.dtype == kCompute && section.lane_stride == 1 && params.dstate % kWidth == 0) {
        tile.after = {static_cast<T*>(section.data), section.row_stride, 0};
      } else {
        load_tile<R>(section, scratch.h.data, scratch.h.pitch);
      }
    }
    tile.before = {tile.after.data, tile.after.pitch, 0};
    return tile;
  }

  static Section state_section(const StepParams& params, const StepLayer& layer, int64_t slot,
                               int64_t first, int64_t channels) {
    ArrayView view = params.state;
    view.data = layer.state;
    return {element_at(view, slot * view.batch + first * view.channel),
            view.dtype,
            channels,
            params.dstate,
            view.channel,
            view.state};
  }

  /// A number for each of a vector of channels, 0 where there is none.
  static R load_channels(const void* data, DType dtype, int64_t first, int64_t channels) {
    if (!data) return R(T(0));
    return visit_dtype(dtype, [&](auto* element) {
      using Element = std::remove_pointer_t<decltype(element)>;
      return Converter<R, Element>::load_part(static_cast<const Element*>(data) + first, channels);
    });
  }

  static void give_outputs(const StepParams& params, const StepLayer& layer, const StepTask& task,
                           const Shared& shared) {
    Product<R> product;
    product.matrix = {layer.out_proj, params.weight_dtype, params.inner, layer.out_bias,
                      params.out_bias_dtype};
    product.in = {shared.x.data, shared.x.pitch};
    product.rows = params.rows();
    product.out = shared.residual;
    product.adds = layer.norm != nullptr;
    product.run(task.first, task.count, task.first);
  }

  // --- what follows the layers ------------------------------------------------------------------

  static void give_rows(const StepParams& params, const StepTask& task, const Shared& shared,
                        const Scratch& scratch) {
    for (int64_t row = task.first; row < task.first + task.count; ++row) {
      const int64_t entry = row / params.steps, step = row % params.steps;
      T* source = shared.residual.row(row);
      T* given = scratch.normalized.row(row);
      if (params.slot(entry) == StepParams::kNoSlot) {
        memset(given, 0, params.dim * sizeof(T));
      } else if (params.final_norm) {
        normalize(params, params.final_norm, params.final_norm_dtype, source, given);
      } else {
        given = source;
      }
      store_tile<R>(hidden_section(params.out, params, entry, step), given, 0);
    }
  }

  static void give_logits(const StepParams& params, const StepTask& task, const Shared& shared,
                          const Scratch& scratch, StepWorker& worker) {
    Product<R> product;
    product.matrix = {params.head, params.weight_dtype, params.dim};
    product.in = normalized_rows(params, params.layers, params.final_norm, params.final_norm_dtype,
                                 shared, scratch, worker);
    product.rows = params.rows();
    product.out = scratch.logits;
    for (int64_t done = 0; done < task.count; done += kBlockLogits) {
      const int64_t first = task.first + done, left = task.count - done;
      const int64_t count = left < kBlockLogits ? left : kBlockLogits;
      product.run(first, count, 0);
      for_each_row(params, [&](int64_t row, int64_t entry, int64_t step) {
        if (params.slot(entry) == StepParams::kNoSlot) {
          memset(scratch.logits.row(row), 0, count * sizeof(T));
        }
        Section section = hidden_section(params.out, params, entry, step);
        section.data = element_at(params.out, entry * params.out.batch + step * params.out.step +
                                                  first * params.out.channel);
        section.lanes = count;
        store_tile<R>(section, scratch.logits.row(row), 0);
      });
    }
  }

  // --- views ------------------------------------------------------------------------------------

  template <class Visit>
  static void for_each_row(const StepParams& params, const Visit& visit) {
    for (int64_t row = 0; row < params.rows(); ++row) {
      visit(row, row / params.steps, row % params.steps);
    }
  }

  /// The channels of one row of hidden or out.
  static Section hidden_section(const ArrayView& view, const StepParams& params, int64_t entry,
                                int64_t step) {
    return {element_at(view, entry * view.batch + step * view.step),
            view.dtype,
            1,
            params.dim,
            0,
            view.channel};
  }

  /// (batch, step, channel) of rows of activations.
  static ArrayView steps_view(const StepParams& params, const Activations<T>& rows) {
    ArrayView view;
    view.data = rows.data;
    view.dtype = kCompute;
    view.batch = params.steps * rows.pitch;
    view.step = rows.pitch;
    view.channel = 1;
    return view;
  }

  static ArrayView channels_view(const void* data, DType dtype, int64_t channel) {
    ArrayView view;
    view.data = const_cast<void*>(data);
    view.dtype = dtype;
    view.channel = channel;
    return view;
  }
};

template <class R>
const StepKernels StackStep<R>::kernels = {
    R::kWidth,
    &StepPhases<R>::shared_bytes,
    &StepPhases<R>::scratch_bytes,
    &StepPhases<R>::begin,
    &StepPhases<R>::run,
};

}  // namespace selective_scan::cpu
