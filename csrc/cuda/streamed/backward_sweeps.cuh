// What a lane of the streamed backward scan does with its states, block of steps by block of steps.
// scan_backward.cuh explains the whole.
#pragma once

#include "../scan_common.cuh"
#include "backward_shape.h"
#include "channel_sums.cuh"
#include "scan_math.cuh"

namespace selective_scan::cuda::streamed {

template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> shared_load(int at) {
  return load_pack<T, kCount>(reinterpret_cast<const T*>(shared_memory() + at));
}
template <class T, int kCount>
__device__ __forceinline__ void shared_store(int at, const Pack<T, kCount>& values) {
  store_pack(reinterpret_cast<T*>(shared_memory() + at), values);
}

/// Where the poles' exponents in units of exp2 are all that the formulas need, the lanes hold A in
/// these units alone.
template <Method kMethod, class T>
constexpr float pole_scale =
    is_complex_v<T> || Formula<kMethod>::kBbarDependsOnA || !Formula<kMethod>::kAbarIsExponential
        ? 1.0f
        : ScanMath::kLog2e;

/// One lane's poles, and B and C where these are constant.
template <class T, int kStates, Method kMethod>
struct LanePoles {
  using Constants = decltype(Formula<kMethod>::template constants<ScanMath>(T{}));
  T A[kStates];  // times pole_scale
  Constants constants[kStates];
  Pack<T, kStates> B;
  Pack<T, kStates> C;
};

/// What a lane sums up over all steps.
template <class T, int kStates>
struct LaneSums {
  Pack<T, kStates> dA{};
  Pack<T, kStates> dB{};  // of a constant B
  Pack<T, kStates> dC{};
};

/// Where a lane stands in shared memory, as byte offsets: in its channel's rows and in B's rows.
struct LaneRows {
  int row;         // of Δ, see BackwardShape
  int projection;  // B of step 0 of the chunk
  int checkpoint;  // the state before block 0
};

/// Runs h through `blocks` blocks, keeping the state before each.
template <class Shape, Method kMethod, bool kVariable, class T, int kStates>
__device__ __forceinline__ void sweep_forward(LaneRows at, int blocks,
                                              const LanePoles<T, kStates, kMethod>& poles,
                                              Pack<T, kStates>& h) {
  constexpr int kNextBlock = kBlockSteps * static_cast<int>(sizeof(float));
  // Loaded one block ahead: behind a store of the state loads would have to be waited for.
  auto next_delta = shared_load<float, kBlockSteps>(at.row + Shape::kDelta);
#pragma unroll 2
  for (int block = 0; block < blocks; ++block) {
    const auto delta = next_delta;
    next_delta = shared_load<float, kBlockSteps>(at.row + kNextBlock + Shape::kDelta);
    shared_store(at.checkpoint, h);
    at.checkpoint += Shape::kCheckpoint;
    const auto delta_u = shared_load<float, kBlockSteps>(at.row + Shape::kDeltaU);
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      Pack<T, kStates> B = poles.B;
      if constexpr (kVariable) B = shared_load<T, kStates>(at.projection + j * Shape::kRow);
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const auto step = Formula<kMethod>::template step<ScanMath, T>(delta.v[j], delta_u.v[j],
                                                                       poles.constants[s]);
        h.v[s] = step.abar * h.v[s] + step.input * B.v[s];
      }
    }
    at.row += kNextBlock;
    at.projection += kBlockSteps * Shape::kRow;
  }
}

/// A lane's parts of what is summed over the lanes of a channel: Re Σ w·conj(b), of which Δ times
/// is du; the part of dΔ that comes through x; y.
struct BlockParts {
  Pack<float, kBlockSteps> w_b;
  Pack<float, kBlockSteps> x_A;
  Pack<float, kBlockSteps> y;
};

/// What a lane reads of a block of steps. Loaded one block ahead.
template <class T, int kStates>
struct BlockInputs {
  Pack<float, kBlockSteps> delta, delta_u, dy;
  Pack<T, kStates> B[kBlockSteps];
};

template <class Shape, bool kVariable, class T, int kStates>
__device__ __forceinline__ void load_block(const LaneRows& at, const Pack<T, kStates>& constant_B,
                                           BlockInputs<T, kStates>& inputs) {
  inputs.delta = shared_load<float, kBlockSteps>(at.row + Shape::kDelta);
  inputs.delta_u = shared_load<float, kBlockSteps>(at.row + Shape::kDeltaU);
  inputs.dy = shared_load<float, kBlockSteps>(at.row + Shape::kDy);
#pragma unroll
  for (int j = 0; j < kBlockSteps; ++j) {
    inputs.B[j] = constant_B;
    if constexpr (kVariable) inputs.B[j] = shared_load<T, kStates>(at.projection + j * Shape::kRow);
  }
}

/// One block of steps: its states again from the one before it, then backwards through them.
/// `carry` is the gradient of the state behind the block on entry and of the one before it on
/// return. See Hold for the formulas.
template <class Shape, Method kMethod, bool kVariable, bool kExact, class T, int kStates>
__device__ __forceinline__ BlockParts
sweep_block_backward(int projection, const BlockInputs<T, kStates>& inputs,
                     const LanePoles<T, kStates, kMethod>& poles, const Pack<T, kStates>& before,
                     Pack<T, kStates>& carry, LaneSums<T, kStates>& lane_sums,
                     const ChannelSums<Shape, kExact>& channel_sums,
                     typename ChannelSums<Shape, kExact>::Block& block_sums) {
  using F = Formula<kMethod>;
  constexpr bool kHolds = F::kBbarDependsOnA;
  constexpr bool kWeighted = kVariable && ChannelSums<Shape, kExact>::kWeighted;
  const auto& [delta, delta_u, dy, B] = inputs;
  Pack<T, kStates> h[kBlockSteps + 1];
  Hold<T> holds[kBlockSteps][kStates];
  h[0] = before;
#pragma unroll
  for (int j = 0; j < kBlockSteps; ++j) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      holds[j][s] = F::template hold<ScanMath, T>(delta.v[j], poles.constants[s]);
      const T bB = kHolds ? holds[j][s].b * B[j].v[s] : B[j].v[s];
      h[j + 1].v[s] = holds[j][s].a * h[j].v[s] + delta_u.v[j] * bB;
    }
  }

  BlockParts parts;
#pragma unroll
  for (int j = kBlockSteps - 1; j >= 0; --j) {
    Pack<T, kStates> C = poles.C;
    if constexpr (kVariable) {
      C = shared_load<T, kStates>(projection + j * Shape::kRow + Shape::kHalfRow);
    }
    const float scaled_dy = kOutputScale<T> * dy.v[j];
    Pack<T, kStates> dB, dC;  // if weighted, without delta_u and dy
    parts.w_b.v[j] = parts.x_A.v[j] = parts.y.v[j] = 0;
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const Hold<T>& hold = holds[j][s];
      const T g = carry.v[s] + scaled_dy * conj(C.v[s]);
      const T scaled_g = delta_u.v[j] * g;
      const T g_of_dB = kWeighted ? g : scaled_g;
      carry.v[s] = g * conj(hold.a);
      T bB = B[j].v[s];
      T db{};
      dB.v[s] = g_of_dB;
      if constexpr (kHolds) {
        bB = hold.b * B[j].v[s];
        db = scaled_g * conj(B[j].v[s]);
        dB.v[s] = g_of_dB * conj(hold.b);
      }
      const T dx = F::template gradient_of_x<ScanMath>(
          delta.v[j], poles.A[s], hold, g * conj(h[j].v[s]), carry.v[s] * conj(h[j].v[s]), db);
      lane_sums.dA.v[s] += delta.v[j] * dx;
      parts.x_A.v[j] += real_of_product_conj(dx, poles.A[s]);
      parts.w_b.v[j] += real_of_product_conj(g, bB);
      parts.y.v[j] += real_of_product(C.v[s], h[j + 1].v[s]);
      dC.v[s] = kWeighted ? h[j + 1].v[s] : scaled_dy * conj(h[j + 1].v[s]);
    }
    if constexpr (kWeighted) {
      channel_sums.add_weighted(block_sums, 0, j, delta_u.v[j],
                                bit_cast<Pack<float, Shape::kQuad>>(dB));
      channel_sums.add_weighted(block_sums, 1, j, scaled_dy,
                                bit_cast<Pack<float, Shape::kQuad>>(dC));
    } else if constexpr (kVariable) {
      channel_sums.add(block_sums, 0, j, bit_cast<Pack<float, Shape::kQuad>>(dB));
      channel_sums.add(block_sums, 1, j, bit_cast<Pack<float, Shape::kQuad>>(dC));
    } else {
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        lane_sums.dB.v[s] += dB.v[s];
        lane_sums.dC.v[s] += dC.v[s];
      }
    }
  }
  return parts;
}

/// The gradient's way back through a block without anything else, for the summary of a segment.
template <class Shape, Method kMethod, bool kVariable, class T, int kStates>
__device__ __forceinline__ void summarize_block(const LaneRows& at,
                                                const LanePoles<T, kStates, kMethod>& poles,
                                                Pack<T, kStates>& carry, Pack<T, kStates>& factor) {
  const auto delta = shared_load<float, kBlockSteps>(at.row + Shape::kDelta);
  const auto dy = shared_load<float, kBlockSteps>(at.row + Shape::kDy);
#pragma unroll
  for (int j = kBlockSteps - 1; j >= 0; --j) {
    Pack<T, kStates> C = poles.C;
    if constexpr (kVariable) {
      C = shared_load<T, kStates>(at.projection + j * Shape::kRow + Shape::kHalfRow);
    }
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const T a = conj(
          Formula<kMethod>::template step<ScanMath, T>(delta.v[j], 0.0f, poles.constants[s]).abar);
      carry.v[s] = (carry.v[s] + (kOutputScale<T> * dy.v[j]) * conj(C.v[s])) * a;
      factor.v[s] = a * factor.v[s];
    }
  }
}

}  // namespace selective_scan::cuda::streamed
