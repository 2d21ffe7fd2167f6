// The processor's fused multiply-add peak: independent chains of fp32 FMAs that never leave the
// registers, at the vector width of a given instruction set.

#include <chrono>
#include <cstring>

namespace {

constexpr int kChains = 12;  // enough to cover the latency (4-5 cycles) of two FMA units
constexpr int kRounds = 4096;

// Chains per call; volatile factors keep the compiler from computing the result ahead.
volatile float factor = 0.999999f;
volatile float addend = 1e-6f;

using Vector4 = float __attribute__((vector_size(16)));
using Vector8 = float __attribute__((vector_size(32)));
using Vector16 = float __attribute__((vector_size(64)));

// Always inlined, so that it is compiled for the instruction set of its caller.
template <typename Vector>
__attribute__((always_inline)) inline float chains() {
  constexpr int kLanes = sizeof(Vector) / sizeof(float);
  const Vector x = Vector{} + factor;
  const Vector y = Vector{} + addend;
  Vector sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = y * static_cast<float>(i);
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = sums[i] * x + y;
  }
  float total = 0;
  for (const Vector& sum : sums) {
    for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
  }
  return total;
}

float chains_default() {
  return chains<Vector4>();
}
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) float chains_avx2() {
  return chains<Vector8>();
}
__attribute__((target("avx512f"))) float chains_avx512() {
  return chains<Vector16>();
}
#endif

}  // namespace

/// One core's floating-point operations per second (2 per FMA and lane), the best of the
/// stretches that fit into `seconds`; 0 for an instruction set that this build does not know.
extern "C" double fma_flops_per_second(const char* capability, double seconds) {
  float (*run)() = nullptr;
  double lanes = 0;
  if (std::strcmp(capability, "default") == 0) run = chains_default, lanes = 4;
#if defined(__x86_64__)
  if (std::strcmp(capability, "avx2") == 0) run = chains_avx2, lanes = 8;
  if (std::strcmp(capability, "avx512") == 0) run = chains_avx512, lanes = 16;
#endif
  if (run == nullptr) return 0;

  using Clock = std::chrono::steady_clock;
  volatile float sink = 0;
  double best = 0;
  const auto begin = Clock::now();
  auto now = begin;
  do {
    const auto start = Clock::now();
    for (int i = 0; i < 64; ++i) sink = run();
    now = Clock::now();
    const double flops = 64.0 * kRounds * kChains * lanes * 2;
    const double rate = flops / std::chrono::duration<double>(now - start).count();
    if (rate > best) best = rate;
  } while (std::chrono::duration<double>(now - begin).count() < seconds);
  (void)sink;
  return best;
}
