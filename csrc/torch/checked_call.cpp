#include "checked_call.h"

#include <algorithm>

namespace selective_scan::op {
using namespace tables;
namespace {

std::span<const Index> entries(const Alternative& dims) {
  return {dims.dims.data(), static_cast<size_t>(dims.rank)};
}

bool has(const Alternative& dims, Index dim) {
  const auto all = entries(dims);
  return std::find(all.begin(), all.end(), dim) != all.end();
}

std::string text_of(const Alternative& dims) {
  return tuple_text(entries(dims), [](Index dim) { return kDimensions[dim].name; });
}

}  // namespace

/// Returns a name such as "x_proj[3]". Only error messages need it.
std::string CheckedCall::name_of(const Entry& entry) const {
  const Argument& argument = table_.arguments[entry.argument];
  return argument.is_list ? joined(argument.name, "[", entry.number, "]") : argument.name;
}

void CheckedCall::check_kinds() {
  check_counts();
  for_each_entry([&](const Entry& entry) {
    if (!entry.tensor.defined()) fail(name_of(entry), " must be a Tensor, got None");
    if (!is_dense(entry.tensor)) check_dense(name_of(entry).c_str(), entry.tensor);
  });
  const Tensor& anchor = tensors_[table_.anchor].front();
  const Place place = place_of(anchor);
  for_each_entry([&](const Entry& entry) {
    if (place_of(entry.tensor) != place) {
      check_same_device(name_of(entry).c_str(), entry.tensor, table_.arguments[table_.anchor].name,
                        anchor);
    }
    if (entry.number > 0) return;  // its dtype must equal the first's
    const ScalarType dtype = dtypes_[entry.argument] = dtype_of(entry.tensor);
    is_double_ = is_double_ || is_double_dtype(dtype);
    is_complex_ =
        is_complex_ || ((table_.complex_by >> entry.argument & 1) && is_complex_dtype(dtype));
  });
  for_each_entry([&](const Entry& entry) { check_dtype_of_entry(entry); });
}

void CheckedCall::check_counts() const {
  if (table_.counted_by == kNoIndex) return;
  const char* leader = table_.arguments[table_.counted_by].name;
  const size_t wanted = tensors_[table_.counted_by].size();
  if (wanted == 0) fail(leader, " must have at least one tensor, got none");
  for (size_t i = 0; i < table_.arguments.size(); ++i) {
    const Argument& argument = table_.arguments[i];
    const size_t count = tensors_[i].size();
    if (!argument.is_list || count == wanted || (count == 0 && argument.is_optional)) continue;
    fail(argument.name, " must have as many tensors as ", leader, ", ", wanted, ", got ", count);
  }
}

void CheckedCall::check_dtype_of_entry(const Entry& entry) const {
  const Argument& argument = table_.arguments[entry.argument];
  const Tensor& tensor = entry.tensor;
  const ScalarType dtype = entry.number > 0 ? dtype_of(tensor) : dtypes_[entry.argument];
  const bool is_own = argument.dtype_of == entry.argument && entry.number == 0;
  if (argument.dtype_of != kNoIndex && !is_own) {
    const ScalarType wanted = dtypes_[argument.dtype_of];
    if (dtype == wanted) return;
    check_dtype(name_of(entry).c_str(), tensor, {wanted}, argument.dtype_remark);
  }
  for (const DtypeCase& it : argument.cases) {
    if (it.is_complex != kNoIndex && it.is_complex != is_complex_) continue;
    if (it.rank != kNoIndex && it.rank != tensor.dim()) continue;
    if (it.needs_given && !limits_.is_given) continue;
    if (it.needs_half && !is_half_dtype(dtype)) continue;
    if (it.count == kNoIndex) return;
    const std::span<const ScalarType> allowed(it.dtypes.data(), static_cast<size_t>(it.count));
    if (std::find(allowed.begin(), allowed.end(), dtype) == allowed.end()) {
      check_dtype(name_of(entry).c_str(), tensor, allowed, it.remark);
    }
    return;
  }
}

/// Returns the dimensions without the optional ones that the call does not have.
Alternative CheckedCall::present(const Alternative& dims) const {
  Alternative result{{}, 0};
  for (const Index dim : entries(dims)) {
    const Dimension& it = kDimensions[dim];
    if (!it.is_optional || size_of(it) != Dim::kAny) result.dims[result.rank++] = dim;
  }
  return result;
}

void CheckedCall::check_shape_of_entry(const Entry& entry) {
  const ArgumentShape& shape = table_.arguments[entry.argument].shape;
  const Tensor& tensor = entry.tensor;
  const bool is_first = shape.where == kNoIndex || !tensors_[shape.where].empty();
  const Alternative* all = is_first ? shape.alternatives.data() : shape.otherwise.data();
  const Index count = is_first ? shape.count : 1;
  const int64_t rank = count > 1 ? tensor.dim() : 0;
  Alternative dims = present(all[0]);
  for (Index i = 1; i < count && dims.rank != rank; ++i) dims = present(all[i]);
  if (count > 1 && dims.rank != rank) {
    const auto texts =
        alternatives_text(std::span(all, static_cast<size_t>(count)),
                          [&](const Alternative& it) { return text_of(present(it)); });
    fail(name_of(entry), " must be ", texts, ", got ", shape_text(tensor));
  }
  Index& last = dims.dims[dims.rank - 1];
  if (last == shape.two_of && is_complex_ && !is_complex_dtype(dtypes_[entry.argument])) {
    last = shape.doubled;
  }
  check_dims(entry, entries(dims));
  if (shape.most != kNoIndex && tensor.size(dims.rank - 1) > shape.most) {
    fail(name_of(entry), " must have ", kDimensions[last].name, " of 1 to ", shape.most, ", got ",
         shape_text(tensor));
  }
  if (shape.divided[0] != kNoIndex) check_groups_of_entry(entry, dims);
  if (shape.is_packed && sizes_[kBatch] != 1) {
    const Index anchor = table_.anchor;
    fail(table_.arguments[anchor].name, " must have batch of 1 where ", name_of(entry),
         " is given, got ", shape_text(tensors_[anchor].front()));
  }
}

void CheckedCall::check_dims(const Entry& entry, std::span<const Index> dims) {
  const Tensor& tensor = entry.tensor;
  const Index one = table_.arguments[entry.argument].shape.one;
  const auto sizes = tensor.sizes();
  std::array<Dim, 4> wanted{{{""}, {""}, {""}, {""}}};
  bool fits = sizes.size() == dims.size();
  for (size_t i = 0; i < dims.size(); ++i) {
    const Dimension& dim = kDimensions[dims[i]];
    wanted[i] = {dim.name, size_of(dim)};
    if (one != kNoIndex && dim.terms[0].size == one && wanted[i].size == Dim::kAny) {
      wanted[i].size = 1;
    }
    fits = fits && (wanted[i].size == Dim::kAny || wanted[i].size == sizes[i]);
  }
  for (size_t i = 0; fits && i < dims.size(); ++i) {
    if (wanted[i].size != Dim::kAny) continue;
    const Dimension& dim = kDimensions[dims[i]];
    const int64_t known = size_of(dim);  // already known if an earlier dimension has the name
    if (known == Dim::kAny) {
      learn(entry, dim, sizes[i]);
    } else {
      fits = known == sizes[i];
    }
  }
  if (!fits) fail_on_shape(name_of(entry).c_str(), tensor, {wanted.data(), dims.size()});
  for (size_t i = 0; i < dims.size(); ++i) {
    const Dimension& dim = kDimensions[dims[i]];
    if (dim.least == kNoIndex) continue;
    const int64_t size = sizes[i];
    if (size < dim.least || (dim.most != kNoIndex && size > dim.most)) {
      fail(name_of(entry), " must have ", dim.name, " of ",
           dim.most == kNoIndex ? joined("at least ", dim.least)
                                : joined(dim.least, " to ", dim.most),
           ", got ", shape_text(tensor));
    }
    if (dim.terms[0].size == kDstate && limits_.max_dstate > 0 && size > limits_.max_dstate) {
      fail(name_of(entry), " must have dstate of at most ", limits_.max_dstate, " on ",
           device_name(tensor), ", got ", shape_text(tensor));
    }
  }
}

void CheckedCall::check_groups_of_entry(const Entry& entry, const Alternative& dims) {
  const bool has_groups = has(dims, kDimensionGroups);
  if (!has_groups && !has(dims, kDimensionBatch)) return;  // constant
  const std::string name = name_of(entry);
  const auto all = entries(dims);
  const auto place = std::find(all.begin(), all.end(), kDimensionGroups) - all.begin();
  const int64_t groups = has_groups ? entry.tensor.size(place) : 1;
  const auto [first, second] = table_.arguments[entry.argument].shape.divided;
  const Index divided = sizes_[first] != Dim::kAny ? first : second;
  check_groups(name.c_str(), groups, {kSizeNames[divided], sizes_[divided]});
  if (grouped_ != kNoIndex && groups != groups_) {
    fail(name, " must have as many groups as ", table_.arguments[grouped_].name, ", ", groups_,
         ", got ", groups);
  }
  groups_ = groups;
  grouped_ = grouped_ == kNoIndex ? entry.argument : grouped_;
}

void CheckedCall::check_changed_tensors() const {
  for_each_entry([&](const Entry& entry) {
    if (!table_.arguments[entry.argument].is_changed) return;
    check_changed(name_of(entry).c_str(), entry.tensor);
  });
}

/// Returns Dim::kAny if the size is not known.
int64_t CheckedCall::size_of(const Dimension& dim) const {
  int64_t size = dim.constant;
  for (const Term& term : dim.terms) {
    if (term.factor == 0) continue;
    if (sizes_[term.size] == Dim::kAny) return Dim::kAny;
    size += term.factor * sizes_[term.size];
  }
  return size;
}

/// Learns the one term of a dimension that is not known yet. Groups are never learned: each tensor
/// may have a different number of them.
void CheckedCall::learn(const Entry& entry, const Dimension& dim, int64_t size) {
  size -= dim.constant;
  const Term* unknown = nullptr;
  for (const Term& term : dim.terms) {
    if (term.factor == 0 || term.size == kGroups) continue;
    if (sizes_[term.size] == Dim::kAny) {
      unknown = &term;
    } else {
      size -= term.factor * sizes_[term.size];
    }
  }
  if (!unknown) return;
  if (size % unknown->factor != 0) {  // x and z are its halves
    fail(name_of(entry), " must have an even number of channels, got ", shape_text(entry.tensor));
  }
  set(unknown->size, size / unknown->factor);
}

void CheckedCall::set(Index size, int64_t value) {
  sizes_[size] = value;
  for (const EqualSizes& equal : table_.equal_sizes) {
    const bool applies = equal.without == kNoIndex || tensors_[equal.without].empty();
    if (applies && equal.other == size) sizes_[equal.size] = value;
  }
}

}  // namespace selective_scan::op
