// The properties of a build, for backends().
#pragma once

#include <string>

// setup.py defines these macros; a manual build need not.
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
#else
  return "gcc " __VERSION__;
#endif
}

}  // namespace selective_scan::op
