// Turns the sweeps' sums of a group of steps, stored in one plane for each lane of a channel, into
// gradients.
#pragma once

#include "backward_sweeps.cuh"

namespace selective_scan::cuda::streamed {

/// The places of a lane's parts of a step group's sums, as byte offsets. The order of the two quads
/// of steps alternates between fours of neighboring lanes, which spreads them over the banks.
template <class Shape>
struct GroupPlanes {
  static constexpr int kSwizzle = 4;  // lanes

  static __device__ __forceinline__ int quad_slot(int planes, int lane, int quad) {
    return planes + lane * Shape::kPlaneRow + ((quad ^ lane / kSwizzle) & 1) * 16;
  }

  int own[kSweepBlocks];  // this lane's place for block b of the group

  __device__ __forceinline__ GroupPlanes(int planes, int lane) {
    own[0] = opaque(quad_slot(planes, lane, 0));
    own[1] = opaque(quad_slot(planes, lane, 1));
  }

  template <int kBlock>
  __device__ __forceinline__ void put(const BlockParts& parts, bool has_z) const {
    shared_store(own[kBlock], parts.w_b);
    shared_store(own[kBlock] + Shape::kPlane, parts.x_A);
    if (has_z) shared_store(own[kBlock] + 2 * Shape::kPlane, parts.y);
  }
};

/// Sums a step group's parts over the lanes of each channel; the third part, that of y, only if
/// `has_y`. `from` is the place of the first part of the caller's kHeld steps, and `from_swizzled`
/// is its place in lanes whose quads of steps have the other order.
template <class Shape, int kHeld>
__device__ __forceinline__ void sum_parts(int from, int from_swizzled, bool has_y,
                                          Pack<float, kHeld> (&sums)[3]) {
#pragma unroll
  for (int part = 0; part < Shape::kParts; ++part) {
    const bool swizzled = part * Shape::kChannels / GroupPlanes<Shape>::kSwizzle % 2 != 0;
    const int at = (swizzled ? from_swizzled : from) + part * Shape::kChannels * Shape::kPlaneRow;
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      if (k == 2 && !has_y) break;
      const auto values = shared_load<float, kHeld>(at + k * Shape::kPlane);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        sums[k].v[i] = part == 0 ? values.v[i] : sums[k].v[i] + values.v[i];
      }
    }
  }
}

/// Sums a step group's parts over the lanes of each channel, and stores du, ddelta and y + D·u in
/// place of Δ·u, Δ and dy. A lane takes some steps of one channel.
template <class T, class Shape, Method kMethod>
class GroupFinish {
  static constexpr int kHeld = kSweepSteps / Shape::kParts;
  using Values = Pack<float, kHeld>;

 public:
  __device__ __forceinline__ GroupFinish(int planes, int lane, float D, bool has_z)
      : D_(D), has_z_(has_z) {
    const int channel = lane & (Shape::kChannels - 1);
    const int step = (lane >> Shape::kChannelBits) * kHeld;
    row_ = opaque(step * 4);
    const int quad = step / kBlockSteps & 1;
    const int within = step % kBlockSteps * 4;
    from_ = opaque(GroupPlanes<Shape>::quad_slot(planes, channel, quad) + within);
    from_swizzled_ = opaque(GroupPlanes<Shape>::quad_slot(planes, channel, quad ^ 1) + within);
  }

  /// `row` is the lane's row at the first step of the group.
  __device__ __forceinline__ void run(int row) {
    row += row_;
    Values sums[3] = {};
    sum_parts<Shape>(from_, from_swizzled_, has_z_, sums);
    const auto delta = shared_load<float, kHeld>(row + Shape::kDelta);
    const auto dy = shared_load<float, kHeld>(row + Shape::kDy);
    const auto u = shared_load<float, kHeld>(row + Shape::kU);
    const auto slope = shared_load<float, kHeld>(row + Shape::kSlope);
    using F = Formula<kMethod>;
    constexpr float kFromInput = static_cast<float>(F::kInputScale);
    constexpr float kFromPoles = static_cast<float>(F::kXScale) / pole_scale<kMethod, T>;
    Values du, ddelta, y;
    [[maybe_unused]] Values input_delta;
    if constexpr (Shape::kHasInputDelta) {
      input_delta = shared_load<float, kHeld>(row + Shape::kInputDelta);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const float w_b = kFromInput * sums[0].v[i];
      if constexpr (kGoesByIncrements<kMethod>) {
        du.v[i] = w_b + D_ * dy.v[i];
        ddelta.v[i] = sums[1].v[i] * slope.v[i];
      } else if constexpr (Shape::kHasInputDelta) {
        du.v[i] = input_delta.v[i] * w_b + D_ * dy.v[i];
        ddelta.v[i] = kFromPoles * sums[1].v[i] * slope.v[i];
        input_delta.v[i] = u.v[i] * w_b;  // its gradient from here on
      } else {
        du.v[i] = delta.v[i] * w_b + D_ * dy.v[i];
        ddelta.v[i] = (u.v[i] * w_b + kFromPoles * sums[1].v[i]) * slope.v[i];
      }
      y.v[i] = kOutputScale<T> * sums[2].v[i] + D_ * u.v[i];
      dD += dy.v[i] * u.v[i];
      ddelta_bias += ddelta.v[i];
    }
    shared_store(row + Shape::kDeltaU, du);
    shared_store(row + Shape::kDelta, ddelta);
    if constexpr (Shape::kHasInputDelta) shared_store(row + Shape::kInputDelta, input_delta);
    if (has_z_) shared_store(row + Shape::kDy, y);
  }

  // The lane's sums over all of its steps.
  float dD = 0;
  float ddelta_bias = 0;

 private:
  float D_;
  bool has_z_;
  int row_;
  int from_;
  int from_swizzled_;
};

}  // namespace selective_scan::cuda::streamed
