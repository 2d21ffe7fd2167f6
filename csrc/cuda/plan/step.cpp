// How the step of a token is divided among blocks, and the layout of their shared memory.

#include <algorithm>

#include "../step/plan.h"

namespace selective_scan::cuda::step {
namespace {

constexpr int kFewestStages = 2;
/// A block has at least this many channels, even if there are then fewer blocks than
/// multiprocessors.
constexpr int64_t kFewestChannels = 8;

Refusal refusal_of(const StepParams& params, const Device& device) {
  if (!device.has_async_copies()) return refusal_of_older(device);
  if (params.is_double) return {"all tensors must be of at most 4 bytes an element", 8};
  if (params.layers > kMostLayers) return {"layers must be at most 128", params.layers};
  if (params.rows() > kMostRows) return {"batch*steps must be at most 16", params.rows()};
  const auto is_width = [](int64_t size) { return size > 0 && size % kColumnUnit == 0; };
  if (!is_width(params.dim)) return {"d_model must be a positive multiple of 16", params.dim};
  if (!is_width(params.inner)) return {"d_inner must be a positive multiple of 16", params.inner};
  return {};
}

/// Allocates consecutive parts.
struct Arena {
  int64_t unit;
  int64_t taken = 0;

  int64_t take(int64_t size) {
    const int64_t at = taken;
    taken += round_up(size, unit);
    return at;
  }
};

RowPairs row_pairs(int64_t count) {
  const int pairs = static_cast<int>(count);
  return {pairs, inverse_of(pairs)};
}

}  // namespace

Refusal plan_step(const StepParams& params, const Device& device, StepPlan& plan) {
  if (const Refusal refusal = refusal_of(params, device)) return refusal;
  const int64_t size = element_size(params.weight_dtype), rows = params.rows();
  const int64_t dim = params.dim, inner = params.inner, projections = params.projections();
  const int64_t blocks = std::max<int64_t>(
      1, std::min({int64_t{device.multiprocessors}, inner / kFewestChannels, dim / kChannelUnit}));
  const int channels = static_cast<int>(ceil_div(inner / kChannelUnit, blocks)) * kChannelUnit;
  const int64_t outputs = ceil_div(dim / kChannelUnit, blocks) * kChannelUnit;
  plan.blocks = static_cast<int>(blocks);
  plan.padded_rows = rows > 8 ? 16 : 8;
  plan.pairs_entries = plan.padded_rows > 8 || params.batch > entries_beside(channels);
  plan.inverse_dim = 1 / static_cast<float>(dim);
  plan.eps = static_cast<float>(params.eps);
  const int64_t values_of_word = size == 2 ? 2 : 1;
  plan.stream_pairs = row_pairs(dim / values_of_word / 2);
  plan.inner_pairs = row_pairs(inner / values_of_word / 2);

  const int64_t reals = row_pitch(plan.padded_rows) * static_cast<int64_t>(sizeof(float));
  Arena bytes{128};
  const auto take = [&](int64_t count) { return static_cast<int>(bytes.take(count)); };
  SharedLayout& shared = plan.shared;
  shared.barriers = take(2 * kMostStages * sizeof(BarrierState));
  shared.input_barriers = take(2 * kInputBuffers * sizeof(BarrierState));
  shared.sums = take(2 * kProductWarps * kTileRows * reals);
  shared.norm_scale = take(reals);
  shared.in = take(channels * reals);
  shared.gates = take(channels * reals);
  shared.x = take(channels * reals);
  shared.y = take(channels * reals);
  shared.projections = take(projections * reals);
  // The squares reuse this memory: they are only needed before it is written.
  shared.squares = shared.in;
  const int64_t squares = rows * plan.stream_pairs.count * static_cast<int64_t>(sizeof(float));
  bytes.take(std::max<int64_t>(0, shared.squares + squares - bytes.taken));
  shared.residual = take(outputs * reals);
  shared.scale = take(4 * reals);
  const int64_t inputs = kFirstTap + params.width + params.batch * (params.width - 1);
  plan.channel_inputs = static_cast<int>(inputs);
  shared.inputs = take(kInputBuffers * (inputs * channels + kOutputInputs * outputs) *
                       static_cast<int64_t>(sizeof(float)));
  shared.dt_proj = take(channels * params.rank * size);

  plan.activation_pitch = static_cast<int>(std::max(dim, inner) + 16 / size);
  shared.activations = take(rows * plan.activation_pitch * size);
  const int64_t left = device.block_shared_bytes - bytes.taken;
  plan.stages = static_cast<int>(std::min<int64_t>(left / kStageBytes, kMostStages));
  if (left < kFewestStages * kStageBytes) {
    return {"the shared memory of the GPU's blocks is too small", device.block_shared_bytes};
  }
  shared.stages = take(int64_t{plan.stages} * kStageBytes);

  Arena words{16};
  ExchangeLayout& exchange = plan.exchange;
  words.take(1);  // ExchangeLayout::kEpoch
  exchange.stream = words.take(rows * dim / values_of_word);
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
