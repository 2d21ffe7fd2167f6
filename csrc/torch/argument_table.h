// Tables of what the arguments of an operator must be, and the checks that read them.
//
// setup.py writes the tables (argument_tables.h) from those of selective_scan/, by
// argument_tables.py; selective_scan/_checks.py checks the same in the same order, with the same
// sentences, and explains what is in a table.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "tensor_views.h"

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

struct ArgumentShape {
  std::array<Alternative, 3> alternatives;
  std::array<Alternative, 1> otherwise;
  Index count;
  Index where, block_of;         // an argument, a size
  Index two_of, doubled;         // dimensions
  std::array<Index, 2> divided;  // sizes
  bool is_packed;
  Index one;  // a size
};

struct DtypeCase {
  std::array<ScalarType, 6> dtypes;
  Index count;             // kNoIndex where the operator checks by itself
  Index is_complex, rank;  // kNoIndex holds for any
  bool needs_given;
  const char* remark;
};

struct Argument {
  const char* name;
  std::array<DtypeCase, 3> cases;
  Index dtype_of;  // an argument
  ArgumentShape shape;
  bool is_changed;
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
  uint32_t complex_by;  // a bit for each argument
};

/// One of so many arguments: a call must have as many.
template <size_t kCount>
struct TableOf : ArgumentTable {};

/// The arguments of a call as they are checked, and what follows from them.
class CheckedCall {
 public:
  struct Limits {
    int64_t max_dstate = 0;  // of the backend; 0 is none
    bool is_given = false;   // that argument on which dtypes depend
  };

  /// Checks layouts, devices and dtypes of the tensors, which are those of the table, in its order.
  template <class... Tensors>
  CheckedCall(const TableOf<sizeof...(Tensors)>& table, const Limits& limits,
              const Tensors&... tensors)
      : table_(table), limits_(limits), tensors_{pointer_to(tensors)...} {
    static_assert(sizeof...(Tensors) <= kMost);
    check_kinds();
  }

  /// Checks shapes, and tensors that are changed; before(tensor) is called in front of each shape.
  template <class Before>
  void check_shapes(const Before& before) {
    sizes_.fill(Dim::kAny);
    for (const Index argument : table_.by_shape) {
      if (!tensors_[argument]) continue;
      before(*tensors_[argument]);
      check_shape_of_argument(argument);
    }
    check_changed_tensors();
  }
  void check_shapes() {
    check_shapes([](const Tensor&) {});
  }

  bool is_complex() const { return is_complex_; }
  bool is_double() const { return is_double_; }
  /// That of B and C.
  int64_t groups() const { return groups_ > 0 ? groups_ : 1; }
  /// By its name in argument_tables.h.
  int64_t operator[](Index size) const { return sizes_[size]; }

 private:
  static constexpr size_t kMost = 24;  // arguments, and as many sizes

  static const Tensor* pointer_to(const Tensor& tensor) { return &tensor; }
  static const Tensor* pointer_to(const OptionalTensor& tensor) {
    return tensor ? &*tensor : nullptr;
  }

  void check_kinds();
  void check_dtype_of_argument(Index argument) const;
  void check_shape_of_argument(Index argument);
  void check_dims(const Argument& argument, const Tensor& tensor, std::span<const Index> dims,
                  Index one);
  void check_groups_of_argument(Index argument, const Alternative& dims);
  void check_changed_tensors() const;
  Alternative present(const Alternative& dims) const;
  bool holds(const ArgumentShape& shape, const Tensor& tensor) const;
  int64_t size_of(const Dimension& dim) const;
  void learn(const Argument& argument, const Tensor& tensor, const Dimension& dim, int64_t size);
  void set(Index size, int64_t value);

  const ArgumentTable& table_;
  const Limits limits_;
  std::array<const Tensor*, kMost> tensors_;
  std::array<ScalarType, kMost> dtypes_;
  std::array<int64_t, kMost> sizes_;
  bool is_complex_ = false, is_double_ = false;
  int64_t groups_ = 0;  // 0: B and C are constant, as far as they were looked at
  Index grouped_ = kNoIndex;
};

}  // namespace selective_scan::op
