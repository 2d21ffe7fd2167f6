#include "gradient_sums.h"

#include <algorithm>

namespace selective_scan::cpu {
namespace {

/// Σ over the rows of `values` (row, `per_row`) at `index`.
template <class T>
T row_sum(const void* values, int64_t rows, int64_t per_row, int64_t index) {
  double sum = 0;
  for (int64_t row = 0; row < rows; ++row) {
    sum += static_cast<const T*>(values)[row * per_row + index];
  }
  return static_cast<T>(sum);
}

template <class T>
void sum_states(const BackwardParams& params, int64_t rows, const void* partials,
                const ArrayView& gradient, int64_t channel) {
  const int64_t components = params.is_complex ? 2 : 1;
  const int64_t per_row = params.dim * params.dstate * components;
  for (int64_t n = 0; n < params.dstate; ++n) {
    for (int64_t component = 0; component < components; ++component) {
      const int64_t index = (channel * params.dstate + n) * components + component;
      store_element<T>(gradient.data, gradient.dtype,
                       channel * gradient.channel + n * gradient.state + component * gradient.imag,
                       row_sum<T>(partials, rows, per_row, index));
    }
  }
}

template <class T>
void sum_channel(const BackwardParams& params, int64_t rows, const void* partials,
                 const ArrayView& gradient, int64_t channel) {
  if (!gradient.present()) return;
  store_element<T>(gradient.data, gradient.dtype, channel * gradient.channel,
                   row_sum<T>(partials, rows, params.dim, channel));
}

template <class T>
void sum_over_rows_of(const BackwardParams& params, const BackwardPartials& partials,
                      int64_t channel) {
  sum_states<T>(params, partials.rows, partials.dA, params.dA, channel);
  if (!params.variable_B) sum_states<T>(params, partials.rows, partials.dB, params.dB, channel);
  if (!params.variable_C) sum_states<T>(params, partials.rows, partials.dC, params.dC, channel);
  sum_channel<T>(params, partials.rows, partials.dD, params.dD, channel);
  sum_channel<T>(params, partials.rows, partials.ddelta_bias, params.ddelta_bias, channel);
}

template <class T>
void sum_blocks(const BackwardParams& params, const BackwardPartials& partials, const void* blocks,
                const ArrayView& gradient, int64_t batch, int64_t group, int64_t chunk) {
  const int64_t components = params.is_complex ? 2 : 1;
  const int64_t tile = components * params.dstate * kStateChunk;
  const int64_t chunks = ceil_div(params.seqlen, kStateChunk);
  const int64_t first_step = chunk * kStateChunk;
  const int64_t steps = std::min(kStateChunk, params.seqlen - first_step);
  const T* first =
      static_cast<const T*>(blocks) +
      ((batch * params.groups + group) * partials.blocks_per_group * chunks + chunk) * tile;
  for (int64_t row = 0; row < components * params.dstate; ++row) {
    const int64_t component = row / params.dstate;
    const int64_t n = row % params.dstate;
    T sums[kStateChunk] = {};
    for (int64_t block = 0; block < partials.blocks_per_group; ++block) {
      const T* part = first + block * chunks * tile + row * kStateChunk;
      for (int64_t t = 0; t < steps; ++t) sums[t] += part[t];
    }
    const int64_t offset = batch * gradient.batch + group * gradient.group + n * gradient.state +
                           component * gradient.imag + first_step * gradient.step;
    for (int64_t t = 0; t < steps; ++t) {
      store_element<T>(gradient.data, gradient.dtype, offset + t * gradient.step, sums[t]);
    }
  }
}

template <class T>
void sum_over_blocks_of(const BackwardParams& params, const BackwardPartials& partials,
                        int64_t batch, int64_t group, int64_t chunk) {
  if (partials.dB_blocks) {
    sum_blocks<T>(params, partials, partials.dB_blocks, params.dB, batch, group, chunk);
  }
  if (partials.dC_blocks) {
    sum_blocks<T>(params, partials, partials.dC_blocks, params.dC, batch, group, chunk);
  }
}

}  // namespace

void sum_over_rows(const BackwardParams& params, const BackwardPartials& partials,
                   int64_t channel) {
  const auto sum = params.is_double ? &sum_over_rows_of<double> : &sum_over_rows_of<float>;
  sum(params, partials, channel);
}

void sum_over_blocks(const BackwardParams& params, const BackwardPartials& partials, int64_t batch,
                     int64_t group, int64_t chunk) {
  const auto sum = params.is_double ? &sum_over_blocks_of<double> : &sum_over_blocks_of<float>;
  sum(params, partials, batch, group, chunk);
}

}  // namespace selective_scan::cpu
