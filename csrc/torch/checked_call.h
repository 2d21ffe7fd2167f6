// Checks a call's arguments against a table. selective_scan/_table.py makes the same checks in the
// same order, with the same messages.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "argument_tables.h"
#include "tensor_views.h"

namespace selective_scan::op {

/// The arguments of a call while they are checked, and the sizes and types that follow from them.
class CheckedCall {
 public:
  struct Limits {
    int64_t max_dstate = 0;  // of the backend; 0: no limit
    bool is_given = false;   // whether the argument is given that some dtypes depend on
  };

  /// Checks layouts, devices and dtypes of the tensors, which follow the order of the table.
  template <size_t kCount>
  CheckedCall(const TableOf<kCount>& table, const Limits& limits,
              const std::array<Entries, kCount>& tensors)
      : table_(table), limits_(limits) {
    static_assert(kCount <= kMost);
    std::copy(tensors.begin(), tensors.end(), tensors_.begin());
    check_kinds();
  }

  /// Checks shapes, and tensors that are changed in place. Calls before(tensor) before each shape
  /// is checked.
  template <class Before>
  void check_shapes(const Before& before) {
    sizes_.fill(Dim::kAny);
    for (const Index argument : table_.by_shape) {
      for_each_entry(argument, [&](const Entry& entry) {
        before(entry.tensor);
        check_shape_of_entry(entry);
      });
    }
    check_changed_tensors();
  }
  void check_shapes() {
    check_shapes([](const Tensor&) {});
  }

  bool is_complex() const { return is_complex_; }
  bool is_double() const { return is_double_; }
  /// The number of groups of B and C.
  int64_t groups() const { return groups_ > 0 ? groups_ : 1; }
  /// Returns a size by its index, which the generated tables name.
  int64_t operator[](Index size) const { return sizes_[size]; }

 private:
  static constexpr size_t kMost = 24;  // arguments, and also sizes

  /// A tensor of an argument.
  struct Entry {
    Index argument;
    size_t number;  // in a list
    const Tensor& tensor;
  };

  template <class Visit>
  void for_each_entry(Index argument, const Visit& visit) const {
    const Entries entries = tensors_[argument];
    for (size_t i = 0; i < entries.size(); ++i) visit(Entry{argument, i, entries[i]});
  }
  /// Visits the tensors of all arguments, in the order of the table.
  template <class Visit>
  void for_each_entry(const Visit& visit) const {
    const auto count = static_cast<Index>(table_.arguments.size());
    for (Index argument = 0; argument < count; ++argument) for_each_entry(argument, visit);
  }

  void check_kinds();
  void check_counts() const;
  void check_dtype_of_entry(const Entry& entry) const;
  void check_shape_of_entry(const Entry& entry);
  void check_dims(const Entry& entry, std::span<const Index> dims);
  void check_groups_of_entry(const Entry& entry, const Alternative& dims);
  void check_changed_tensors() const;
  Alternative present(const Alternative& dims) const;
  std::string name_of(const Entry& entry) const;
  int64_t size_of(const Dimension& dim) const;
  void learn(const Entry& entry, const Dimension& dim, int64_t size);
  void set(Index size, int64_t value);

  const ArgumentTable& table_;
  const Limits limits_;
  std::array<Entries, kMost> tensors_;
  std::array<ScalarType, kMost> dtypes_;  // of an argument's first tensor
  std::array<int64_t, kMost> sizes_;
  bool is_complex_ = false, is_double_ = false;
  int64_t groups_ = 0;  // 0: no variable B or C has been checked yet
  Index grouped_ = kNoIndex;
};

/// Sets the kernel parameters that are named after sizes.
template <class Params>
void set_sizes(Params& params, const CheckedCall& call) {
  params.is_double = call.is_double();
  if constexpr (requires { params.is_complex; }) params.is_complex = call.is_complex();
  params.batch = call[tables::kBatch];
  params.dim = call[tables::kDim];
  if constexpr (requires { params.seqlen; }) params.seqlen = call[tables::kSeqlen];
  if constexpr (requires { params.width; }) params.width = call[tables::kWidth];
  if constexpr (requires { params.dstate; }) params.dstate = call[tables::kDstate];
  if constexpr (requires { params.groups; }) params.groups = call.groups();
}

}  // namespace selective_scan::op
