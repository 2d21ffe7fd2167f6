// Which path is the better choice for a call: the rules, and nothing else.
//
// The first path of dstate1, relay and streamed that can run a call and is preferred takes it, else
// the general one. Figures are from measurements on an H200.

#include "plan.h"

#include <iterator>
#include <stdexcept>
#include <string>

#include "arrays.h"
#include "candidates.h"

namespace selective_scan::cuda {
namespace {

// --- the rules ---

/// dstate1 cannot cut time into segments, without which few channels with long sequences leave most
/// of the device idle.
bool has_enough_channels(const ScanParams& params) {
  constexpr int64_t kFewSteps = 4096;
  constexpr int64_t kManyRows = 2048;
  return params.seqlen <= kFewSteps || params.batch * params.dim >= kManyRows;
}
bool is_preferred(const ForwardParams& params, const Device&, const Dstate1ForwardPlan&) {
  return has_enough_channels(params);
}
bool is_preferred(const BackwardParams& params, const Device&, const Dstate1BackwardPlan&) {
  return has_enough_channels(params);
}

/// Sequences of fewer steps are short.
constexpr int64_t kShortSequence = 1024;

/// The relay is for few channels: where the streamed kernels' warps would be too few to fill the
/// device, and segments too short.
bool is_preferred(const ForwardParams& params, const Device& device, const RelayForwardPlan& plan) {
  // Beyond so many blocks a multiprocessor, warps that stay with their channels are as good.
  constexpr int64_t kMostBlocks = 4;
  // From so many steps on, segments are better where the last wave of blocks leaves more
  // multiprocessors idle than this part of them all.
  constexpr int64_t kSegmentSteps = 8192;
  constexpr double kMostIdle = 0.15;
  const int64_t multiprocessors = device.multiprocessors;
  const int64_t blocks = plan.geometry.blocks;
  if (blocks > kMostBlocks * multiprocessors) return false;
  const bool is_short = params.seqlen < kShortSequence;
  const bool is_streamable = have_one_dtype(params, rows_of(params));
  if (!is_streamable || (is_short && plan.has_one_state)) return is_short;
  // Long sequences are left to others unless arrays are vectors: those divide the work around the
  // scan better.
  const bool has_vectors = plan.may_have_one_state ? plan.has_one_state : plan.vector_size != 0;
  if (!is_short && !has_vectors) return false;
  const int64_t rounds = ceil_div(blocks, multiprocessors);
  if (params.seqlen >= kSegmentSteps) {
    const auto places = static_cast<double>(rounds * multiprocessors);
    return static_cast<double>(blocks) >= (1 - kMostIdle) * places;
  }
  return rounds <= std::ssize(kFewestRelaySteps) && params.seqlen >= kFewestRelaySteps[rounds - 1];
}

/// Likewise. Every tile writes partial sums of dB and dC, in all no more than 16 MiB.
bool is_preferred(const BackwardParams& params, const Device& device,
                  const RelayBackwardPlan& plan) {
  constexpr int64_t kMostBlocks = 4;
  constexpr int64_t kMostPartialSums = int64_t{1} << 22;
  const int64_t blocks = plan.geometry.blocks;
  return params.seqlen < kShortSequence && blocks <= kMostBlocks * device.multiprocessors &&
         blocks * params.seqlen * 2 * relay::kPaddedStates <= kMostPartialSums;
}

/// The streamed kernels pad one state to sixteen. That pays where others, which have less to do,
/// have too little of it to keep the device busy.
bool leaves_others_idle(const ScanParams& params) {
  constexpr int64_t kFewElements = int64_t{1} << 22;
  return !has_enough_channels(params) && params.batch * params.dim * params.seqlen <= kFewElements;
}
bool pays_padding(const ForwardParams& params) {
  // By increments foh loses the digits of an abar that is small beside 1.
  if (params.is_complex && params.dstate == 1) return params.method != Method::kFoh;
  return params.dstate > 1 || leaves_others_idle(params);
}
bool pays_padding(const BackwardParams& params) {
  return params.dstate > 1 || params.is_complex || leaves_others_idle(params);
}

/// A packed sequence takes a whole chunk for its last steps, and there are launches that tell of
/// the chunks: neither many short sequences nor few elements pay for that. The figures are by
/// count, not measured.
bool pays_chunks(const ScanParams& params) {
  constexpr int64_t kFewestSteps = 16;  // of a sequence on average
  constexpr int64_t kFewElements = int64_t{1} << 20;
  return !params.packed.present() || (params.seqlen >= kFewestSteps * params.packed.count &&
                                      params.dim * params.seqlen >= kFewElements);
}

/// The streamed path is for all else that it can run. It does not cut time into segments where B
/// and C are constant; the general path does, which is faster for few channels with long sequences.
bool is_preferred(const ForwardParams& params, const Device& device,
                  const StreamedForwardPlan& plan) {
  return pays_padding(params) && pays_chunks(params) &&
         (params.variable_B || params.seqlen < kShortSequence ||
          warps_per_multiprocessor(params, plan.warp_channels, device) >= 2);
}

/// Blocks of few warps read B and C too often.
bool is_preferred(const BackwardParams& params, const Device&, const StreamedBackwardPlan& plan) {
  return pays_padding(params) && pays_chunks(params) && plan.has_enough_warps;
}

// --- the choice ---

[[noreturn]] void fail(const std::string& what, const Refusal& refusal) {
  std::string message = "selective_scan: " + what + refusal.reason;
  if (refusal.got >= 0) message += ", got " + std::to_string(refusal.got);
  throw std::runtime_error(message);
}

template <Path kPath, class AnyPlan, class Params>
Refusal make(const Params& params, const Device& device, AnyPlan& any) {
  constexpr bool kTakesPacked = kPath == Path::kGeneral || kPath == Path::kStreamed;
  if (params.packed.present() && !kTakesPacked) return {"sequences are packed"};
  auto& plan = any.of_path.template emplace<static_cast<size_t>(kPath)>();
  if constexpr (kPath == Path::kGeneral) return plan_general(params, device, plan);
  if constexpr (kPath == Path::kDstate1) return plan_dstate1(params, device, plan);
  if constexpr (kPath == Path::kRelay) return plan_relay(params, device, plan);
  if constexpr (kPath == Path::kStreamed) return plan_streamed(params, device, plan);
}

template <Path kPath, class AnyPlan, class Params>
bool takes(const Params& params, const Device& device, AnyPlan& any) {
  return !make<kPath>(params, device, any) &&
         is_preferred(params, device, std::get<static_cast<size_t>(kPath)>(any.of_path));
}

template <class AnyPlan, class Params>
AnyPlan choose(const Params& params, const Device& device, std::optional<Path> wanted) {
  AnyPlan plan;
  if (wanted) {
    using Make = Refusal (*)(const Params&, const Device&, AnyPlan&);
    constexpr Make kMakers[] = {
        &make<Path::kGeneral, AnyPlan, Params>, &make<Path::kDstate1, AnyPlan, Params>,
        &make<Path::kRelay, AnyPlan, Params>, &make<Path::kStreamed, AnyPlan, Params>};
    const auto path = static_cast<size_t>(*wanted);
    if (const Refusal refusal = kMakers[path](params, device, plan)) {
      fail("SELECTIVE_SCAN_CUDA_KERNELS=" + std::string(kPathNames[path]) +
               " cannot run this call: ",
           refusal);
    }
  } else if (!takes<Path::kDstate1>(params, device, plan) &&
             !takes<Path::kRelay>(params, device, plan) &&
             !takes<Path::kStreamed>(params, device, plan)) {
    if (const Refusal refusal = make<Path::kGeneral>(params, device, plan)) fail("", refusal);
  }
  return plan;
}

}  // namespace

ForwardPlan plan_forward(const ForwardParams& params, const Device& device,
                         std::optional<Path> wanted) {
  return choose<ForwardPlan>(params, device, wanted);
}

BackwardPlan plan_backward(const BackwardParams& params, const Device& device,
                           std::optional<Path> wanted) {
  return choose<BackwardPlan>(params, device, wanted);
}

}  // namespace selective_scan::cuda
