// Conversions of contiguous arrays to another dtype, optionally mapped or added to another array.
#pragma once

#include "dtype.h"

namespace selective_scan {

struct Conversion {
  enum class Map : int8_t { kIdentity, kNegativeExp };

  const void* source = nullptr;
  const void* addend = nullptr;  // optional, of the target's type: added to the mapped values
  void* target = nullptr;
  int64_t count = 0;
  DType from = DType::kFloat32;
  DType to = DType::kFloat32;
  Map map = Map::kIdentity;
};

/// Conversions that one launch performs together.
struct Conversions {
  static constexpr int kMost = 8;

  Conversion items[kMost];
  int count = 0;
};

}  // namespace selective_scan
