// Which calls run in slices or on copies of their rows, and the layout of their memory.

#include "slices.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <initializer_list>

#include "../../core/element.h"
#include "arrays.h"
#include "figures.h"

namespace selective_scan::cuda {
namespace {

/// The partial results of this many slices are kept before they are summed.
constexpr int kSlots = 2;

/// Rows can be vectors if their length is a multiple of this.
constexpr int64_t kVectorItems = 8;

template <class Params>
struct RowsOf;
template <>
struct RowsOf<ForwardParams> {
  static constexpr std::array kInputs = {&ForwardParams::u, &ForwardParams::delta,
                                         &ForwardParams::z};
  static constexpr std::array kOutputs = {&ForwardParams::out};
};
template <>
struct RowsOf<BackwardParams> {
  static constexpr std::array<ArrayView BackwardParams::*, 4> kInputs = {
      &BackwardParams::u, &BackwardParams::delta, &BackwardParams::z, &BackwardParams::dout};
  static constexpr std::array kOutputs = {&BackwardParams::du, &BackwardParams::ddelta,
                                          &BackwardParams::dz};
};

// --- which calls ---

int64_t num_elements(const ScanParams& params) {
  return params.batch * params.dim * params.seqlen;
}

bool lies_along_steps(const ArrayView& view) {
  return std::abs(view.step) <= std::abs(view.channel);
}

/// Returns whether the device has streamed kernels, and these support both passes for this kind of
/// B and C, of input, and of method.
bool has_streamed_kind(const ScanParams& params, const Device& device) {
  const bool is_plain = params.variable_B && !params.is_complex;
  const bool is_known = params.variable_B || !params.is_complex;
  return has_kernels(device, Path::kStreamed) && !params.input_delta.present() &&
         params.variable_B == params.variable_C &&
         (has_all_kernels(params.method) ? is_known : is_plain);
}

/// Returns the layout of u, if it allows vectors or the other layout does not.
Arrangement arrange(const ScanParams& params, DType dtype) {
  const bool may_lie_along_steps = params.seqlen % kVectorItems == 0;
  const bool may_lie_along_channels = params.dim / params.groups % kVectorItems == 0;
  const bool along_steps = lies_along_steps(params.u)
                               ? may_lie_along_steps || !may_lie_along_channels
                               : may_lie_along_steps && !may_lie_along_channels;
  return {params.dstate, 1, dtype, along_steps,
          along_steps ? may_lie_along_steps : may_lie_along_channels};
}

bool is_arranged(const ScanParams& params, const Arrangement& arrangement, const ArrayView& view) {
  if (view.dtype != arrangement.dtype) return false;
  if (!arrangement.has_vectors) return true;
  return arrangement.along_steps ? has_step_vectors(params, view, kVectorItems)
                                 : has_channel_vectors(params, view, kVectorItems);
}

// --- memory layout ---

/// An array (batch, channel, step) in scratch memory.
struct DenseRows {
  ArrayView view;
  int64_t elements;

  DenseRows(const ScanParams& params, const Arrangement& arrangement) {
    const int64_t length =
        round_up(arrangement.along_steps ? params.seqlen : params.dim, kVectorItems);
    const int64_t lines = arrangement.along_steps ? params.dim : params.seqlen;
    view.channel = arrangement.along_steps ? length : 1;
    view.step = arrangement.along_steps ? 1 : length;
    view.batch = length * lines;
    elements = params.batch * view.batch;
    // Either all arrays run with the scan in memory, or all against it.
    if (params.u.step < 0) view.step = -view.step;
  }
  ArrayView at(void* memory, DType dtype, int64_t seqlen) const {
    ArrayView result = view;
    result.dtype = dtype;
    const int64_t first = view.step < 0 ? -(seqlen - 1) * view.step : 0;
    result.data = static_cast<char*>(memory) + first * element_size(dtype);
    return result;
  }
};

/// Returns the part of the call with `count` states from `first` on.
template <class Params>
Params slice_of(const Params& call, int64_t first, int64_t count) {
  Params params = call;
  params.dstate = count;
  const auto skip_states = [&](std::initializer_list<ArrayView*> views) {
    for (ArrayView* view : views) {
      if (view->present()) view->data = element_at(*view, first * view->state);
    }
  };
  skip_states({&params.A, &params.B, &params.C, &params.initial_state});
  // D and dD belong to the first slice.
  if (first > 0) params.D = {};
  if constexpr (std::is_same_v<Params, BackwardParams>) {
    skip_states({&params.dlast_state, &params.dinitial_state, &params.dA, &params.dB, &params.dC});
    if (first > 0) params.dD = {};
  } else {
    skip_states({&params.last_state, &params.map_factor});
  }
  if (params.states != nullptr) {
    const int64_t rows = num_saved_states(call.seqlen) * call.batch * call.dim;
    const int64_t state_bytes = (call.is_double ? 8 : 4) * (call.is_complex ? 2 : 1);
    params.states = static_cast<char*>(params.states) + first * rows * state_bytes;
  }
  return params;
}

/// An output that slices add up to: its place in the call, and memory for the slices' parts.
template <class Params>
struct SharedOutput {
  ArrayView Params::* member;
  RowSum sum;  // of the parts

  ArrayView part(int slot) const {
    ArrayView view = sum.source;
    view.data = element_at(view, slot * sum.stride);
    return view;
  }
};

/// Chooses the arrangement that rows should be copied to, if copies pay.
template <class Params>
std::optional<Arrangement> arrange_copies(const Params& params, const Device& device,
                                          const PlanOf<Params>& plan, bool is_of_one_dtype) {
  const Figures::Choice& figures = figures_of(device).choice;
  const bool is_for_floor = plan.path() == Path::kFloor;
  const int64_t elements = num_elements(params);
  const int64_t fewest = is_for_floor                            ? figures.fewest_copied_for_floor
                         : std::is_same_v<Params, ForwardParams> ? figures.fewest_copied_forward
                                                                 : figures.fewest_copied_backward;
  if (elements < fewest || elements > figures.most_copied || params.is_double) return std::nullopt;
  if (is_for_floor) {
    if (is_of_one_dtype || !has_streamed_kind(params, device)) return std::nullopt;
    return arrange(params, DType::kFloat32);
  }
  if (plan.path() == Path::kStreamed) {
    const auto& rows = std::get<static_cast<size_t>(Path::kStreamed)>(plan.of_path).rows;
    const bool has_vectors = std::all_of(rows.begin(), rows.end(), [](const auto& row) {
      // Backward, kernels that move vectors along channels also move vectors along steps.
      const bool takes_both = std::is_same_v<Params, BackwardParams>;
      return !row.present() || row.has_vectors || (takes_both && row.has_step_vectors);
    });
    const Arrangement arrangement = arrange(params, params.u.dtype);
    // Single elements along steps cost the kernels less than transposing the rows would.
    const bool pays = arrangement.along_steps || !lies_along_steps(params.u);
    if (!has_vectors && arrangement.has_vectors && pays) return arrangement;
  }
  return std::nullopt;
}

}  // namespace

std::optional<Arrangement> arrange_states(const ScanParams& params, const Device& device) {
  // Fewer elements than this are done before several launches have begun.
  constexpr int64_t kFewestElements = int64_t{1} << 16;
  // The most states that the streamed kernels hold: real states by kCommonMethod with variable B
  // and C, and all others.
  constexpr int64_t kMost = 64, kMostOfOthers = 16;
  const bool holds_most = !params.is_complex && params.variable_B && has_all_kernels(params.method);
  const int64_t most = holds_most ? kMost : kMostOfOthers;
  if (params.is_double || !has_streamed_kind(params, device) || params.dstate <= most ||
      num_elements(params) < kFewestElements) {
    return std::nullopt;
  }
  Arrangement arrangement = arrange(params, DType::kFloat32);
  arrangement.slice_states = most;
  arrangement.slices = ceil_div(params.dstate, most);
  return arrangement;
}

std::optional<Arrangement> arrange_rows(const ForwardParams& params, const Device& device,
                                        const ForwardPlan& plan) {
  return arrange_copies(params, device, plan, have_one_dtype(params, rows_of(params)));
}

std::optional<Arrangement> arrange_rows(const BackwardParams& params, const Device& device,
                                        const BackwardPlan& plan) {
  return arrange_copies(
      params, device, plan,
      have_one_dtype(params, rows_of(params)) && streamed::sums_have_digits(params));
}

template <class Params>
SlicedPlan<Params> plan_slices(const Params& call, const Arrangement& arrangement,
                               const Device& device, std::optional<Path> wanted,
                               const ScratchMemory& memory) {
  SlicedPlan<Params> plan;
  const bool has_one = arrangement.slices == 1;
  const int slots = static_cast<int>(std::min<int64_t>(arrangement.slices, kSlots));
  const DType part_dtype = has_one ? arrangement.dtype : DType::kFloat32;
  const DenseRows rows(call, arrangement);
  Params common = call;
  const auto is_copied = [&](const ArrayView& view) {
    return view.present() && !is_arranged(call, arrangement, view);
  };
  const auto has_parts = [&](const ArrayView& view) {
    return view.present() && (!has_one || !is_arranged(call, arrangement, view));
  };
  ScratchLayout layout;
  const auto take_rows = [&](bool wanted_here, int count, DType dtype) {
    return layout.take(wanted_here, count * rows.elements, element_size(dtype));
  };
  std::array<ScratchArray, RowsOf<Params>::kInputs.size()> copies;
  std::array<ScratchArray, RowsOf<Params>::kOutputs.size()> parts;
  for (size_t i = 0; i < copies.size(); ++i) {
    copies[i] = take_rows(is_copied(common.*RowsOf<Params>::kInputs[i]), 1, arrangement.dtype);
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i] = take_rows(has_parts(call.*RowsOf<Params>::kOutputs[i]), slots, part_dtype);
  }
  ScratchArray bias_parts;
  if constexpr (std::is_same_v<Params, BackwardParams>) {
    bias_parts =
        layout.take(call.ddelta_bias.present() && !has_one, slots * call.dim, sizeof(float));
  }
  void* const base = layout.bytes > 0 ? memory(layout.bytes) : nullptr;

  for (size_t i = 0; i < copies.size(); ++i) {
    if (!copies[i].present()) continue;
    ArrayView& view = common.*RowsOf<Params>::kInputs[i];
    const ArrayView target = rows.at(copies[i].in(base), arrangement.dtype, call.seqlen);
    plan.copies.push_back({view, target, call.batch, call.dim, call.seqlen});
    view = target;
  }
  std::vector<SharedOutput<Params>> outputs;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].present()) continue;
    const auto member = RowsOf<Params>::kOutputs[i];
    outputs.push_back({member,
                       {rows.at(parts[i].in(base), part_dtype, call.seqlen), call.*member,
                        call.batch, call.dim, call.seqlen, rows.elements}});
  }
  if constexpr (std::is_same_v<Params, BackwardParams>) {
    if (bias_parts.present()) {
      outputs.push_back({&BackwardParams::ddelta_bias,
                         {{bias_parts.in(base), DType::kFloat32, 0, 1},
                          call.ddelta_bias,
                          1,
                          call.dim,
                          1,
                          call.dim}});
    }
  }

  int used = 0;
  for (int64_t k = 0; k < arrangement.slices; ++k) {
    const int64_t first = k * arrangement.slice_states;
    auto& slice = plan.slices.emplace_back();
    slice.params = slice_of(common, first, std::min(arrangement.slice_states, call.dstate - first));
    for (const auto& output : outputs) slice.params.*output.member = output.part(used);
    ++used;
    slice.plan = plan_scan(slice.params, device, wanted);
    plan.scratch_bytes = std::max(plan.scratch_bytes, slice.plan.scratch_bytes());
    const bool is_last = k + 1 == arrangement.slices;
    if (!is_last && used < slots) continue;
    for (const auto& output : outputs) {
      RowSum& sum = slice.sums.emplace_back(output.sum);
      sum.count = used;
      if (!is_last) sum.target = sum.source;
    }
    used = 1;
  }
  return plan;
}

template SlicedPlan<ForwardParams> plan_slices(const ForwardParams&, const Arrangement&,
                                               const Device&, std::optional<Path>,
                                               const ScratchMemory&);
template SlicedPlan<BackwardParams> plan_slices(const BackwardParams&, const Arrangement&,
                                                const Device&, std::optional<Path>,
                                                const ScratchMemory&);

}  // namespace selective_scan::cuda
