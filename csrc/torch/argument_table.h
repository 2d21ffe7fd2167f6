// The tables of operators' arguments. setup.py runs argument_tables.py, which writes the tables of
// selective_scan/ (explained in selective_scan/_table.py) as a C++ header. That header also has
// kSchemas, the schemas of the operators' ops.
//
// Next to each table, the header defines a struct of the operator's arguments, in the order of the
// op. tensors() returns the arguments that the table describes, and the struct's constants are
// their indices. one_by_one<kOp> has the signature with which PyTorch calls the op; it packs the
// arguments into the struct and calls kOp with the struct and any further arguments.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "tensor_checks.h"
#include "text.h"

namespace selective_scan::op {

using Index = int8_t;
constexpr Index kNoIndex = -1;

/// A size that a call knows by one name, times a factor; a factor of 0 marks an unused term.
struct Term {
  Index size;
  int8_t factor;
};

/// A dimension of a tensor, such as "seqlen" or "width-1": a sum of terms and a constant.
struct Dimension {
  const char* name;
  std::array<Term, 2> terms;
  int8_t constant;
  int8_t least, most;  // kNoIndex: unbounded
  bool is_optional;    // exists only if the call knows its size
};

struct Alternative {
  std::array<Index, 4> dims;
  Index rank;
};

/// The shape of an argument. It is empty if the operator checks the shape by itself.
struct ArgumentShape {
  std::array<Alternative, 3> alternatives;
  std::array<Alternative, 1> otherwise;
  Index count;
  Index where;                   // an argument; without it `otherwise` replaces `alternatives`
  Index two_of, doubled;         // dimensions; `doubled` is a last `two_of` with interleaved parts
  std::array<Index, 2> divided;  // sizes that the groups must divide; the first known one counts
  bool is_packed;
  Index one;    // a size that is 1 unless an earlier argument defines it
  int8_t most;  // of the last dimension; kNoIndex: unbounded
};

struct DtypeCase {
  std::array<ScalarType, 6> dtypes;
  Index count;             // kNoIndex: the operator checks by itself
  Index is_complex, rank;  // of calls and tensors to which the case applies; kNoIndex: any
  bool needs_given, needs_half;
  const char* remark;
};

struct Argument {
  const char* name;
  std::array<DtypeCase, 3> cases;
  Index dtype_of;  // an argument, whose first tensor's dtype this one must have
  const char* dtype_remark;
  ArgumentShape shape;
  bool is_changed, is_list, is_optional;
};

/// In calls without the argument `without`, `size` equals `other`.
struct EqualSizes {
  Index without;
  Index size, other;
};

struct ArgumentTable {
  std::span<const Argument> arguments;
  std::span<const Index> by_shape;  // in the order in which shapes are checked
  std::span<const EqualSizes> equal_sizes;
  Index anchor;
  Index counted_by;     // a list that all other lists must match in length
  uint32_t complex_by;  // bit i: argument i, if complex, makes the call complex
};

/// The table of an operator with `kCount` tensor arguments; calls must pass exactly as many.
template <size_t kCount>
struct TableOf : ArgumentTable {};

/// The tensors of an argument: one, all those of a list, or none if it is not given.
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
