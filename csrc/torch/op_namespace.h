// The namespace in which the ops are registered: torch.ops.selective_scan, unless a build names
// another one so that several builds can be loaded into one process. selective_scan/_ops.py uses
// the same name.
#pragma once

#include <torch/csrc/stable/library.h>

#ifndef SELECTIVE_SCAN_NAMESPACE
#define SELECTIVE_SCAN_NAMESPACE selective_scan
#endif

// PyTorch's macros paste and stringify their arguments, which must therefore be expanded first.
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
