// The sweeps of a lane of the streamed backward scan over its states, one block of steps after the
// other. backward.cuh describes the whole.
#pragma once

#include "../kit/states.cuh"
#include "../kit/step_math.cuh"
#include "backward_shape.h"
#include "channel_sums.cuh"

namespace selective_scan::cuda::streamed {

template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> shared_load(int at) {
  return load_pack<T, kCount>(reinterpret_cast<const T*>(shared_memory() + at));
}
template <class T, int kCount>
__device__ __forceinline__ void shared_store(int at, const Pack<T, kCount>& values) {
  store_pack(reinterpret_cast<T*>(shared_memory() + at), values);
}

/// The factor by which lanes hold A: log2(e), the unit of exp2, if the formulas need A only as an
/// exponent, otherwise the factor that keep() takes.
template <Method kMethod, class T>
constexpr float pole_scale =
    is_complex_v<T> || Formula<kMethod>::kBbarDependsOnA || !Formula<kMethod>::kAbarIsExponential
        ? static_cast<float>(Formula<kMethod>::kPoleScale)
        : static_cast<float>(kLog2e);

/// Returns the same number, hidden from the compiler, which therefore keeps no value derived from
/// it.
__device__ __forceinline__ float made_anew(float x) {
  asm volatile("" : "+f"(x));
  return x;
}
__device__ __forceinline__ Complex<float> made_anew(Complex<float> x) {
  return {made_anew(x.re), made_anew(x.im)};
}

/// True if the forward sweep computes its constants anew for every chunk: the backward sweep, which
/// only needs the rate, has no registers for the coefficients of a truncated hold.
template <Method kMethod>
constexpr bool kHasCoefficients =
    Formula<kMethod>::kAbarIsByRate && Formula<kMethod>::kBbarDependsOnA;

/// True if the forward sweep, which starts anew with every chunk, uses shorter complex exponentials
/// than the backward sweep.
template <Method kMethod, class T, int kSize>
constexpr bool kHasShortSweep = is_complex_v<T> && kSize == 2 && Formula<kMethod>::kAbarIsByRate;

/// One lane's poles.
template <class T, int kStates, int kSize, Method kMethod>
struct LanePoles {
  using Math = ScanMathFor<kSize>;
  using Constants = decltype(Formula<kMethod>::template constants<Math>(T{}));
  T A[kStates];  // times pole_scale; for ExactIncrements not 0
  Constants constants[kStates];
};

/// A lane's sums over all steps.
template <class T, int kStates>
struct LaneSums {
  Pack<T, kStates> dA{};  // divided by Formula::kXScale; for ExactIncrements times conj(A)
  Pack<T, kStates> dB{};  // of a constant B
  Pack<T, kStates> dC{};
};

/// A lane's position in shared memory, as byte offsets: in its channel's rows and in B's rows.
struct LaneRows {
  int row;         // of Δ: see BackwardShape
  int projection;  // B of step 0 of the chunk
  int checkpoint;  // the state before block 0
};

/// The row of the input that multiplies a step's B: Δ·u, or u if scans go by increments.
template <class Shape, Method kMethod>
constexpr int kInputRow = kGoesByIncrements<kMethod> ? Shape::kU : Shape::kDeltaU;

/// Returns a pole's constants for the forward sweep through a chunk.
template <Method kMethod, class Math, int kSize, class T, int kStates>
__device__ __forceinline__ auto forward_constants(
    const LanePoles<T, kStates, kSize, kMethod>& poles, int s) {
  constexpr bool kShort = std::is_same_v<Math, ScanMathFor<kSize, true>>;
  if constexpr (kShort || kHasCoefficients<kMethod>) {
    constexpr float kInverse = 1 / pole_scale<kMethod, T>;
    auto constants = Formula<kMethod>::template constants<Math>(made_anew(kInverse * poles.A[s]),
                                                                poles.constants[s]);
    if constexpr (!kShort) constants.rate = poles.constants[s].rate;
    return constants;
  } else {
    return poles.constants[s];
  }
}

/// Takes h (A·h if scans go by increments) one step forward. Returns abar, or zeros if they do.
template <Method kMethod, class Math, int kSize, class T, int kStates, class Constants>
__device__ __forceinline__ Pack<T, kStates> step_forward(
    float delta, float input, const LanePoles<T, kStates, kSize, kMethod>& poles,
    const Constants (&constants)[kStates], const Pack<T, kStates>& B, Pack<T, kStates>& h) {
  Pack<T, kStates> abar{};
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    if constexpr (kGoesByIncrements<kMethod>) {
      ExactIncrements::StepCache<T> kept;
      h.v[s] = ExactIncrements::advance<ScanMathFor<kSize>, T>(delta, input, poles.constants[s],
                                                               h.v[s], B.v[s], kept);
    } else {
      const auto step = Formula<kMethod>::template step<Math, T>(delta, input, constants[s]);
      abar.v[s] = abar_of(step);
      h.v[s] = advance(step, h.v[s], B.v[s]);
    }
  }
  return abar;
}

/// Takes h (A·h if scans go by increments) through `blocks` blocks, keeping the state before each.
template <class Shape, Method kMethod, int kSize, class T, int kStates>
__device__ __forceinline__ void sweep_forward(LaneRows at, int blocks,
                                              const LanePoles<T, kStates, kSize, kMethod>& poles,
                                              Pack<T, kStates>& h) {
  using Math = ScanMathFor<kSize, kHasShortSweep<kMethod, T, kSize>>;
  decltype(forward_constants<kMethod, Math>(poles, 0)) constants[kStates];
#pragma unroll
  for (int s = 0; s < kStates; ++s) constants[s] = forward_constants<kMethod, Math>(poles, s);
  constexpr int kNextBlock = kBlockSteps * static_cast<int>(sizeof(float));
  // Loaded one block ahead: a load after the store of the state would have to be waited for.
  auto next_delta = shared_load<float, kBlockSteps>(at.row + Shape::kDelta);
#pragma unroll 2
  for (int block = 0; block < blocks; ++block) {
    const auto delta = next_delta;
    next_delta = shared_load<float, kBlockSteps>(at.row + kNextBlock + Shape::kDelta);
    shared_store(at.checkpoint, h);
    at.checkpoint += Shape::kCheckpoint;
    const auto input = shared_load<float, kBlockSteps>(at.row + kInputRow<Shape, kMethod>);
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      const auto B = shared_load<T, kStates>(at.projection + j * Shape::kRow);
      step_forward<kMethod, Math>(delta.v[j], input.v[j], poles, constants, B, h);
    }
    at.row += kNextBlock;
    at.projection += kBlockSteps * Shape::kRow;
  }
}

/// A lane's parts of the sums over the lanes of a channel: Re Σ w·conj(b), which times Δ is du; the
/// part of dΔ that comes through x; y.
struct BlockParts {
  Pack<float, kBlockSteps> w_b;
  Pack<float, kBlockSteps> x_A;
  Pack<float, kBlockSteps> y;
};

/// A lane's inputs for a block of steps, loaded one block ahead.
template <class T, int kStates>
struct BlockInputs {
  Pack<float, kBlockSteps> delta, input, dy;
  Pack<T, kStates> B[kBlockSteps];
};

template <class Shape, Method kMethod, bool kVariable, class T, int kStates>
__device__ __forceinline__ void load_block(const LaneRows& at, BlockInputs<T, kStates>& inputs) {
  inputs.delta = shared_load<float, kBlockSteps>(at.row + Shape::kDelta);
  inputs.input = shared_load<float, kBlockSteps>(at.row + kInputRow<Shape, kMethod>);
  inputs.dy = shared_load<float, kBlockSteps>(at.row + Shape::kDy);
#pragma unroll
  for (int j = 0; j < kBlockSteps; ++j) {
    inputs.B[j] = ones<T, kStates>();
    if constexpr (kVariable) inputs.B[j] = shared_load<T, kStates>(at.projection + j * Shape::kRow);
  }
}

/// The states of a block of steps, computed from the one before it, and the intermediate values of
/// its steps.
template <Method kMethod, class T, int kStates>
struct BlockStates {
  static constexpr bool kIncrements = kGoesByIncrements<kMethod>;
  using F = Formula<kMethod>;
  using StepCache = std::conditional_t<kIncrements, ExactIncrements::StepCache<T>,
                                       typename F::template StepCache<T>>;

  Pack<T, kStates> h[kBlockSteps + 1];
  StepCache kept[kBlockSteps][kStates];
  Pack<float, kBlockSteps> scaled_input;

  /// `abar` has the values of all steps, or is null.
  template <int kSize>
  __device__ __forceinline__ BlockStates(const BlockInputs<T, kStates>& inputs,
                                         const LanePoles<T, kStates, kSize, kMethod>& poles,
                                         const Pack<T, kStates>& before,
                                         const Pack<T, kStates>* abar = nullptr)
      : scaled_input(inputs.input) {
    const auto& [delta, input, dy, B] = inputs;
    h[0] = before;
    if constexpr (!kIncrements) {
      for (float& value : scaled_input.v) value *= static_cast<float>(F::kInputScale);
    }
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        if constexpr (kIncrements) {
          h[j + 1].v[s] = ExactIncrements::advance<ScanMathFor<kSize>, T>(
              delta.v[j], input.v[j], poles.constants[s], h[j].v[s], B[j].v[s], kept[j][s]);
        } else {
          kept[j][s] = kept_of(delta.v[j], poles, s, abar == nullptr ? nullptr : &abar[j].v[s]);
          h[j + 1].v[s] = F::advance(kept[j][s], scaled_input.v[j], h[j].v[s], B[j].v[s]);
        }
      }
    }
  }
  /// Takes one state's gradient back through step j. On return, `after` is the state after the
  /// step.
  template <int kSize>
  __device__ __forceinline__ StepGradient<T> step_back(const BlockInputs<T, kStates>& inputs, int j,
                                                       int s, T g, T& after) const {
    after = h[j + 1].v[s];
    if constexpr (kIncrements) {
      after = kept[j][s].inverse * after;
      return ExactIncrements::step_back(kept[j][s], h[j].v[s], inputs.input.v[j] * inputs.B[j].v[s],
                                        g);
    } else {
      return F::template step_back<ScanMathFor<kSize>, T>(inputs.input.v[j], kept[j][s], h[j].v[s],
                                                          after, inputs.B[j].v[s], g);
    }
  }

  /// Returns the contribution of step j to conj(A)·dA of one state, if scans go by increments.
  template <int kSize>
  __device__ __forceinline__ T gradient_of_A(const BlockInputs<T, kStates>& inputs,
                                             const LanePoles<T, kStates, kSize, kMethod>& poles,
                                             int j, int s, T g, const StepGradient<T>& back) const {
    return ExactIncrements::gradient_of_A(inputs.delta.v[j], poles.A[s], kept[j][s], h[j].v[s],
                                          inputs.input.v[j] * inputs.B[j].v[s], g, back.state);
  }

 private:
  template <int kSize>
  static __device__ __forceinline__ StepCache
  kept_of(float delta, const LanePoles<T, kStates, kSize, kMethod>& poles, int s, const T* abar) {
    if constexpr (F::kAbarIsByRate) {
      if (abar != nullptr) return F::keep_with(*abar, delta, poles.A[s], poles.constants[s]);
    }
    return F::template keep<ScanMathFor<kSize>, T>(delta, poles.A[s], poles.constants[s]);
  }
};

/// Works on one block of steps with variable B and C: computes its states again from the one before
/// it, then sweeps backward through them. `carry` is the gradient of the state after the block on
/// entry, and of the one before it on return. StepGradient gives the formulas.
template <class Shape, Method kMethod, int kSize, class T, int kStates, class Sums>
__device__ __forceinline__ BlockParts sweep_block_backward(
    int projection, const BlockInputs<T, kStates>& inputs,
    const LanePoles<T, kStates, kSize, kMethod>& poles, const Pack<T, kStates>& before,
    Pack<T, kStates>& carry, LaneSums<T, kStates>& lane_sums, const Sums& channel_sums,
    typename Sums::Block& block_sums) {
  constexpr bool kWeighted = Sums::kWeighted;
  const auto& [delta, input, dy, B] = inputs;
  const BlockStates<kMethod, T, kStates> states(inputs, poles, before);

  BlockParts parts;
#pragma unroll
  for (int j = kBlockSteps - 1; j >= 0; --j) {
    const auto C = shared_load<T, kStates>(projection + j * Shape::kRow + Shape::kHalfRow);
    const float scaled_dy = kOutputScale<T> * dy.v[j];
    Pack<T, kStates> dB, dC;  // if kWeighted, before weighting
    parts.w_b.v[j] = parts.x_A.v[j] = parts.y.v[j] = 0;
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const T g = carry.v[s] + scaled_dy * conj(C.v[s]);
      T after;
      const StepGradient<T> back = states.template step_back<kSize>(inputs, j, s, g, after);
      carry.v[s] = back.state;
      dB.v[s] = kWeighted ? back.input : states.scaled_input.v[j] * back.input;
      dC.v[s] = kWeighted ? after : scaled_dy * conj(after);
      if constexpr (kGoesByIncrements<kMethod>) {
        const T w_b = back.input * conj(B[j].v[s]);
        lane_sums.dA.v[s] += states.gradient_of_A(inputs, poles, j, s, g, back);
        parts.x_A.v[j] += real(back.x);
        parts.w_b.v[j] += real(w_b);
      } else {
        lane_sums.dA.v[s] += delta.v[j] * back.x;
        parts.x_A.v[j] = add_real_of_product_conj(back.x, poles.A[s], parts.x_A.v[j]);
        parts.w_b.v[j] = add_real_of_product_conj(back.input, B[j].v[s], parts.w_b.v[j]);
      }
      parts.y.v[j] = add_real_of_product(C.v[s], after, parts.y.v[j]);
    }
    if constexpr (kWeighted) {
      channel_sums.add_weighted(
          block_sums, j, {states.scaled_input.v[j], scaled_dy},
          {bit_cast<Pack<float, Shape::kQuad>>(dB), bit_cast<Pack<float, Shape::kQuad>>(dC)});
    } else {
      channel_sums.add(block_sums, 0, j, bit_cast<Pack<float, Shape::kQuad>>(dB));
      channel_sums.add(block_sums, 1, j, bit_cast<Pack<float, Shape::kQuad>>(dC));
    }
  }
  return parts;
}

/// Takes only the gradient back through a block, for the summary of a segment. Products of
/// exponentials are computed from the sum of the exponents: see take_span().
template <class Shape, Method kMethod, int kSize, class T, int kStates>
__device__ __forceinline__ void summarize_block(const LaneRows& at,
                                                const LanePoles<T, kStates, kSize, kMethod>& poles,
                                                Pack<T, kStates>& carry, Pack<T, kStates>& factor,
                                                float& span) {
  const auto delta = shared_load<float, kBlockSteps>(at.row + Shape::kDelta);
  const auto dy = shared_load<float, kBlockSteps>(at.row + Shape::kDy);
#pragma unroll
  for (int j = kBlockSteps - 1; j >= 0; --j) {
    const auto C = shared_load<T, kStates>(at.projection + j * Shape::kRow + Shape::kHalfRow);
    span += delta.v[j];
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const T a = conj(abar_of(Formula<kMethod>::template step<ScanMathFor<kSize>, T>(
          delta.v[j], 0.0f, poles.constants[s])));
      carry.v[s] = (carry.v[s] + (kOutputScale<T> * dy.v[j]) * conj(C.v[s])) * a;
      if constexpr (!Formula<kMethod>::kAbarIsExponential) factor.v[s] = a * factor.v[s];
    }
  }
}
/// Multiplies the factor by that of steps whose sum is `span`.
template <Method kMethod, int kSize, class T, int kStates>
__device__ __forceinline__ void take_span(const LanePoles<T, kStates, kSize, kMethod>& poles,
                                          float span, Pack<T, kStates>& factor) {
  using F = Formula<kMethod>;
  if constexpr (F::kAbarIsExponential) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const T abar =
          abar_of(F::template step<ScanMathFor<kSize>, T>(span, 0.0f, poles.constants[s]));
      factor.v[s] = conj(abar) * factor.v[s];
    }
  }
}

}  // namespace selective_scan::cuda::streamed
