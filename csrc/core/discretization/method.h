// The discretizations by name. csrc/core/discretization.h tells how to add one.
#pragma once

#include <cstdint>

namespace selective_scan {

enum class Method : int8_t { kZoh, kFoh, kBilinear, kPoly, kHighorder, kRk4 };

/// Indexed by Method.
constexpr const char* kMethodNames[] = {"zoh", "foh", "bilinear", "poly", "highorder", "rk4"};
constexpr int kNumMethods = sizeof(kMethodNames) / sizeof(kMethodNames[0]);

}  // namespace selective_scan
