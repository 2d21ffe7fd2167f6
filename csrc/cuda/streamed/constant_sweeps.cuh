// What a lane of the streamed backward scan does with its states where B and C are constant, and A
// is real.
//
// The sweeps go by h' = h/B and g' = g/C, where g is the gradient of the state h:
//   h'[t] = a[t]·h'[t-1] + i[t]     i[t] = b(x[t])·Δ[t]·u[t]
//   g'[t] = c[t+1] + dy[t]          c[t] = a[t]·g'[t]
// B and C are left in the weights of the sums over states alone, as products:
//   y = Σ B·C·h'     Σ w·b = Σ B·C·g'·b     the part of dΔ that comes through x: Σ A·B·C·dx'
// and of dB and dC one needs no sum of its own. With S = Σ g'·i, a sum over a part of time,
//   dB = C·S     dC = B·Σ dy·h' = B·(S + c·h' where the part begins − c·h' where it ends)
// since dy·h' = (g' − c[t+1])·h' and g'·h' = c·h'[t-1] + g'·i. Where parts of time follow each
// other, what one of them ends with is what the other begins with. So there remains c·h' before the
// first step, and behind the last one c is the gradient of the last state, which mostly is absent.
// Where it is not, g is no multiple of C: then g' begins with this gradient divided by C, and dC is
// summed by itself, on the way forward: the difference of large numbers would be left with few
// digits.
//
// There is no ring of B and C here, nor sums over warps. In their room the way forward through a
// chunk leaves every other block's abar for the way back, where the method has it (kKeepsAbar).
#pragma once

#include "backward_sweeps.cuh"

namespace selective_scan::cuda::streamed {

/// This takes the place of a constant B that is smaller: sweeps divide by it, and h keeps its
/// digits.
constexpr float kLeastB = 1e-18f;
/// C may be no less than this where there is a gradient of the last state. The inverse squares of
/// both together must be numbers.
constexpr float kLeastC = 1e-15f;

/// Constant B and C, as the sweeps take them.
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

/// What a lane keeps of them.
template <int kStates>
struct ConstantWeights {
  Pack<float, kStates> inverse_B;
  Pack<float, kStates> BC;
  Pack<float, kStates> ABC;  // A times pole_scale

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

/// Whether the way back takes abar of a group's first block from the way forward.
template <Method kMethod>
constexpr bool kKeepsAbar = Formula<kMethod>::kAbarIsByRate;

/// Runs h', of increments A·h', through all blocks of `groups` groups but the last one, and leaves
/// records of what comes before each. See ConstantShape. kSumsOutputs: adds Σ dy·h' over all blocks
/// to `sums`.
template <class Shape, Method kMethod, bool kSumsOutputs, int kSize, int kStates>
__device__ __forceinline__ void sweep_constant_forward(
    int row, int record, int groups, const LanePoles<float, kStates, kSize, kMethod>& poles,
    Pack<float, kStates>& h, Pack<float, kStates>& sums) {
  constexpr bool kIncrements = kHasIncrements<kMethod>;
  using Math = ScanMathFor<kSize>;
  decltype(forward_constants<kMethod, Math>(poles, 0)) constants[kStates];
#pragma unroll
  for (int s = 0; s < kStates; ++s) constants[s] = forward_constants<kMethod, Math>(poles, s);
  constexpr int kNextBlock = kBlockSteps * static_cast<int>(sizeof(float));
  // Loaded one block ahead: behind a store of the state loads would have to be waited for.
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
      abar[j] = step_forward<kMethod, kIncrements, Math>(delta.v[j], input.v[j], poles, constants,
                                                         ones<float, kStates>(), h);
      if constexpr (kSumsOutputs) {
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          float state = h.v[s];
          if constexpr (kIncrements) state *= poles.constants[s].inverse;
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

/// What a lane reads of a block of steps. Loaded one block ahead.
template <int kStates>
struct ConstantInputs {
  BlockInputs<float, kStates> rows;
  Pack<float, kStates> before;
  Pack<float, kStates> abar[kBlockSteps];  // of a group's first block
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

/// One block of steps, the one with number kBlock of its group: its states again from the one
/// before it, then backwards through them. `carry` is c of the step behind the block on entry and
/// of its first one on return. See StepGradient for the formulas. S is added to dB.
template <class Shape, Method kMethod, int kBlock, int kSize, int kStates>
__device__ __forceinline__ BlockParts sweep_constant_backward(
    const ConstantInputs<kStates>& inputs, const LanePoles<float, kStates, kSize, kMethod>& poles,
    const ConstantWeights<kStates>& weights, Pack<float, kStates>& carry,
    LaneSums<float, kStates>& lane_sums) {
  constexpr bool kIncrements = kHasIncrements<kMethod>;
  constexpr bool kHasAbar = kKeepsAbar<kMethod> && kBlock == 0;
  const auto& rows = inputs.rows;
  const BlockStates<kMethod, kIncrements, float, kStates> states(rows, poles, inputs.before,
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
