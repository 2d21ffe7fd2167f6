// What is in a table of the arguments of an operator. setup.py has argument_tables.py write the
// tables, as a header, from those of selective_scan/; selective_scan/_table.py explains more. The
// header has the schemas of the operators' ops, too: kSchemas.
//
// There is a struct of each table's arguments beside it, in the order of the op. Its tensors() are
// what the table is for, and its constants are indices of these. Its one_by_one<kOp> is the op as
// PyTorch calls it, for a kOp that takes the struct; what comes behind these arguments, kOp takes
// behind it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "tensor_checks.h"

namespace selective_scan::op {

using Index = int8_t;
constexpr Index kNoIndex = -1;

/// A size that a call has under one name, times a factor, which is 0 where there is none.
struct Term {
  Index size;
  int8_t factor;
};

/// A dimension of a tensor, such as "seqlen" or "width-1": a sum of terms and a constant.
struct Dimension {
  const char* name;
  std::array<Term, 2> terms;
  int8_t constant;
  int8_t least, most;  // kNoIndex is any
  bool is_optional;    // only there where its size is known
};

struct Alternative {
  std::array<Index, 4> dims;
  Index rank;
};

/// Nothing is said where the operator checks by itself.
struct ArgumentShape {
  std::array<Alternative, 3> alternatives;
  std::array<Alternative, 1> otherwise;
  Index count;
  Index where;                   // an argument
  Index two_of, doubled;         // dimensions
  std::array<Index, 2> divided;  // sizes
  bool is_packed;
  Index one;    // a size
  int8_t most;  // of the last dimension, kNoIndex is any
};

struct DtypeCase {
  std::array<ScalarType, 6> dtypes;
  Index count;             // kNoIndex where the operator checks by itself
  Index is_complex, rank;  // kNoIndex holds for any
  bool needs_given, needs_half;
  const char* remark;
};

struct Argument {
  const char* name;
  std::array<DtypeCase, 3> cases;
  Index dtype_of;  // an argument, whose first tensor has the dtype
  const char* dtype_remark;
  ArgumentShape shape;
  bool is_changed, is_list, is_optional;
};

/// In calls without an argument, `size` is as large as `other`.
struct EqualSizes {
  Index without;
  Index size, other;
};

struct ArgumentTable {
  std::span<const Argument> arguments;
  std::span<const Index> by_shape;  // the order in which shapes are checked
  std::span<const EqualSizes> equal_sizes;
  Index anchor;
  Index counted_by;     // a list
  uint32_t complex_by;  // a bit for each argument
};

/// One of so many arguments: a call must have as many.
template <size_t kCount>
struct TableOf : ArgumentTable {};

/// The tensors of an argument: one, those of a list, or none where it is not given.
using Entries = std::span<const Tensor>;
inline Entries entries_of(const Tensor& tensor) {
  return {&tensor, 1};
}
inline Entries entries_of(const TensorList& list) {
  return list;
}
template <class Given>
Entries entries_of(const std::optional<Given>& argument) {
  return argument ? entries_of(*argument) : Entries();
}

}  // namespace selective_scan::op
