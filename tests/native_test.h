#pragma once

// What the native tests share: random numbers, counted checks, threads, and the mode for denormal
// numbers. native_test.cpp runs them all.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>

#include "cpu/tasks.h"

namespace selective_scan {

inline std::mt19937_64 random_bits;
inline int failures = 0;
inline int checks = 0;

inline void expect(bool holds, const std::string& what) {
  ++checks;
  if (holds) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

inline double uniform(double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(random_bits);
}

/// Returns a pool whose workers run one after the other: only the assignment of tasks matters here.
inline cpu::ThreadPool pool_of(int threads) {
  return {[](int64_t count, void (*task)(int64_t, int64_t, void*), void* context) {
            for (int64_t i = 0; i < count; ++i) task(i, i + 1, context);
          },
          threads};
}

/// Returns whether this thread's arithmetic treats denormal results and operands as 0.
template <class T>
inline bool flushes() {
  using Limits = std::numeric_limits<T>;
  volatile T least = Limits::min(), denormal = Limits::denorm_min(), half = T(0.5),
             large = T(1) / Limits::epsilon();
  volatile T result = least * half, scaled = denormal * large;
  const T results[] = {result, scaled}, zeros[] = {0, 0};
  const bool all = std::memcmp(results, zeros, sizeof(zeros)) == 0;
  expect(all == (scaled == 0), "results and operands are flushed alike");
  return all;
}
inline bool flushes() {
  expect(flushes<float>() == flushes<double>(), "single and double are flushed alike");
  return flushes<float>();
}

/// Tests the kernels of the scans; native_scan.cpp defines it.
void test_scans();

}  // namespace selective_scan
