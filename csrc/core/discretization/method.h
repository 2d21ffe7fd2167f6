// The names of the discretizations. csrc/core/discretization.h says how to add one.
#pragma once

#include <cstdint>

namespace selective_scan {

/// highorder, poly and rk4 differ in their coefficients alone. kSeries stands for all three in
/// kernels that take the coefficients at run time; no call has this value.
enum class Method : int8_t { kSeries = -1, kZoh, kFoh, kBilinear, kPoly, kHighorder, kRk4 };

/// Indexed by Method.
constexpr const char* kMethodNames[] = {"zoh", "foh", "bilinear", "poly", "highorder", "rk4"};
constexpr int kNumMethods = sizeof(kMethodNames) / sizeof(kMethodNames[0]);

/// Returns the method that the kernels running `method` are compiled for.
constexpr Method kernel_method(Method method) {
  const bool is_series =
      method == Method::kHighorder || method == Method::kPoly || method == Method::kRk4;
  return is_series ? Method::kSeries : method;
}

}  // namespace selective_scan
