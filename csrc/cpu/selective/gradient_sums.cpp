#include "gradient_sums.h"

#include <algorithm>

#include "../tasks.h"

namespace selective_scan::cpu {
namespace {

int64_t element_bytes(const ScanParams& params) {
  return params.is_double ? 8 : 4;
}

/// Returns the number of values in a row of states.
int64_t state_values(const ScanParams& params) {
  return params.dim * params.dstate * (params.is_complex ? 2 : 1);
}

/// Returns the sum over the rows of `values`, (row, `per_row`), at `index`.
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
  for (int64_t n = 0; n < params.dstate; ++n) {
    for (int64_t component = 0; component < components; ++component) {
      const int64_t index = (channel * params.dstate + n) * components + component;
      store_element<T>(gradient.data, gradient.dtype,
                       channel * gradient.channel + n * gradient.state + component * gradient.imag,
                       row_sum<T>(partials, rows, state_values(params), index));
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

/// Sums dA, dD, ddelta_bias and the gradients of constant B and C of one channel over the sequences
/// and, if these are segmented, over the sets of segments.
template <class T>
void sum_over_rows(const BackwardParams& params, const BackwardPartials& partials,
                   int64_t channel) {
  if (partials.dA) sum_states<T>(params, partials.rows, partials.dA, params.dA, channel);
  if (!params.variable_B) sum_states<T>(params, partials.rows, partials.dB, params.dB, channel);
  if (!params.variable_C) sum_states<T>(params, partials.rows, partials.dC, params.dC, channel);
  sum_channel<T>(params, partials.rows, partials.dD, params.dD, channel);
  sum_channel<T>(params, partials.rows, partials.ddelta_bias, params.ddelta_bias, channel);
}

template <class T>
void sum_blocks_of(const BackwardParams& params, const BackwardPartials& partials,
                   const void* blocks, const ArrayView& gradient, int64_t batch, int64_t group,
                   int64_t chunk) {
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

/// Sums the gradients of variable B and C over the blocks of a group, for one chunk.
template <class T>
void sum_over_blocks(const BackwardParams& params, const BackwardPartials& partials, int64_t batch,
                     int64_t group, int64_t chunk) {
  if (partials.dB_blocks) {
    sum_blocks_of<T>(params, partials, partials.dB_blocks, params.dB, batch, group, chunk);
  }
  if (partials.dC_blocks) {
    sum_blocks_of<T>(params, partials, partials.dC_blocks, params.dC, batch, group, chunk);
  }
}

}  // namespace

BackwardPartials take_rows(const BackwardParams& params, int64_t rows, Arena& arena) {
  const auto take = [&](bool wanted, int64_t values) -> void* {
    return wanted ? arena.take<char>(rows * values * element_bytes(params)) : nullptr;
  };
  const int64_t states = state_values(params);
  BackwardPartials partials;
  partials.rows = rows;
  partials.dB = take(!params.variable_B, states);
  partials.dC = take(!params.variable_C, states);
  partials.dD = take(params.D.present(), params.dim);
  partials.ddelta_bias = take(params.delta_bias.present(), params.dim);
  return partials;
}

void take_blocks(const BackwardParams& params, const Partition& partition, Arena& arena,
                 BackwardPartials& partials) {
  const int64_t chunks = ceil_div(params.seqlen, kStateChunk);
  const int64_t values = partition.chains() * chunks * params.dstate * kStateChunk;
  const auto take = [&](bool wanted) -> void* {
    return wanted ? arena.take<char>(values * number_bytes(params)) : nullptr;
  };
  const bool several = partition.blocks_per_group > 1;
  partials.dB_blocks = take(params.variable_B && several);
  partials.dC_blocks = take(params.variable_C && several);
  partials.blocks_per_group = partition.blocks_per_group;
}

BackwardPartials rows_from(const BackwardParams& params, BackwardPartials partials, int64_t row) {
  const auto advance = [&](void*& rows, int64_t values) {
    if (rows) rows = static_cast<char*>(rows) + row * values * element_bytes(params);
  };
  const int64_t states = state_values(params);
  for (void** rows : {&partials.dA, &partials.dB, &partials.dC}) advance(*rows, states);
  for (void** rows : {&partials.dD, &partials.ddelta_bias}) advance(*rows, params.dim);
  partials.rows -= row;
  return partials;
}

void sum_rows(const BackwardParams& params, const BackwardPartials& partials, int64_t workers,
              const ThreadPool& pool) {
  const auto sum = params.is_double ? &sum_over_rows<double> : &sum_over_rows<float>;
  run_tasks(params.dim, workers, pool,
            [&](int64_t channel, int64_t) { sum(params, partials, channel); });
}

void sum_blocks(const BackwardParams& params, const BackwardPartials& partials, int64_t workers,
                const ThreadPool& pool) {
  if (!partials.dB_blocks && !partials.dC_blocks) return;
  const auto sum = params.is_double ? &sum_over_blocks<double> : &sum_over_blocks<float>;
  const int64_t chunks = ceil_div(params.seqlen, kStateChunk);
  run_tasks(params.batch * params.groups * chunks, workers, pool, [&](int64_t task, int64_t) {
    const int64_t row = task / chunks;
    sum(params, partials, row / params.groups, row % params.groups, task % chunks);
  });
}

}  // namespace selective_scan::cpu
