#include "plan.h"

#include <algorithm>

namespace selective_scan::cuda::step {
namespace {

/// Activations take no more shared memory than that, in columns a multiple of a stage's.
constexpr int kActivationBytes = 48 * 1024;

const char* refuse(const StepParams& params, const Device& device) {
  if (device.major < 8) return "the GPU must be of compute capability 8.0 or later";
  if (params.is_double) return "arithmetic must be in float32";
  if (params.layers > kMaxLayers) return "layers must be at most 128";
  if (params.rows() > kMaxRows) return "batch · steps must be at most 16";
  if (params.dstate > kMaxStates) return "dstate must be at most 64";
  if (params.dim % kColumnUnit != 0 || params.inner % kColumnUnit != 0) {
    return "d_model and d_inner must be multiples of 16";
  }
  return nullptr;
}

/// Hands out parts of shared memory.
struct Arena {
  int bytes = 0;

  int take(int64_t size) {
    const int at = bytes;
    bytes += static_cast<int>(round_up(size, 128));
    return at;
  }
};

}  // namespace

const char* plan_step(const StepParams& params, const Device& device, StepPlan& plan) {
  if (const char* reason = refuse(params, device)) return reason;
  const int64_t size = element_size(params.weight_dtype);
  const int64_t rows = params.rows() > 8 ? 16 : 8;
  const int64_t dim = params.dim, inner = params.inner, projections = params.projections();
  // Fewer blocks than there are multiprocessors where each would have next to nothing to do.
  constexpr int64_t kFewestChannels = 8;
  plan.padded_rows = static_cast<int>(rows);
  plan.blocks = static_cast<int>(std::max<int64_t>(
      1, std::min({static_cast<int64_t>(device.multiprocessors), inner / kFewestChannels, dim})));
  plan.most_channels = static_cast<int>(ceil_div(inner / kChannelUnit, plan.blocks)) * kChannelUnit;
  plan.most_outputs = static_cast<int>(ceil_div(dim, plan.blocks));
  const int64_t stage_columns = kRowBytes / size;
  const int64_t most_columns =
      std::max(stage_columns, kActivationBytes / (rows * size) / stage_columns * stage_columns);
  plan.columns = static_cast<int>(std::min(std::max(dim, inner), most_columns));

  const int64_t reals = rows * sizeof(float);
  Arena arena;
  SharedLayout& shared = plan.shared;
  shared.barriers = arena.take(2 * kMostStages * sizeof(BarrierState));
  shared.activations = arena.take(rows * (plan.columns * size + 16));
  shared.sums = arena.take(2 * kComputeWarps * kTileRows * reals);
  shared.xz = arena.take(2 * plan.most_channels * reals);
  shared.x = arena.take(plan.most_channels * reals);
  shared.y = arena.take(plan.most_channels * reals);
  shared.projections = arena.take(projections * reals);
  shared.residual = arena.take(plan.most_outputs * reals);
  shared.scale = arena.take(reals);
  shared.dt_proj = arena.take(plan.most_channels * params.rank * size);
  const int left = device.block_shared_bytes - arena.bytes;
  plan.stages = std::min(left / kStageBytes, kMostStages);
  if (plan.stages < 2) return "blocks of this GPU have not enough shared memory";
  shared.stages = arena.take(int64_t{plan.stages} * kStageBytes);
  shared.bytes = arena.bytes;
  if (shared.bytes > device.block_shared_bytes) {
    return "blocks of this GPU have not enough shared memory";
  }

  ExchangeLayout& exchange = plan.exchange;
  int64_t words = 0;
  const auto take = [&](int64_t count) {
    const int64_t at = words;
    words += round_up(count, 16);
    return at;
  };
  const int64_t values_of_word = size == 2 ? 2 : 1;
  exchange.epoch = take(1);
  exchange.residual = take(params.rows() * dim);
  exchange.squares = take(params.rows() * plan.blocks);
  exchange.x = take(params.rows() * inner / values_of_word);
  exchange.projections = take(params.rows() * projections);
  exchange.y = take(params.rows() * inner / values_of_word);
  exchange.words = words;

  plan.shape = {plan.blocks, kThreads, shared.bytes};
  return nullptr;
}

}  // namespace selective_scan::cuda::step
