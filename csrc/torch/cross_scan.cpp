#include "cross_scan.h"

#include <utility>

namespace selective_scan::op {
namespace {

using Sizes = std::vector<int64_t>;

constexpr size_t kDirections = 4;

bool is_along_columns(size_t direction) {
  return direction % 2 == 1;
}
bool is_from_the_end(size_t direction) {
  return direction >= kDirections / 2;
}

Sizes values_of(IntHeaderOnlyArrayRef values) {
  return {values.begin(), values.end()};
}

/// Transposes the map: rows become columns.
Tensor turned(const Tensor& map) {
  Sizes sizes = values_of(map.sizes()), strides = values_of(map.strides());
  const size_t last = sizes.size() - 1;
  std::swap(sizes[last - 1], sizes[last]);
  std::swap(strides[last - 1], strides[last]);
  return view_as(map, sizes_of(sizes), sizes_of(strides));
}

/// Flattens a map, (..., height, width), by rows to (..., height·width): a view if the elements are
/// evenly spaced or there are none, else a copy.
Tensor by_rows(const Tensor& map) {
  Sizes sizes = values_of(map.sizes()), strides = values_of(map.strides());
  const int64_t width = sizes.back(), height = sizes[sizes.size() - 2];
  const int64_t step = width > 1 ? strides.back() : strides[sizes.size() - 2];
  // An empty map counts as contiguous whatever its strides are, so copying it would change nothing.
  const bool is_even =
      map.numel() == 0 || height < 2 || width < 2 || strides[sizes.size() - 2] == width * step;
  if (!is_even) return by_rows(as_contiguous(map));
  sizes.pop_back();
  strides.pop_back();
  sizes.back() = height * width;
  strides.back() = step;
  return view_as(map, sizes_of(sizes), sizes_of(strides));
}

/// Returns the positions of a map in the order of a direction, or of its opposite: scans from the
/// end read the same sequence backwards.
Tensor as_sequence(const Tensor& map, size_t direction) {
  return by_rows(is_along_columns(direction) ? turned(map) : map);
}

/// The inverse of as_sequence(): puts every step back at its position in the map.
Tensor as_map(const Tensor& sequence, size_t direction, int64_t height, int64_t width) {
  if (is_along_columns(direction)) std::swap(height, width);
  Sizes sizes = values_of(sequence.sizes()), strides = values_of(sequence.strides());
  sizes.back() = height;
  sizes.push_back(width);
  strides.push_back(strides.back());
  strides[strides.size() - 2] *= width;
  const Tensor map = view_as(sequence, sizes_of(sizes), sizes_of(strides));
  return is_along_columns(direction) ? turned(map) : map;
}

/// Returns one direction's entry of a parameter that has the directions as its first dimension.
Tensor entry_of(const Tensor& parameter, size_t direction) {
  const auto sizes = parameter.sizes(), strides = parameter.strides();
  const size_t rank = sizes.size() - 1;
  return view_as(parameter, IntHeaderOnlyArrayRef(sizes.data() + 1, rank),
                 IntHeaderOnlyArrayRef(strides.data() + 1, rank),
                 static_cast<int64_t>(direction) * strides[0]);
}
OptionalTensor entry_of(const OptionalTensor& parameter, size_t direction) {
  return parameter ? OptionalTensor(entry_of(*parameter, direction)) : std::nullopt;
}

/// The offset of each kind in the list of all sequences.
enum Kind : size_t { kX = 0, kDelta = 2, kB = kDelta + kDirections, kC = kB + kDirections };

const Tensor& sequence_of(const TensorList& sequences, Kind kind, size_t direction) {
  return sequences[kind + (kind == kX ? is_along_columns(direction) : direction)];
}

}  // namespace

CrossScanned cross_scan_forward(const ScanOps& scan, const Tensor& x, const TensorList& delta,
                                const Tensor& A, const TensorList& B, const TensorList& C,
                                const OptionalTensor& D, const OptionalTensor& delta_bias,
                                bool delta_softplus, const Text& discretization_method,
                                bool save_states) {
  TensorList sequences, outs, all_states;
  for (size_t order = 0; order < 2; ++order) sequences.push_back(as_sequence(x, order));
  for (const TensorList* maps : {&delta, &B, &C}) {
    for (size_t k = 0; k < kDirections; ++k) sequences.push_back(as_sequence((*maps)[k], k));
  }
  for (size_t k = 0; k < kDirections; ++k) {
    const auto [out, last_state, states] = scan.forward(
        {sequence_of(sequences, kX, k), sequence_of(sequences, kDelta, k), entry_of(A, k),
         sequence_of(sequences, kB, k), sequence_of(sequences, kC, k), entry_of(D, k), std::nullopt,
         entry_of(delta_bias, k), delta_softplus, discretization_method, std::nullopt,
         is_from_the_end(k), std::nullopt, std::nullopt},
        save_states, nullptr, false);
    outs.push_back(as_map(out, k, x.size(2), x.size(3)));
    if (states) all_states.push_back(*states);
  }
  return {outs, sequences, all_states};
}

CrossGradients cross_scan_backward(const ScanOps& scan, const Tensor& dout,
                                   const TensorList& sequences, const Tensor& A,
                                   const OptionalTensor& D, const OptionalTensor& delta_bias,
                                   bool delta_softplus, const Text& discretization_method,
                                   const TensorList& states) {
  CrossGradients gradients;
  auto& [dx, ddelta, dB, dC, dA, dD, ddelta_bias] = gradients;
  const std::array<Tensor, 2> douts = {as_sequence(dout, 0), as_sequence(dout, 1)};
  for (size_t k = 0; k < kDirections; ++k) {
    const auto make = [&](TensorList& made, Kind kind) {
      const Tensor gradient = allocate_like(sequence_of(sequences, kind, k));
      made.push_back(as_map(gradient, k, dout.size(2), dout.size(3)));
      return gradient;
    };
    const auto [of_A, of_D, of_delta_bias, of_state, of_steps] = scan.backward(
        {sequence_of(sequences, kX, k), sequence_of(sequences, kDelta, k), entry_of(A, k),
         sequence_of(sequences, kB, k), sequence_of(sequences, kC, k), entry_of(D, k), std::nullopt,
         entry_of(delta_bias, k), delta_softplus, discretization_method, std::nullopt,
         is_from_the_end(k), std::nullopt, std::nullopt},
        douts[is_along_columns(k)], std::nullopt, states[k], make(dx, kX), make(ddelta, kDelta),
        make(dB, kB), make(dC, kC), std::nullopt, nullptr, false);
    dA.push_back(of_A);
    if (of_D.defined()) dD.push_back(of_D);
    if (of_delta_bias.defined()) ddelta_bias.push_back(of_delta_bias);
  }
  return gradients;
}

}  // namespace selective_scan::op
