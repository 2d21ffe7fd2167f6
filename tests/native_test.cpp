// Tests csrc/core and csrc/cpu without Python and PyTorch, for machines that have neither:
// tools/cross_test.sh cross-compiles the program and runs it under an emulator.
//
// This file compares the vector functions with long double, and tests conversions and the mode for
// denormal numbers. native_scan.cpp compares the scans with plain loops.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/element.h"
#include "cpu/capability.h"
#include "cpu/flush_denormals.h"
#include "cpu/simd/tile.h"
#include "cpu/simd/vector.h"
#include "cpu/simd/vector_math.h"
#include "cpu/tasks.h"
#include "native_test.h"

namespace selective_scan {
namespace {

using cpu::Baseline;
using cpu::Vec;
using cpu::VectorMath;

// --- vector functions ----------------------------------------------------------------------------

/// Returns the distance in units of the last place of the exact value.
template <class T>
long double ulps(T actual, long double exact) {
  constexpr int kDigits = std::numeric_limits<T>::digits;
  constexpr int kLowest = std::numeric_limits<T>::min_exponent;
  int exponent = kLowest;
  if (exact != 0) std::frexp(exact, &exponent);
  return std::fabs(actual - exact) / std::ldexp(1.0L, std::max(exponent, kLowest) - kDigits);
}

/// Returns sin(x + quarters·π/2) for x up to some thousands. The angle is reduced here, since a C
/// library may leave the reduction to the x87 (mingw-w64's does), whose π has 66 bits.
long double sine(long double x, int quarters) {
  // π/2 in two parts; multiples of the first are exact.
  constexpr long double kHigh = 0x1.921fb544p+0L, kLow = 0x4.2d18469898cc51701b839a2p-36L;
  const long double count = std::round(x / kHigh);
  const long double rest = x - count * kHigh - count * kLow;
  const int quadrant = (static_cast<int>(count) + quarters) & 3;
  const long double value = quadrant % 2 == 0 ? std::sin(rest) : std::cos(rest);
  return quadrant < 2 ? value : -value;
}

template <class T>
struct Function {
  const char* name;
  std::function<Vec<T, Baseline>(Vec<T, Baseline>)> vector;
  std::function<long double(long double)> exact;
  double low, high;
  double limit = 2;  // ulp
};

template <class T>
std::vector<Function<T>> functions() {
  using R = Vec<T, Baseline>;
  const double high = std::log(std::numeric_limits<T>::max()) * 0.9999;
  const double low = std::log(std::numeric_limits<T>::min());
  return {
      {"exp", [](R x) { return VectorMath::exp(x); }, [](long double x) { return std::exp(x); },
       low, high},
      {"sin",
       [](R x) {
         R sine, cosine;
         VectorMath::sincos(x, sine, cosine);
         return sine;
       },
       [](long double x) { return sine(x, 0); }, -5e3, 5e3},
      {"cos",
       [](R x) {
         R sine, cosine;
         VectorMath::sincos(x, sine, cosine);
         return cosine;
       },
       [](long double x) { return sine(x, 1); }, -5e3, 5e3},
      {"softplus", [](R x) { return VectorMath::softplus(x); },
       [](long double x) { return x > 20 ? x : std::log1p(std::exp(x)); }, -80, 80, 2.75},
      {"sigmoid", [](R x) { return VectorMath::sigmoid(x); },
       [](long double x) { return 1 / (1 + std::exp(-x)); }, -80, 80, 2.75},
  };
}

template <class T>
void test_functions() {
  using R = Vec<T, Baseline>;
  for (const Function<T>& function : functions<T>()) {
    long double worst = 0;
    for (int i = 0; i < 3000; ++i) {
      T lanes[R::kWidth], results[R::kWidth];
      for (T& x : lanes) {  // uniform, around zero, or spread over the magnitudes
        x = static_cast<T>(i % 3 == 0   ? uniform(function.low, function.high)
                           : i % 3 == 1 ? uniform(-2, 2)
                                        : std::pow(10.0, uniform(-12, 1)));
        x = std::max(x, static_cast<T>(function.low));
      }
      function.vector(R::load(lanes)).store(results);
      for (int lane = 0; lane < R::kWidth; ++lane) {
        worst = std::max(worst, ulps(results[lane], function.exact(lanes[lane])));
      }
    }
    std::printf("%s, %zu bytes: %.2Lf ulp\n", function.name, sizeof(T), worst);
    expect(worst <= function.limit, std::string(function.name) + " to the limit");
    const T nan = std::numeric_limits<T>::quiet_NaN();
    expect(std::isnan(function.vector(R(nan)).lane(0)), std::string(function.name) + " of NaN");
  }
  const T infinity = std::numeric_limits<T>::infinity();
  expect(VectorMath::exp(R(infinity)).lane(0) == infinity, "exp(inf)");
  expect(VectorMath::exp(R(-infinity)).lane(0) == 0, "exp(-inf)");
  expect(VectorMath::softplus(R(-infinity)).lane(0) == 0, "softplus(-inf)");
  expect(VectorMath::sigmoid(R(infinity)).lane(0) == 1, "sigmoid(inf)");
}

/// Decodes a binary16 from its exponent and mantissa.
float value_of(Half half) {
  const int exponent = (half.bits >> 10) & 31, mantissa = half.bits & 1023;
  const double magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                           : exponent > 0 ? std::ldexp(1024 + mantissa, exponent - 25)
                                          : std::ldexp(mantissa, -24);
  return static_cast<float>(half.bits >> 15 ? -magnitude : magnitude);
}
float value_of(BFloat16 value) {
  return bit_cast<float>(uint32_t{value.bits} << 16);
}

/// Vectors convert 16-bit elements as the scalar functions do, for all bit patterns and random
/// floats, and the scalar functions return the values that the patterns encode.
template <class Element>
void test_conversions(const std::string& name) {
  using R = Vec<float, Baseline>;
  using Convert = cpu::Converter<R, Element>;
  bool values_hold = true, loads = true, stores = true;
  for (int i = 0; i < 1 << 16; i += R::kWidth) {
    Element elements[R::kWidth], stored[R::kWidth];
    float values[R::kWidth];
    for (int lane = 0; lane < R::kWidth; ++lane) {
      elements[lane].bits = static_cast<uint16_t>(i + lane);
      values[lane] = bit_cast<float>(static_cast<uint32_t>(random_bits()));
    }
    const R loaded = Convert::load(elements);
    Convert::store(R::load(values), stored);
    for (int lane = 0; lane < R::kWidth; ++lane) {
      const float expected = to_float(elements[lane]);
      const float exact = value_of(elements[lane]);
      values_hold &= bit_cast<uint32_t>(expected) == bit_cast<uint32_t>(exact) ||
                     (std::isnan(expected) && std::isnan(exact));
      loads &= bit_cast<uint32_t>(loaded.lane(lane)) == bit_cast<uint32_t>(expected) ||
               (std::isnan(expected) && std::isnan(loaded.lane(lane)));
      const auto alone = to_element<Element>(values[lane]);
      stores &= alone.bits == stored[lane].bits ||
                (std::isnan(to_float(alone)) && std::isnan(to_float(stored[lane])));
    }
  }
  expect(values_hold, "value of " + name);
  expect(loads, "load " + name);
  expect(stores, "store " + name);
}

// --- denormal numbers ----------------------------------------------------------------------------

/// Tasks flush denormals and leave the mode of their caller unchanged, also after an exception.
void test_mode(const std::string& text) {
  const bool before = flushes();
  const auto stays = [&](const char* what) {
    expect(flushes() == before, "the mode stays: " + text + ", " + what);
  };
  for (const int threads : {1, 3}) {
    const cpu::ThreadPool pool = pool_of(threads);
    bool inside = true;
    cpu::run_tasks(7, threads, pool, [&](int64_t, int64_t) {
      inside &= flushes();
      cpu::run_tasks(2, 1, pool.one_thread(), [](int64_t, int64_t) {});
      inside &= flushes();  // also after a task's own tasks
    });
    stays("run_tasks");
    cpu::parallel_for(pool, 7, [&](int64_t) { inside &= flushes(); });
    stays("parallel_for");
    expect(inside, "tasks flush: " + text);
    try {
      cpu::parallel_for(pool, 7, [](int64_t) { throw std::runtime_error("of a task"); });
      expect(false, "a task's exception passes");
    } catch (const std::runtime_error&) {
      stays("an exception");
    }
  }
}

void test_denormals() {
  expect(!flushes(), "a program begins without flushing");
  test_mode("off");
  const cpu::FlushDenormals flush;
  test_mode("on");
  test_conversions<Half>("float16, flushing");
  test_conversions<BFloat16>("bfloat16, flushing");
}

int run_all(uint64_t seed) {
  std::printf("seed %llu, capability %s, %d floats to a vector\n",
              static_cast<unsigned long long>(seed), cpu::capability(),
              Vec<float, Baseline>::kWidth);
  random_bits.seed(seed);
  test_functions<float>();
  test_functions<double>();
  test_conversions<Half>("float16");
  test_conversions<BFloat16>("bfloat16");
  test_denormals();
  test_scans();
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace selective_scan

int main(int count, char** arguments) {
  const uint64_t seed =
      count > 1 ? std::strtoull(arguments[1], nullptr, 10) : std::random_device{}();
  return selective_scan::run_all(seed);
}
