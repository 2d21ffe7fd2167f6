// The ops are registered in this namespace: torch.ops.selective_scan, unless a build names another,
// so that several builds can be loaded into one process. selective_scan/_ops.py has the same name.
#pragma once

#include <torch/csrc/stable/library.h>

#ifndef SELECTIVE_SCAN_NAMESPACE
#define SELECTIVE_SCAN_NAMESPACE selective_scan
#endif

// PyTorch's macros make names and texts of what they are given, which must be expanded before.
#define SELECTIVE_SCAN_EXPANDED(macro, ...) macro(__VA_ARGS__)
#define SELECTIVE_SCAN_AS_TEXT(name) #name

#define SELECTIVE_SCAN_LIBRARY(m) \
  SELECTIVE_SCAN_EXPANDED(STABLE_TORCH_LIBRARY, SELECTIVE_SCAN_NAMESPACE, m)
#define SELECTIVE_SCAN_LIBRARY_FRAGMENT(m) \
  SELECTIVE_SCAN_EXPANDED(STABLE_TORCH_LIBRARY_FRAGMENT, SELECTIVE_SCAN_NAMESPACE, m)
#define SELECTIVE_SCAN_LIBRARY_IMPL(key, m) \
  SELECTIVE_SCAN_EXPANDED(STABLE_TORCH_LIBRARY_IMPL, SELECTIVE_SCAN_NAMESPACE, key, m)
#define SELECTIVE_SCAN_OP(name) \
  SELECTIVE_SCAN_EXPANDED(SELECTIVE_SCAN_AS_TEXT, SELECTIVE_SCAN_NAMESPACE) "::" name
