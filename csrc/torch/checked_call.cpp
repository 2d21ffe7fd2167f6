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
  std::string text = "(";
  for (const Index dim : entries(dims)) {
    text += (text.size() > 1 ? ", " : "") + std::string(kDimensions[dim].name);
  }
  return text + (dims.rank == 1 ? ",)" : ")");
}

}  // namespace

void CheckedCall::check_kinds() {
  const auto count = static_cast<Index>(table_.arguments.size());
  for (Index i = 0; i < count; ++i) {
    if (tensors_[i]) check_dense(table_.arguments[i].name, *tensors_[i]);
  }
  const Argument& anchor = table_.arguments[table_.anchor];
  const Place place = place_of(*tensors_[table_.anchor]);
  for (Index i = 0; i < count; ++i) {
    if (!tensors_[i]) continue;
    if (place_of(*tensors_[i]) != place) {
      check_same_device(table_.arguments[i].name, *tensors_[i], anchor.name,
                        *tensors_[table_.anchor]);
    }
    dtypes_[i] = dtype_of(*tensors_[i]);
    is_double_ = is_double_ || is_double_dtype(dtypes_[i]);
    is_complex_ = is_complex_ || ((table_.complex_by >> i & 1) && is_complex_dtype(dtypes_[i]));
  }
  for (Index i = 0; i < count; ++i) {
    if (tensors_[i]) check_dtype_of_argument(i);
  }
}

void CheckedCall::check_dtype_of_argument(Index index) const {
  const Argument& argument = table_.arguments[index];
  const Tensor& tensor = *tensors_[index];
  if (argument.dtype_of != kNoIndex) {
    if (dtypes_[index] != dtypes_[argument.dtype_of]) {
      check_dtype(argument.name, tensor, {dtypes_[argument.dtype_of]});
    }
    return;
  }
  for (const DtypeCase& it : argument.cases) {
    if (it.is_complex != kNoIndex && it.is_complex != is_complex_) continue;
    if (it.rank != kNoIndex && it.rank != tensor.dim()) continue;
    if (it.needs_given && !limits_.is_given) continue;
    if (it.count == kNoIndex) return;
    const std::span<const ScalarType> allowed(it.dtypes.data(), static_cast<size_t>(it.count));
    if (std::find(allowed.begin(), allowed.end(), dtypes_[index]) == allowed.end()) {
      check_dtype(argument.name, tensor, allowed, it.remark);
    }
    return;
  }
}

/// Leaves out the dimensions that the call does not have.
Alternative CheckedCall::present(const Alternative& dims) const {
  Alternative result{{}, 0};
  for (const Index dim : entries(dims)) {
    const Dimension& it = kDimensions[dim];
    if (!it.is_optional || size_of(it) != Dim::kAny) result.dims[result.rank++] = dim;
  }
  return result;
}

bool CheckedCall::holds(const ArgumentShape& shape, const Tensor& tensor) const {
  if (shape.block_of != kNoIndex) {
    const int64_t rank = shape.alternatives[0].rank;
    const int64_t block = tensor.dim() == rank ? tensor.size(rank - 1) : 0;
    return block > 0 && sizes_[shape.block_of] % block == 0;
  }
  return shape.where == kNoIndex || tensors_[shape.where];
}

void CheckedCall::check_shape_of_argument(Index index) {
  const Argument& argument = table_.arguments[index];
  const ArgumentShape& shape = argument.shape;
  const Tensor& tensor = *tensors_[index];
  const bool is_first = holds(shape, tensor);
  const Alternative* all = is_first ? shape.alternatives.data() : shape.otherwise.data();
  const Index count = is_first ? shape.count : 1;
  const int64_t rank = count > 1 ? tensor.dim() : 0;
  Alternative dims = present(all[0]);
  for (Index i = 1; i < count && dims.rank != rank; ++i) dims = present(all[i]);
  if (count > 1 && dims.rank != rank) {
    std::string texts = text_of(present(all[0]));
    for (Index i = 1; i < count; ++i) {
      texts += (i + 1 < count ? ", " : " or ") + text_of(present(all[i]));
    }
    fail(argument.name, " must be ", texts, ", got ", shape_text(tensor));
  }
  Index& last = dims.dims[dims.rank - 1];
  if (last == shape.two_of && is_complex_ && !is_complex_dtype(dtypes_[index])) {
    last = shape.doubled;
  }
  check_dims(argument, tensor, entries(dims), shape.one);
  if (shape.divided[0] != kNoIndex) check_groups_of_argument(index, dims);
  if (shape.is_packed && sizes_[kBatch] != 1) {
    const Index anchor = table_.anchor;
    fail(table_.arguments[anchor].name, " must have batch of 1 where ", argument.name,
         " is given, got ", shape_text(*tensors_[anchor]));
  }
}

void CheckedCall::check_dims(const Argument& argument, const Tensor& tensor,
                             std::span<const Index> dims, Index one) {
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
    const int64_t known = size_of(dim);  // a name that comes twice was learned just now
    if (known == Dim::kAny) {
      learn(argument, tensor, dim, sizes[i]);
    } else {
      fits = known == sizes[i];
    }
  }
  if (!fits) fail_on_shape(argument.name, tensor, {wanted.data(), dims.size()});
  for (size_t i = 0; i < dims.size(); ++i) {
    const Dimension& dim = kDimensions[dims[i]];
    if (dim.least == kNoIndex) continue;
    const int64_t size = sizes[i];
    if (size < dim.least || (dim.most != kNoIndex && size > dim.most)) {
      fail(argument.name, " must have ", dim.name, " of ",
           dim.most == kNoIndex ? joined({"at least ", dim.least})
                                : joined({dim.least, " to ", dim.most}),
           ", got ", shape_text(tensor));
    }
    if (dim.terms[0].size == kDstate && limits_.max_dstate > 0 && size > limits_.max_dstate) {
      fail(argument.name, " must have dstate of at most ", limits_.max_dstate, " on ",
           device_name(tensor), ", got ", shape_text(tensor));
    }
  }
}

void CheckedCall::check_groups_of_argument(Index index, const Alternative& dims) {
  const bool has_groups = has(dims, kDimensionGroups);
  if (!has_groups && !has(dims, kDimensionBatch)) return;  // constant
  const Argument& argument = table_.arguments[index];
  const auto all = entries(dims);
  const auto place = std::find(all.begin(), all.end(), kDimensionGroups) - all.begin();
  const int64_t groups = has_groups ? tensors_[index]->size(place) : 1;
  const auto [first, second] = argument.shape.divided;
  const Index divided = sizes_[first] != Dim::kAny ? first : second;
  check_groups(argument.name, groups, {kSizeNames[divided], sizes_[divided]});
  if (grouped_ != kNoIndex && groups != groups_) {
    fail(argument.name, " must have as many groups as ", table_.arguments[grouped_].name, ", ",
         groups_, ", got ", groups);
  }
  groups_ = groups;
  grouped_ = grouped_ == kNoIndex ? index : grouped_;
}

void CheckedCall::check_changed_tensors() const {
  for (size_t i = 0; i < table_.arguments.size(); ++i) {
    const Argument& argument = table_.arguments[i];
    if (argument.is_changed && tensors_[i]) check_changed(argument.name, *tensors_[i]);
  }
}

/// Dim::kAny where it is not known.
int64_t CheckedCall::size_of(const Dimension& dim) const {
  int64_t size = dim.constant;
  for (const Term& term : dim.terms) {
    if (term.factor == 0) continue;
    if (sizes_[term.size] == Dim::kAny) return Dim::kAny;
    size += term.factor * sizes_[term.size];
  }
  return size;
}

/// The one of its terms that is not known yet. Each tensor may have another number of groups.
void CheckedCall::learn(const Argument& argument, const Tensor& tensor, const Dimension& dim,
                        int64_t size) {
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
  if (size % unknown->factor != 0) {  // of x and z
    fail(argument.name, " must have an even number of channels, got ", shape_text(tensor));
  }
  set(unknown->size, size / unknown->factor);
}

void CheckedCall::set(Index size, int64_t value) {
  sizes_[size] = value;
  for (const EqualSizes& equal : table_.equal_sizes) {
    const bool applies = equal.without == kNoIndex || !tensors_[equal.without];
    if (applies && equal.other == size) sizes_[equal.size] = value;
  }
}

}  // namespace selective_scan::op
