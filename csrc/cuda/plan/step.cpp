#include <algorithm>

#include "../step/plan.h"

namespace selective_scan::cuda::step {
namespace {

/// Activations take no more shared memory than that, so that the ring has several stages.
constexpr int64_t kMostActivationBytes = 88 * 1024;
constexpr int kFewestStages = 2;
/// Of a block; of fewer there are fewer blocks than multiprocessors.
constexpr int64_t kFewestChannels = 8;

Refusal refusal_of(const StepParams& params, const Device& device) {
  if (device.major < 8) return {"the GPU's compute capability must be 8.0 or later", device.major};
  if (params.is_double) return {"all tensors must be of at most 4 bytes an element", 8};
  if (params.layers > kMostLayers) return {"layers must be at most 128", params.layers};
  if (params.rows() > kMostRows) return {"batch*steps must be at most 16", params.rows()};
  if (params.dim % kColumnUnit != 0) return {"d_model must be a multiple of 16", params.dim};
  if (params.inner % kColumnUnit != 0) return {"d_inner must be a multiple of 16", params.inner};
  return {};
}

/// Hands out consecutive parts.
struct Arena {
  int64_t unit;
  int64_t taken = 0;

  int64_t take(int64_t size) {
    const int64_t at = taken;
    taken += round_up(size, unit);
    return at;
  }
};

}  // namespace

Refusal plan_step(const StepParams& params, const Device& device, StepPlan& plan) {
  if (const Refusal refusal = refusal_of(params, device)) return refusal;
  const int64_t size = element_size(params.weight_dtype), rows = params.rows();
  const int64_t dim = params.dim, inner = params.inner, projections = params.projections();
  const int64_t blocks = std::max<int64_t>(
      1, std::min({int64_t{device.multiprocessors}, inner / kFewestChannels, dim}));
  const int64_t channels = ceil_div(inner / kChannelUnit, blocks) * kChannelUnit;
  plan.blocks = static_cast<int>(blocks);
  plan.padded_rows = rows > 8 ? 16 : 8;

  const int64_t reals = plan.padded_rows * static_cast<int64_t>(sizeof(float));
  Arena bytes{128};
  const auto take = [&](int64_t count) { return static_cast<int>(bytes.take(count)); };
  SharedLayout& shared = plan.shared;
  shared.barriers = take(2 * kMostStages * sizeof(BarrierState));
  shared.sums = take(2 * kComputeWarps * kTileRows * reals);
  shared.squares = take(kComputeWarps * reals);
  shared.xz = take(2 * channels * reals);
  shared.x = take(channels * reals);
  shared.y = take(channels * reals);
  shared.projections = take(projections * reals);
  shared.residual = take(ceil_div(dim, blocks) * reals);
  shared.scale = take(3 * reals);
  shared.dt_proj = take(channels * params.rank * size);

  // Activations in columns of whole stages, as many as there is room for.
  const int64_t stage_columns = kRowBytes / size;
  const auto activation_bytes = [&](int64_t columns) { return rows * (columns * size + 16); };
  const auto result_bytes = [&](int64_t columns) {
    const int64_t of_dim = std::max(2 * channels, ceil_div(params.vocabulary, blocks));
    const int64_t of_inner = ceil_div(std::max(projections, dim), blocks);
    return reals * std::max(dim > columns ? of_dim : 0, inner > columns ? of_inner : 0);
  };
  const auto fits = [&](int64_t columns) {
    const int64_t activations = activation_bytes(columns), results = result_bytes(columns);
    return activations <= kMostActivationBytes &&
           bytes.taken + activations + results + kFewestStages * kStageBytes + 2 * bytes.unit <=
               device.block_shared_bytes;
  };
  int64_t columns = std::max(dim, inner);
  while (columns > stage_columns && !fits(columns)) {
    columns = (columns - 1) / stage_columns * stage_columns;
  }
  plan.columns = static_cast<int>(columns);
  shared.activations = take(activation_bytes(columns));
  shared.results = take(result_bytes(columns));
  const int64_t left = device.block_shared_bytes - bytes.taken;
  plan.stages =
      static_cast<int>(std::clamp<int64_t>(left / kStageBytes, kFewestStages, kMostStages));
  shared.stages = take(int64_t{plan.stages} * kStageBytes);
  if (bytes.taken > device.block_shared_bytes) {
    return {"the shared memory of the GPU's blocks is too small", device.block_shared_bytes};
  }

  const int64_t values_of_word = size == 2 ? 2 : 1;
  Arena words{16};
  ExchangeLayout& exchange = plan.exchange;
  words.take(1);  // ExchangeLayout::kEpoch
  exchange.residual = words.take(rows * dim);
  exchange.x = words.take(rows * inner / values_of_word);
  exchange.projections = words.take(projections * plan.padded_rows);
  exchange.y = words.take(rows * inner / values_of_word);
  exchange.words = words.taken;

  plan.shape.blocks = blocks;
  plan.shape.threads = kThreads;
  plan.shape.shared_bytes = static_cast<int>(bytes.taken);
  plan.shape.is_cooperative = true;
  return {};
}

}  // namespace selective_scan::cuda::step
