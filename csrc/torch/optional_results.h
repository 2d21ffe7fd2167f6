// Forward ops that may return None for some results.
//
// AOTInductor wants the schema to say so with `Tensor?`, but torch.jit.trace refuses such a schema.
// So each of these ops has a variant for tracing, NAME_traced, that returns undefined tensors
// instead. Backward ops also return undefined tensors, as PyTorch's own do: batched gradients
// support nothing else.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "tensor_views.h"

namespace selective_scan::op {

inline OptionalTensor if_defined(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

inline Tensor or_undefined(const Tensor& tensor) {
  return tensor;
}
inline Tensor or_undefined(const OptionalTensor& tensor) {
  return tensor.value_or(Tensor());
}

template <auto kOp, class Type = decltype(kOp)>
struct Traced;
template <auto kOp, class... Results, class... Arguments>
struct Traced<kOp, std::tuple<Results...> (*)(Arguments...)> {
  static auto run(Arguments... arguments) {
    const auto as_tensors = [](const Results&... results) {
      return std::make_tuple(or_undefined(results)...);
    };
    return std::apply(as_tensors, kOp(arguments...));
  }
};

template <auto kOp>
void implement_forward(auto& library, const std::string& name) {
  library.impl(name.c_str(), TORCH_BOX(kOp));
  library.impl((name + "_traced").c_str(), TORCH_BOX(&Traced<kOp>::run));
}

}  // namespace selective_scan::op
