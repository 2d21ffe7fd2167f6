#include "anti_causal_conv.h"

#include <algorithm>
#include <vector>

#include "dispatcher.h"

namespace selective_scan::op {
namespace {

Tensor steps_of(Tensor x, int64_t first, int64_t count) {
  return torch::stable::narrow(x, 2, first, count);
}

Tensor flipped(const Tensor& taps) {
  const std::array<int64_t, 1> dims = {1};
  return call("aten::flip", "", taps, IntHeaderOnlyArrayRef(dims));
}

/// A part is a causal convolution of `steps` that begins at `states` and gives the outputs from
/// `first` on.
struct Part {
  Tensor steps, states;
  int64_t first;

  int64_t count() const { return steps.size(2); }
};

/// Returns the part before the last width-1 outputs, if there is one, and that of these.
std::vector<Part> parts_of(const Tensor& x, int64_t width) {
  const int64_t seqlen = x.size(2), history = width - 1;
  const int64_t last = std::min(seqlen, history), first = seqlen - last;
  std::vector<Part> parts;
  if (first > 0) parts.push_back({steps_of(x, history, first), steps_of(x, 0, history), 0});
  const Tensor zeros = allocate(x, {x.size(0), last, x.size(1)}, dtype_of(x));
  TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(zeros.get()));
  const std::array<int64_t, 2> padding = {0, history - last};
  parts.push_back({torch::stable::transpose(zeros, 1, 2),
                   torch::stable::pad(steps_of(x, first, last), padding), first});
  return parts;
}

}  // namespace

Tensor anti_causal_conv1d(const ConvOps& conv, const Tensor& x, const Tensor& weight,
                          const OptionalTensor& bias) {
  const Tensor taps = flipped(weight);
  const Tensor rows = allocate(x, {x.size(0), x.size(2), x.size(1)}, dtype_of(x));
  const Tensor channels = torch::stable::transpose(rows, 1, 2);
  for (const Part& part : parts_of(x, weight.size(1))) {
    const Tensor out = std::get<0>(conv.forward(
        {part.steps, taps, bias, std::nullopt, std::nullopt, part.states, false, kSilu}));
    copy(steps_of(channels, part.first, part.count()), out);
  }
  return rows;
}

std::tuple<Tensor, Tensor> anti_causal_conv1d_backward(
    const ConvOps& conv, Tensor (*sum)(const Tensor&, const Tensor&), const Tensor& dout,
    const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& dx) {
  const Tensor taps = flipped(weight);
  const int64_t seqlen = x.size(2), history = weight.size(1) - 1;
  Tensor dweight, dbias;
  for (const Part& part : parts_of(x, weight.size(1))) {
    const bool is_before = part.count() > 0 && part.first == 0 && seqlen > history;
    const Tensor dsteps =
        is_before ? steps_of(dx, history, part.count()) : allocate_like(part.steps);
    const auto [part_dweight, part_dbias, dstates] =
        conv.backward(steps_of(dout, part.first, part.count()), std::nullopt, part.steps, taps,
                      bias, std::nullopt, std::nullopt, part.states, kSilu, dsteps);
    if (!dweight.defined()) {
      dweight = part_dweight;
      dbias = part_dbias;
      const int64_t count = std::min(seqlen, history);
      copy(steps_of(dx, 0, count), steps_of(dstates, 0, count));
      continue;
    }
    dweight = sum(dweight, part_dweight);
    if (bias) dbias = sum(dbias, part_dbias);
    const Tensor end = steps_of(dx, part.first, history);
    copy(end, sum(as_contiguous(end), as_contiguous(dstates)));
  }
  return {flipped(dweight), dbias};
}

}  // namespace selective_scan::op
