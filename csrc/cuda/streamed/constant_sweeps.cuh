// The sweeps of a lane of the streamed backward scan over its states, for constant B and C and real
// A.
//
// The sweeps run over h' = h/B and g' = g/C, where g is the gradient of the state h:
//   h'[t] = a[t]·h'[t-1] + i[t]     i[t] = b(x[t])·Δ[t]·u[t]
//   g'[t] = c[t+1] + dy[t]          c[t] = a[t]·g'[t]
// B and C appear only in the weights of the sums over states, as products:
//   y = Σ B·C·h'     Σ w·b = Σ B·C·g'·b     the part of dΔ that comes through x: Σ A·B·C·dx'
// and one sum serves both dB and dC. With S = Σ g'·i, a sum over a range of steps,
//   dB = C·S     dC = B·Σ dy·h' = B·(S + c·h' where the range begins − c·h' where it ends)
// since dy·h' = (g' − c[t+1])·h' and g'·h' = c·h'[t-1] + g'·i. For consecutive ranges, the term at
// the end of one cancels that at the beginning of the next. There remain c·h' before the first step
// and, after the last one, c, which is the gradient of the last state and mostly absent. If it is
// present, g is not a multiple of C. Then g' begins with this gradient divided by C, and dC is
// summed separately in the forward sweep: the difference of large numbers would keep few digits.
//
// There are neither a ring of B and C nor sums over warps. In the memory that these would take, the
// forward sweep through a chunk keeps every other block's abar for the backward sweep, if the
// method can use it (kKeepsAbar).
#pragma once

#include "backward_sweeps.cuh"

namespace selective_scan::cuda::streamed {

/// Replaces a constant B of smaller magnitude, since the sweeps divide by B. With this value h
/// keeps its digits.
constexpr float kLeastB = 1e-18f;
/// Replaces a C of smaller magnitude if the last state has a gradient. The inverse squares of both
/// limits must be finite.
constexpr float kLeastC = 1e-15f;

/// Constant B and C in the form that the sweeps take.
template <int kStates>
struct ConstantProjections {
  Pack<float, kStates> B, C;

  __device__ __forceinline__ ConstantProjections(const Pack<float, kStates>& stored_B,
                                                 const Pack<float, kStates>& stored_C,
                                                 bool divides_by_C)
      : B(stored_B), C(stored_C) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if (fabsf(B.v[s]) < kLeastB) B.v[s] = kLeastB;
      if (divides_by_C && fabsf(C.v[s]) < kLeastC) C.v[s] = kLeastC;
    }
  }
};

/// The values that a lane keeps of B and C.
template <int kStates>
struct ConstantWeights {
  Pack<float, kStates> inverse_B;
  Pack<float, kStates> BC;
  Pack<float, kStates> ABC;  // with A times pole_scale

  template <int kSize, Method kMethod>
  __device__ __forceinline__
  ConstantWeights(const ConstantProjections<kStates>& projections,
                  const LanePoles<float, kStates, kSize, kMethod>& poles) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      inverse_B.v[s] = reciprocal(projections.B.v[s]);
      BC.v[s] = projections.B.v[s] * projections.C.v[s];
      ABC.v[s] = poles.A[s] * BC.v[s];
    }
  }
};

/// True if the backward sweep takes abar of a step group's first block from the forward sweep.
template <Method kMethod>
constexpr bool kKeepsAbar = Formula<kMethod>::kAbarIsByRate;

/// Takes h' (A·h' if scans go by increments) through all blocks of `groups` step groups but the
/// last block, and records the state before each: see ConstantShape. With kSumsOutputs, adds Σ
/// dy·h' over all blocks to `sums`.
template <class Shape, Method kMethod, bool kSumsOutputs, int kSize, int kStates>
__device__ __forceinline__ void sweep_constant_forward(
    int row, int record, int groups, const LanePoles<float, kStates, kSize, kMethod>& poles,
    Pack<float, kStates>& h, Pack<float, kStates>& sums) {
  using Math = ScanMathFor<kSize>;
  decltype(forward_constants<kMethod, Math>(poles, 0)) constants[kStates];
#pragma unroll
  for (int s = 0; s < kStates; ++s) constants[s] = forward_constants<kMethod, Math>(poles, s);
  constexpr int kNextBlock = kBlockSteps * static_cast<int>(sizeof(float));
  // Loaded one block ahead: a load after the store of the state would have to be waited for.
  auto next_delta = shared_load<float, kBlockSteps>(row + Shape::kDelta);
  const auto sweep_block = [&]<int kBlock>() {
    const auto delta = next_delta;
    next_delta = shared_load<float, kBlockSteps>(row + kNextBlock + Shape::kDelta);
    shared_store(record + Shape::kRecordStates + kBlock * Shape::kStepStates, h);
    const auto input = shared_load<float, kBlockSteps>(row + kInputRow<Shape, kMethod>);
    [[maybe_unused]] Pack<float, kBlockSteps> dy;
    if constexpr (kSumsOutputs) dy = shared_load<float, kBlockSteps>(row + Shape::kDy);
    Pack<float, kStates> abar[kBlockSteps];
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      abar[j] = step_forward<kMethod, Math>(delta.v[j], input.v[j], poles, constants,
                                            ones<float, kStates>(), h);
      if constexpr (kSumsOutputs) {
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          float state = h.v[s];
          if constexpr (kGoesByIncrements<kMethod>) state *= poles.constants[s].inverse;
          sums.v[s] += dy.v[j] * state;
        }
      }
    }
    if constexpr (kKeepsAbar<kMethod> && kBlock == 0) {
#pragma unroll
      for (int j = 0; j < kBlockSteps; ++j) shared_store(record + j * Shape::kStepStates, abar[j]);
    }
    row += kNextBlock;
  };
#pragma unroll 1
  for (int group = 1; group < groups; ++group) {
    sweep_block.template operator()<0>();
    sweep_block.template operator()<1>();
    record += Shape::kRecord;
  }
  sweep_block.template operator()<0>();
  if constexpr (kSumsOutputs) {
    const auto before = h;
    sweep_block.template operator()<1>();
    h = before;
  }
}

/// A lane's inputs for a block of steps, loaded one block ahead.
template <int kStates>
struct ConstantInputs {
  BlockInputs<float, kStates> rows;
  Pack<float, kStates> before;
  Pack<float, kStates> abar[kBlockSteps];  // only of a group's first block
};

template <class Shape, Method kMethod, int kStates>
__device__ __forceinline__ void load_constant_rows(int row, ConstantInputs<kStates>& inputs) {
  load_block<Shape, kMethod, false>(LaneRows{row, 0, 0}, inputs.rows);
}
template <class Shape, Method kMethod, int kBlock, int kStates>
__device__ __forceinline__ void load_record(int record, ConstantInputs<kStates>& inputs) {
  inputs.before =
      shared_load<float, kStates>(record + Shape::kRecordStates + kBlock * Shape::kStepStates);
  if constexpr (kKeepsAbar<kMethod> && kBlock == 0) {
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      inputs.abar[j] = shared_load<float, kStates>(record + j * Shape::kStepStates);
    }
  }
}

/// Works on block kBlock of a step group: computes its states again from the one before it, then
/// sweeps backward through them. `carry` is c of the step after the block on entry, and c of the
/// block's first step on return. StepGradient gives the formulas. S is added to lane_sums.dB.
template <class Shape, Method kMethod, int kBlock, int kSize, int kStates>
__device__ __forceinline__ BlockParts sweep_constant_backward(
    const ConstantInputs<kStates>& inputs, const LanePoles<float, kStates, kSize, kMethod>& poles,
    const ConstantWeights<kStates>& weights, Pack<float, kStates>& carry,
    LaneSums<float, kStates>& lane_sums) {
  constexpr bool kIncrements = kGoesByIncrements<kMethod>;
  constexpr bool kHasAbar = kKeepsAbar<kMethod> && kBlock == 0;
  const auto& rows = inputs.rows;
  const BlockStates<kMethod, float, kStates> states(rows, poles, inputs.before,
                                                    kHasAbar ? inputs.abar : nullptr);
  const auto& weights_of_x = kIncrements ? weights.BC : weights.ABC;
  BlockParts parts;
#pragma unroll
  for (int j = kBlockSteps - 1; j >= 0; --j) {
    parts.w_b.v[j] = parts.x_A.v[j] = parts.y.v[j] = 0;
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const float g = rows.dy.v[j] + carry.v[s];
      float after;
      const StepGradient<float> back = states.template step_back<kSize>(rows, j, s, g, after);
      carry.v[s] = back.state;
      lane_sums.dB.v[s] += states.scaled_input.v[j] * back.input;
      if constexpr (kIncrements) {
        lane_sums.dA.v[s] += states.gradient_of_A(rows, poles, j, s, g, back);
      } else {
        lane_sums.dA.v[s] += rows.delta.v[j] * back.x;
      }
      parts.w_b.v[j] += weights.BC.v[s] * back.input;
      parts.x_A.v[j] += weights_of_x.v[s] * back.x;
      parts.y.v[j] += weights.BC.v[s] * after;
    }
  }
  return parts;
}

}  // namespace selective_scan::cuda::streamed
