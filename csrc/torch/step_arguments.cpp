#include "step_arguments.h"

#include "../core/conv_params.h"

namespace selective_scan::op {
namespace {

using Args = StepArguments;

/// Sizes by name. Those behind kDstate follow from the ones before.
enum Size {
  kBatch,
  kSteps,
  kDim,
  kInner,
  kWidth,
  kRank,
  kDstate,
  kOne,
  kHistory,
  kTwiceInner,
  kProjections,
  kSlots,
  kVocabulary,
  kBytes,
  kSizes
};
using Sizes = std::array<Dim, kSizes>;

constexpr Sizes kUnknownSizes = {{{"batch"},
                                  {"steps"},
                                  {"d_model"},
                                  {"d_inner"},
                                  {"width"},
                                  {"dt_rank"},
                                  {"dstate"},
                                  {"1", 1},
                                  {"width-1"},
                                  {"2*d_inner"},
                                  {"dt_rank+2*dstate"},
                                  {"slots"},
                                  {"vocabulary"},
                                  {"bytes"}}};

/// What an argument must be, and where the kernels find it.
struct Rule {
  const char* name;
  std::array<Size, 3> dims;
  size_t rank;
  const void* StepLayer::* data = nullptr;    // of a list that is only read
  DType StepParams::* dtype = nullptr;        // of all entries
  Args::Index same_dtype = Args::kArguments;  // whose first entry has the dtype; else its own
};

constexpr std::array<Rule, Args::kArguments> kRules = {{
    {"hidden", {kBatch, kSteps, kDim}, 3},
    {"norm", {kDim}, 1, &StepLayer::norm, &StepParams::norm_dtype},
    {"in_proj", {kTwiceInner, kDim}, 2, &StepLayer::in_proj, &StepParams::weight_dtype},
    {"in_proj_bias", {kTwiceInner}, 1, &StepLayer::in_bias, &StepParams::in_bias_dtype},
    {"conv1d", {kInner, kOne, kWidth}, 3, &StepLayer::conv, nullptr, Args::kInProj},
    {"conv1d_bias", {kInner}, 1, &StepLayer::conv_bias, &StepParams::conv_bias_dtype},
    {"x_proj", {kProjections, kInner}, 2, &StepLayer::x_proj, nullptr, Args::kInProj},
    {"dt_proj", {kInner, kRank}, 2, &StepLayer::dt_proj, nullptr, Args::kInProj},
    {"dt_proj_bias", {kInner}, 1, &StepLayer::dt_bias, &StepParams::dt_bias_dtype},
    {"A_log", {kInner, kDstate}, 2, &StepLayer::A_log, &StepParams::A_dtype},
    {"D", {kInner}, 1, &StepLayer::D, &StepParams::D_dtype},
    {"out_proj", {kDim, kInner}, 2, &StepLayer::out_proj, nullptr, Args::kInProj},
    {"out_proj_bias", {kDim}, 1, &StepLayer::out_bias, &StepParams::out_bias_dtype},
    {"conv_state", {kSlots, kInner, kHistory}, 3},
    {"state", {kSlots, kInner, kDstate}, 3},
    {"norm_f", {kDim}, 1, nullptr, &StepParams::final_norm_dtype},
    {"head", {kVocabulary, kDim}, 2, nullptr, nullptr, Args::kInProj},
    {"state_batch_indices", {kBatch}, 1},
    {"workspace", {kBytes}, 1},
}};

constexpr Args::Index kLists[] = {
    Args::kNorm,    Args::kInProj,      Args::kInProjBias, Args::kConv, Args::kConvBias,
    Args::kXProj,   Args::kDtProj,      Args::kDtProjBias, Args::kALog, Args::kD,
    Args::kOutProj, Args::kOutProjBias, Args::kConvState,  Args::kState};

bool is_optional(Args::Index list) {
  return list == Args::kNorm || list == Args::kInProjBias || list == Args::kConvBias ||
         list == Args::kDtProjBias || list == Args::kOutProjBias;
}

bool is_list(size_t argument) {
  return argument >= Args::kNorm && argument <= Args::kState;
}

/// "x_proj[3]": text that a call which is right has no use for.
std::string entry_name(size_t argument, size_t entry) {
  const char* name = kRules[argument].name;
  return is_list(argument) ? joined({name, "[", entry, "]"}) : name;
}

/// Calls visit(argument, entry, tensor) for every tensor of an argument.
template <class Visit>
void for_each_entry(const Args& args, size_t argument, const Visit& visit) {
  const auto entries = args.tensors[argument];
  for (size_t i = 0; i < entries.size(); ++i) visit(argument, i, entries[i]);
}
/// Calls it for every tensor of all arguments, in schema order.
template <class Visit>
void for_each_tensor(const Args& args, const Visit& visit) {
  for (size_t argument = 0; argument < Args::kArguments; ++argument) {
    for_each_entry(args, argument, visit);
  }
}

void check_counts(const Args& args) {
  const size_t layers = args.tensors[Args::kInProj].size();
  if (layers == 0) fail("in_proj must have at least one tensor, got none");
  for (const Args::Index list : kLists) {
    const size_t count = args.tensors[list].size();
    if (count == layers || (count == 0 && is_optional(list))) continue;
    fail(kRules[list].name, " must have as many tensors as in_proj, ", layers, ", got ", count);
  }
}

void check_dtypes(const Args& args) {
  for_each_tensor(args, [&](size_t argument, size_t entry, const Tensor& tensor) {
    const Rule& rule = kRules[argument];
    const bool follows = rule.same_dtype != Args::kArguments;
    const size_t leader = follows ? static_cast<size_t>(rule.same_dtype) : argument;
    if (follows || entry > 0) {
      const Tensor& first = args.tensors[leader].front();
      if (dtype_of(tensor) == dtype_of(first)) return;
      check_dtype(entry_name(argument, entry).c_str(), tensor, {dtype_of(first)},
                  joined({" (as ", entry_name(leader, 0), ")"}).c_str());
    }
    const auto check = [&](std::initializer_list<ScalarType> allowed) {
      check_dtype(rule.name, tensor, allowed);
    };
    if (argument == Args::kIndices) return check(kIndexDtypes);
    if (argument == Args::kWorkspace) return check({ScalarType::Byte});
    const ScalarType dtype = dtype_of(tensor);
    for (const ScalarType allowed : kRealDtypes) {
      if (dtype == allowed) return;
    }
    check_dtype(entry_name(argument, entry).c_str(), tensor, kRealDtypes);
  });
}

class ShapeChecks {
 public:
  explicit ShapeChecks(const Args& args) : args_(args), sizes_(kUnknownSizes) {
    // The others are measured by these.
    measure(Args::kHidden);
    measure(Args::kConv);
    check_limit(Args::kConv, kWidth, kMaxConvWidth);
    measure(Args::kDtProj);
    measure(Args::kALog);
    check_limit(Args::kALog, kDstate, kMaxStepStates);
    sizes_[kHistory].size = sizes_[kWidth].size - 1;
    sizes_[kTwiceInner].size = 2 * sizes_[kInner].size;
    sizes_[kProjections].size = sizes_[kRank].size + 2 * sizes_[kDstate].size;
    // Without indices every row has the slot of its own number.
    if (!args.has(Args::kIndices)) sizes_[kSlots] = sizes_[kBatch];
    for (size_t argument = 0; argument < Args::kArguments; ++argument) measure(argument);
  }

  int64_t operator[](Size size) const {
    return sizes_[size].size == Dim::kAny ? 0 : sizes_[size].size;
  }

 private:
  /// Compares the sizes with those that are known, and learns the others.
  void measure(size_t argument) {
    const Rule& rule = kRules[argument];
    std::array<Dim, 3> dims{{{""}, {""}, {""}}};
    for_each_entry(args_, argument, [&](size_t, size_t entry, const Tensor& tensor) {
      for (size_t i = 0; i < rule.rank; ++i) dims[i] = sizes_[rule.dims[i]];
      const std::span<const Dim> wanted(dims.data(), rule.rank);
      if (!has_shape(tensor, wanted)) {
        check_shape(entry_name(argument, entry).c_str(), tensor, wanted);
      }
      for (size_t i = 0; i < rule.rank; ++i) sizes_[rule.dims[i]].size = tensor.size(i);
    });
  }

  void check_limit(Args::Index list, Size size, int64_t most) const {
    if (sizes_[size].size >= 1 && sizes_[size].size <= most) return;
    fail(entry_name(list, 0), " must have ", sizes_[size].name, " of 1 to ", most, ", got ",
         shape_text(args_.tensors[list].front()));
  }

  const Args& args_;
  Sizes sizes_;
};

/// Kernels have one set of strides for the states of all layers. Those of a dimension of size 1 do
/// not matter.
void check_strides(const Args& args, Args::Index list) {
  const Tensor& first = args.tensors[list].front();
  const auto sizes = first.sizes(), wanted = first.strides();
  for_each_entry(args, list, [&](size_t, size_t entry, const Tensor& tensor) {
    const auto strides = tensor.strides();
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] < 2 || strides[i] == wanted[i]) continue;
      fail(entry_name(list, entry), " must have the strides of ", entry_name(list, 0), ", ",
           strides_text(first), ", got ", strides_text(tensor));
    }
  });
}

const void* contiguous_data(const Tensor& tensor, int64_t alignment, std::vector<Tensor>& copies) {
  if (!tensor.is_contiguous()) {
    copies.push_back(as_contiguous(tensor));
  } else if (!is_aligned(tensor, alignment)) {
    copies.push_back(allocating(tensor, [&] { return torch::stable::clone(tensor); }));
  } else {
    return tensor.const_data_ptr();
  }
  return copies.back().const_data_ptr();
}

}  // namespace

StepCall make_step_call(const StepArguments& args, int64_t alignment) {
  StepCall call;
  StepParams& params = call.params;
  params.method = args.method;
  params.delta_softplus = args.delta_softplus;
  params.eps = args.eps;

  check_counts(args);
  for_each_tensor(args, [](size_t argument, size_t entry, const Tensor& tensor) {
    if (!is_dense(tensor)) check_dense(entry_name(argument, entry).c_str(), tensor);
  });
  for_each_tensor(args, [&](size_t argument, size_t entry, const Tensor& tensor) {
    if (place_of(tensor) == place_of(args.hidden())) return;
    check_same_device(entry_name(argument, entry).c_str(), tensor, "hidden", args.hidden());
  });
  check_dtypes(args);
  const ShapeChecks sizes(args);
  for (const Args::Index list : {Args::kConvState, Args::kState}) check_strides(args, list);
  for (const Args::Index list : {Args::kConvState, Args::kState, Args::kWorkspace}) {
    for_each_entry(args, list, [](size_t argument, size_t entry, const Tensor& tensor) {
      check_changed(entry_name(argument, entry).c_str(), tensor);
    });
  }

  params.batch = sizes[kBatch];
  params.steps = sizes[kSteps];
  params.dim = sizes[kDim];
  params.inner = sizes[kInner];
  params.dstate = sizes[kDstate];
  params.rank = sizes[kRank];
  params.width = sizes[kWidth];
  params.vocabulary = sizes[kVocabulary];
  params.slots = sizes[kSlots];
  for (size_t argument = 0; argument < Args::kArguments; ++argument) {
    if (!args.has(static_cast<Args::Index>(argument))) continue;
    const Tensor& first = args.tensors[argument].front();
    // Of a list all are of one dtype.
    params.is_double = params.is_double || dtype_of(first) == ScalarType::Double;
    if (kRules[argument].dtype) params.*kRules[argument].dtype = component_dtype(first);
  }

  const auto states_view = [&](Args::Index list, int64_t ArrayView::* last) {
    ArrayView view =
        view_of(args.tensors[list].front(), &ArrayView::batch, &ArrayView::channel, last);
    view.data = nullptr;
    return view;
  };
  params.hidden = hidden_view(args.hidden());
  params.conv_state = states_view(Args::kConvState, &ArrayView::step);
  params.state = states_view(Args::kState, &ArrayView::state);
  if (args.has(Args::kIndices)) {
    params.slot_indices = index_view(args.tensors[Args::kIndices].front());
  }
  const auto single = [&](Args::Index argument) -> const void* {
    if (!args.has(argument)) return nullptr;
    return contiguous_data(args.tensors[argument].front(), alignment, call.copies);
  };
  params.final_norm = single(Args::kNormF);
  params.head = single(Args::kHead);

  call.layers.resize(args.tensors[Args::kInProj].size());
  for (const Args::Index list : kLists) {
    const auto place = kRules[list].data;
    if (!place) continue;
    for_each_entry(args, list, [&](size_t, size_t entry, const Tensor& tensor) {
      call.layers[entry].*place = contiguous_data(tensor, alignment, call.copies);
    });
  }
  for (size_t i = 0; i < call.layers.size(); ++i) {
    call.layers[i].conv_state = args.tensors[Args::kConvState][i].mutable_data_ptr();
    call.layers[i].state = args.tensors[Args::kState][i].mutable_data_ptr();
  }
  params.layers = static_cast<int64_t>(call.layers.size());
  params.layer = call.layers.data();
  return call;
}

void check_slots(const StepParams& params) {
  if (!params.slot_indices.present()) return;
  for (int64_t entry = 0; entry < params.batch; ++entry) {
    const int64_t index = params.slot_indices.at(entry);
    if (index < params.slots) continue;
    fail("state_batch_indices must be less than slots = ", params.slots, ", got ", index);
  }
}

}  // namespace selective_scan::op
