// The arguments of the selective-scan ops: validation, and translation to the kernels' parameters.
#pragma once

#include <string>

#include "../core/params.h"
#include "argument_tables.h"
#include "packed_sequences.h"
#include "tensor_views.h"

namespace selective_scan::op {

/// The arguments that the scan's ops share.
using ScanArguments = tables::SelectiveScanArguments;

/// Returns the names of the methods in this build, in the format of SELECTIVE_SCAN_METHODS.
std::string built_methods();

/// Returns the method with this name; refuses one that was left out of this build.
Method parse_method(const std::string& name);

/// Refuses invalid and unsupported calls; returns parameters with sizes, flags and inputs filled
/// in. With `is_matrix_A`, A is (dim, dstate, dstate), not (dim, dstate). `max_dstate` is the
/// backend's limit, 0 for none.
ScanParams make_scan_params(const ScanArguments& args, bool is_matrix_A, int64_t max_dstate);

/// Returns the dtype of states: float32 or float64, as the arithmetic, and complex if A is.
ScalarType state_dtype(const ScanParams& params);

// Views of checked tensors. If the scan is reversed, views with steps start at the last step and
// have a negative step stride.

/// A view of (batch, dim, seqlen), or of (dim, seqlen).
ArrayView sequence_view(const Tensor& tensor, bool reverse);
/// A view of B or C: (dim, dstate), (batch, dstate, seqlen) or (batch, groups, dstate, seqlen),
/// with a last dimension twice as long if a real tensor interleaves complex values. Without a
/// batch: (dim, dstate) or (groups, dstate, seqlen).
ArrayView projection_view(const Tensor& tensor, const ScanParams& params, bool reverse,
                          bool has_batch = true);

/// Fills in the inputs of a scan or a prefill, whose sizes must already be set.
void set_inputs(ScanParams& params, const auto& args, bool reverse) {
  const bool has_batch = args.u.dim() == 3;
  params.variable_B = args.B.dim() != 2;
  params.variable_C = args.C.dim() != 2;
  params.u = sequence_view(args.u, reverse);
  params.delta = sequence_view(args.delta, reverse);
  params.A = pole_view(args.A);
  params.B = projection_view(args.B, params, reverse, has_batch);
  params.C = projection_view(args.C, params, reverse, has_batch);
  if (args.D) params.D = channel_view(*args.D);
  if (args.z) params.z = sequence_view(*args.z, reverse);
  if (args.input_delta) params.input_delta = sequence_view(*args.input_delta, reverse);
  if (args.delta_bias) params.delta_bias = channel_view(*args.delta_bias);
}

}  // namespace selective_scan::op
