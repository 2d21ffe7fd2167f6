// Arrays of one type after the other, to be had in another type, or added to others of that.
#pragma once

#include "dtype.h"

namespace selective_scan {

struct Conversion {
  enum class Map : int8_t { kIdentity, kNegativeExp };

  const void* source = nullptr;
  const void* addend = nullptr;  // to what is mapped, of the target's type, if any
  void* target = nullptr;
  int64_t count = 0;
  DType from = DType::kFloat32;
  DType to = DType::kFloat32;
  Map map = Map::kIdentity;
};

/// Some that one launch does together.
struct Conversions {
  static constexpr int kMost = 8;

  Conversion items[kMost];
  int count = 0;
};

}  // namespace selective_scan
