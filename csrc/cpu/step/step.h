// The phases of a token's step through a stack of layers.
//
// Rows of activations are stored in memory that all threads share, in the compute type. Each row is
// written in one phase and read in a later one. The convolution and the states' step are those of
// the separate operators, called with views of these rows.
#pragma once

#include <cstdint>

#include "../conv/update.h"
#include "../norm/norm.h"
#include "../update/update.h"
#include "../work.h"
#include "kernels.h"
#include "products.h"

namespace selective_scan::cpu {

template <class R>
class StepPhases {
  using T = typename R::Scalar;
  static constexpr int64_t kWidth = R::kWidth;
  static constexpr DType kCompute = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
  /// The number of channels that are convolved, or whose states take a step, at a time.
  static constexpr int64_t kBlockChannels = 128;
  /// The number of logits that are computed before they are stored.
  static constexpr int64_t kBlockLogits = 128;

  /// Memory for rows of whole vectors.
  struct Memory {
    Arena arena;

    void take(Activations<T>& activations, int64_t rows, int64_t length) {
      activations.pitch = round_up(length, kWidth);
      activations.data = arena.take<T>(rows * activations.pitch);
    }
  };

  /// The memory that all threads share.
  struct Shared : Memory {
    Activations<T> residual;  // (row, channel of dim)
    Activations<T> x;         // (row, channel of inner): before and after the convolution, then y
    Activations<T> z;         // (row, channel of inner), like delta
    Activations<T> delta;
    Activations<T> projected;  // (row, dt or B or C)

    Shared(const StepParams& params, void* base) : Memory{{static_cast<char*>(base)}} {
      this->take(residual, params.rows(), params.dim);
      for (Activations<T>* rows : {&x, &z, &delta}) this->take(*rows, params.rows(), params.inner);
      this->take(projected, params.rows(), params.projections());
    }
  };

  /// The memory of one thread.
  struct Scratch : Memory {
    Activations<T> normalized;  // (row, channel of dim)
    Activations<T> logits;      // (row, logit of a block)
    Activations<T> projected;   // as Shared::projected, normalized
    char* update;               // scratch memory of the states' step

    Scratch(const StepParams& params, void* base) : Memory{{static_cast<char*>(base)}} {
      this->take(normalized, params.rows(), params.dim);
      this->take(logits, params.head ? params.rows() : 0, kBlockLogits);
      this->take(projected, params.has_inner_norms() ? params.rows() : 0, params.projections());
      update = this->arena.template take<char>(
          UpdateKernel<R>::scratch_bytes(update_params(params), params.batch, kBlockChannels));
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

  /// Divides a row by its root mean square and multiplies it by the norm's weights. Both rows are
  /// padded with zeros.
  static void normalize(const StepParams& params, const void* weights, DType dtype, const T* row,
                        T* out) {
    R squares(T(0));
    for (int64_t i = 0; i < params.dim; i += kWidth) {
      const R r = R::load(row + i);
      squares = multiply_add(r, r, squares);
    }
    const R scale(norm_scale(sum_of_lanes(squares), params.dim, params.eps));
    visit_dtype(dtype, [&](auto* element) {
      using Element = std::remove_pointer_t<decltype(element)>;
      const Element* weight = static_cast<const Element*>(weights);
      for (int64_t i = 0; i < params.dim; i += kWidth) {
        const R w = Converter<R, Element>::load_part(weight + i, params.dim - i);
        (R::load(row + i) * (scale * w)).store(out + i);
      }
    });
  }

  /// Returns the normalized rows of the residual, or the residual itself without a norm.
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

  /// Divides each of a row's dt, B and C by its root mean square.
  static void normalize_projected(const StepParams& params, const T* row, T* out) {
    for (const int64_t count : {params.rank, params.dstate, params.dstate}) {
      T squares = 0;
      for (int64_t i = 0; i < count; ++i) squares += row[i] * row[i];
      const T scale = norm_scale(squares, count, params.inner_eps);
      for (int64_t i = 0; i < count; ++i) out[i] = row[i] * scale;
      row += count;
      out += count;
    }
  }

  /// Returns the rows of dt, B and C as the scan takes them.
  static Activations<T> projected_rows(const StepParams& params, const Shared& shared,
                                       const Scratch& scratch) {
    if (!params.has_inner_norms()) return shared.projected;
    for (int64_t row = 0; row < params.rows(); ++row) {
      normalize_projected(params, shared.projected.row(row), scratch.projected.row(row));
    }
    return scratch.projected;
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
    const Activations<T> projected = projected_rows(params, shared, scratch);
    Product<R> product;
    product.matrix = {layer.dt_proj, params.weight_dtype, params.rank};
    product.in = {projected.data, projected.pitch};
    product.rows = params.rows();
    product.out = shared.delta;
    product.run(task.first, task.count, task.first);

    UpdateParams update = update_params(params);
    update.x = update.out = steps_view(params, shared.x);
    update.dt = steps_view(params, shared.delta);
    update.z = steps_view(params, shared.z);
    update.B = update.C = steps_view(params, projected);
    update.B.state = update.C.state = 1;
    update.B.data = projected.data + params.rank;
    update.C.data = projected.data + params.rank + params.dstate;
    update.A = channels_view(layer.A_log, params.A_dtype, params.dstate);
    update.A.state = 1;
    update.dt_bias = channels_view(layer.dt_bias, params.dt_bias_dtype, 1);
    update.D = channels_view(layer.D, params.D_dtype, 1);
    update.state = params.state;
    update.state.data = layer.state;
    for (int64_t done = 0; done < task.count; done += kBlockChannels) {
      UpdateTask channels;
      channels.rows = params.batch;
      channels.first_channel = task.first + done;
      channels.channels = lesser_of(kBlockChannels, task.count - done);
      UpdateKernel<R>::run(update, channels, scratch.update);
    }
  }

  /// Returns the parameters of the states' update that all layers share.
  static UpdateParams update_params(const StepParams& params) {
    UpdateParams update;
    update.batch = params.batch;
    update.steps = params.steps;
    update.dim = params.inner;
    update.dstate = params.dstate;
    update.slots = params.slots;
    update.sources = params.slot_indices;
    update.sources.batch = params.slot_indices.step;
    update.method = params.method;
    update.is_double = params.is_double;
    update.dt_softplus = params.delta_softplus;
    update.A_is_log = true;
    return update;
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
      const int64_t first = task.first + done;
      const int64_t count = lesser_of(kBlockLogits, task.count - done);
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

  /// Returns the channels of one row of hidden or out.
  static Section hidden_section(const ArrayView& view, const StepParams& params, int64_t entry,
                                int64_t step) {
    return {element_at(view, entry * view.batch + step * view.step),
            view.dtype,
            1,
            params.dim,
            0,
            view.channel};
  }

  /// Returns a view (batch, step, channel) of rows of activations.
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
