// The discretizations by name. csrc/core/discretization.h tells how to add one.
#pragma once

#include <cstdint>

namespace selective_scan {

/// highorder, poly and rk4 differ in coefficients alone. kSeries stands for them all where kernels
/// take the coefficients at run time; no call has it.
enum class Method : int8_t { kSeries = -1, kZoh, kFoh, kBilinear, kPoly, kHighorder, kRk4 };

/// Indexed by Method.
constexpr const char* kMethodNames[] = {"zoh", "foh", "bilinear", "poly", "highorder", "rk4"};
constexpr int kNumMethods = sizeof(kMethodNames) / sizeof(kMethodNames[0]);

/// The method for which those kernels are compiled that run a method.
constexpr Method kernel_method(Method method) {
  const bool is_series =
      method == Method::kHighorder || method == Method::kPoly || method == Method::kRk4;
  return is_series ? Method::kSeries : method;
}

}  // namespace selective_scan
