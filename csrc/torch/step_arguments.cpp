#include "step_arguments.h"

#include "checked_call.h"

namespace selective_scan::op {
namespace {

using Args = StepArguments::Op;

/// The destination of an argument in the kernels' parameters: the member for a read-only list, and
/// the member for the dtype of all its entries.
struct Field {
  Index argument;
  const void* StepLayer::* data;
  DType StepParams::* dtype;
};

constexpr Field kFields[] = {
    {Args::kNorm, &StepLayer::norm, &StepParams::norm_dtype},
    {Args::kInProj, &StepLayer::in_proj, &StepParams::weight_dtype},
    {Args::kInProjBias, &StepLayer::in_bias, &StepParams::in_bias_dtype},
    {Args::kConv1d, &StepLayer::conv, nullptr},
    {Args::kConv1dBias, &StepLayer::conv_bias, &StepParams::conv_bias_dtype},
    {Args::kXProj, &StepLayer::x_proj, nullptr},
    {Args::kDtProj, &StepLayer::dt_proj, nullptr},
    {Args::kDtProjBias, &StepLayer::dt_bias, &StepParams::dt_bias_dtype},
    {Args::kALog, &StepLayer::A_log, &StepParams::A_dtype},
    {Args::kD, &StepLayer::D, &StepParams::D_dtype},
    {Args::kOutProj, &StepLayer::out_proj, nullptr},
    {Args::kOutProjBias, &StepLayer::out_bias, &StepParams::out_bias_dtype},
    {Args::kNormF, nullptr, &StepParams::final_norm_dtype},
};

/// Checks that all entries have the strides of the first: kernels have one set of strides for the
/// states of all layers. Strides of dimensions of size 1 do not matter.
void check_strides(const char* name, Entries entries) {
  const Tensor& first = entries.front();
  const auto sizes = first.sizes(), wanted = first.strides();
  for (size_t entry = 0; entry < entries.size(); ++entry) {
    const auto strides = entries[entry].strides();
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] < 2 || strides[i] == wanted[i]) continue;
      fail(name, "[", entry, "] must have the strides of ", name, "[0], ", strides_text(first),
           ", got ", strides_text(entries[entry]));
    }
  }
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
  params.inner_eps = args.inner_eps;

  CheckedCall checked(tables::kS6Step, {}, args.tensors);
  checked.check_shapes();
  for (const Index list : {Args::kConvState, Args::kState}) {
    check_strides(tables::kS6Step.arguments[list].name, args.tensors[list]);
  }

  params.is_double = checked.is_double();
  params.batch = checked[tables::kBatch];
  params.steps = checked[tables::kSteps];
  params.dim = checked[tables::kDModel];
  params.inner = checked[tables::kDInner];
  params.dstate = checked[tables::kDstate];
  params.rank = checked[tables::kDtRank];
  params.width = checked[tables::kWidth];
  if (args.has(Args::kHead)) params.vocabulary = checked[tables::kVocabulary];
  params.slots = args.tensors[Args::kState].front().size(0);

  const auto states_view = [&](Index list, int64_t ArrayView::* last) {
    ArrayView view =
        view_of(args.tensors[list].front(), &ArrayView::batch, &ArrayView::channel, last);
    view.data = nullptr;
    return view;
  };
  params.hidden = hidden_view(args.hidden());
  params.conv_state = states_view(Args::kConvState, &ArrayView::step);
  params.state = states_view(Args::kState, &ArrayView::state);
  if (args.has(Args::kStateBatchIndices)) {
    params.slot_indices = index_view(args.tensors[Args::kStateBatchIndices].front());
  }
  const auto single = [&](Index argument) -> const void* {
    if (!args.has(argument)) return nullptr;
    return contiguous_data(args.tensors[argument].front(), alignment, call.copies);
  };
  params.final_norm = single(Args::kNormF);
  params.head = single(Args::kHead);

  call.layers.resize(args.tensors[Args::kInProj].size());
  for (const Field& field : kFields) {
    const Entries entries = args.tensors[field.argument];
    if (!entries.empty() && field.dtype) params.*field.dtype = component_dtype(entries.front());
    for (size_t i = 0; field.data && i < entries.size(); ++i) {
      call.layers[i].*field.data = contiguous_data(entries[i], alignment, call.copies);
    }
  }
  for (size_t i = 0; i < call.layers.size(); ++i) {
    call.layers[i].conv_state = args.tensors[Args::kConvState][i].mutable_data_ptr();
    call.layers[i].state = args.tensors[Args::kState][i].mutable_data_ptr();
  }
  params.layers = static_cast<int64_t>(call.layers.size());
  params.layer = call.layers.data();
  return call;
}

}  // namespace selective_scan::op
