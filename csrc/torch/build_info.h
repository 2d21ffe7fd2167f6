// What a library was built from, for backends().
#pragma once

#include <string>

// setup.py defines these; a build by hand does without.
#ifndef SELECTIVE_SCAN_VERSION
#define SELECTIVE_SCAN_VERSION "unknown"
#endif
#ifndef SELECTIVE_SCAN_CUDA_ARCHITECTURES
#define SELECTIVE_SCAN_CUDA_ARCHITECTURES "unknown"
#endif

namespace selective_scan::op {

inline std::string compiler_name() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#elif defined(_MSC_VER)
  return "msvc " + std::to_string(_MSC_VER);
#else
  return "unknown";
#endif
}

}  // namespace selective_scan::op
