// The parameters of a kernel: one struct for the forward pass, one for the backward pass.
//
// The caller (csrc/torch) has validated everything and resolved the layout; kernels never see a
// tensor. Two conventions keep them simple:
//  - a dimension that a tensor lacks has stride 0, so constant and variable B and C, shared groups
//    and broadcast inputs are read by the same expression;
//  - reverse=True is expressed by pointing at the last step with a negative step stride (of every
//    array that has steps), so kernels always scan from step 0 to step seqlen - 1.
#pragma once

#include <array>
#include <cstdint>

#include "config.h"
#include "discretization/method.h"
#include "dtype.h"
#include "index_array.h"

namespace selective_scan {

/// A strided array read or written by (batch, channel, group, state, step). Strides count elements
/// of `dtype`. Complex arrays are seen as their real components, with the imaginary part `imag`
/// elements after the real part: native complex tensors have imag = 1, interleaved real tensors the
/// stride of their last dimension.
struct ArrayView {
  void* data = nullptr;  // null: an optional argument that is absent
  DType dtype = DType::kFloat32;
  int64_t batch = 0;
  int64_t channel = 0;
  int64_t group = 0;
  int64_t state = 0;
  int64_t step = 0;
  int64_t imag = 0;

  SELECTIVE_SCAN_HD bool present() const { return data != nullptr; }
};

/// The sizes, flags and inputs that both passes share.
struct ScanParams {
  int64_t batch = 0;  // 1 if sequences are packed
  int64_t dim = 0;
  int64_t groups = 1;  // channel d belongs to group d / (dim / groups)
  int64_t dstate = 0;
  int64_t seqlen = 0;

  Method method = Method::kZoh;
  bool is_complex = false;  // A, B, C and the states are complex
  bool is_double = false;   // arithmetic and states in fp64, else fp32
  bool delta_softplus = false;
  bool variable_B = false;  // B has steps (batch, group, state, step), else (channel, state)
  bool variable_C = false;

  ArrayView u;              // (batch, channel, step)
  ArrayView delta;          // (batch, channel, step)
  ArrayView A;              // (channel, state)
  ArrayView B;              // (batch, group, state, step) or (channel, state)
  ArrayView C;              // like B
  ArrayView D;              // (channel), optional
  ArrayView z;              // (batch, channel, step), optional
  ArrayView input_delta;    // like z: E, if bbar = E·b(Δ·A) instead of Δ·b(Δ·A)
  ArrayView delta_bias;     // (channel), optional
  ArrayView initial_state;  // (sequence, channel, state), optional

  /// States at the inner chunk boundaries, in the order of the scan: index (batch, chunk, channel,
  /// state), contiguous, of the compute type (complex interleaved). Written by the forward pass
  /// when present, read by the backward pass. See num_saved_states(), first_saved_state().
  void* states = nullptr;

  /// If present, the steps are those of several sequences, each with its own states. Otherwise
  /// every batch entry is a sequence.
  PackedSequences packed;

  SELECTIVE_SCAN_HD int64_t sequences() const { return packed.present() ? packed.count : batch; }

  /// The inputs that are (batch, channel, step).
  static constexpr std::array kRows = {&ScanParams::u, &ScanParams::delta, &ScanParams::z,
                                       &ScanParams::input_delta};
};

/// The results that a forward pass computes.
enum class ForwardWanted : int8_t {
  kOutput,       // out, and last_state and saved states if they are present
  kStatesAlone,  // last_state and saved states without out; z is absent
  kMapAlone,     // the map h -> factor·h + offset of all steps (at least one): map_factor, and the
                 // offset as last_state. z, the initial state and saved states are absent
};

struct ForwardParams : ScanParams {
  ForwardParams() = default;
  explicit ForwardParams(const ScanParams& inputs) : ScanParams(inputs) {}

  ForwardWanted wanted = ForwardWanted::kOutput;

  ArrayView out;         // (batch, channel, step)
  ArrayView last_state;  // (sequence, channel, state), of the compute type, optional
  ArrayView map_factor;  // like last_state
};

/// The results that a backward pass computes.
enum class BackwardWanted : int8_t {
  kGradients,   // the gradients of all inputs that are present
  kStateAlone,  // dinitial_state alone, of the compute type, with contiguous states and one stride
                // between channels, also across batch entries: dout is present, dlast_state is not
};

/// A gradient has its input's indices and dtype but its own strides, and is written in full (never
/// accumulated into). du may alias dout, and ddelta may alias delta: the values that a step's
/// gradients depend on are read before these are written.
struct BackwardParams : ScanParams {
  BackwardParams() = default;
  explicit BackwardParams(const ScanParams& inputs) : ScanParams(inputs) {}

  BackwardWanted wanted = BackwardWanted::kGradients;

  ArrayView dout;         // (batch, channel, step), optional: absent means zero
  ArrayView dlast_state;  // (sequence, channel, state), optional

  ArrayView du;
  ArrayView ddelta;
  ArrayView dA;
  ArrayView dB;
  ArrayView dC;
  ArrayView dD;
  ArrayView dz;
  ArrayView dinput_delta;
  ArrayView ddelta_bias;
  ArrayView dinitial_state;

  /// The gradients of kRows.
  static constexpr std::array kRowGradients = {&BackwardParams::du, &BackwardParams::ddelta,
                                               &BackwardParams::dz, &BackwardParams::dinput_delta};
};

/// Returns whether only the effect of all steps on the states is wanted.
constexpr bool wants_summary_alone(const ForwardParams& params) {
  return params.wanted == ForwardWanted::kMapAlone;
}
constexpr bool wants_summary_alone(const BackwardParams& params) {
  return params.wanted == BackwardWanted::kStateAlone;
}

}  // namespace selective_scan
