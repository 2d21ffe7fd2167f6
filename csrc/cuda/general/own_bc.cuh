// B and C where every channel has its own.
//
// A warp copies those of its channels for itself, a piece of `piece_steps` steps at a time, and
// leaves them as they are in global memory: a row along time for each state, whose owner converts
// four steps at a time as it scans them. Two neighbouring lanes copy 32 bytes of a row, a whole
// sector, in one access of 16 bytes each. In the backward scan dB and dC take the place of the B
// and C that they come from, in their type, and are copied back by the same accesses.
#pragma once

#include "rows.cuh"
#include "shared_layout.h"

namespace selective_scan::cuda::general {

/// Four steps of a lane's states.
template <class T, int kStates>
struct OwnBlock {
  Pack<T, kBlockSteps> rows[kStates];

  __device__ __forceinline__ Pack<T, kStates> operator[](int j) const {
    Pack<T, kStates> states;
#pragma unroll
    for (int s = 0; s < kStates; ++s) states.v[s] = rows[s].v[j];
    return states;
  }
};

/// Starts copying the `bytes` of a vector that exist, and zeroes the rest. The second-level cache
/// is asked for the whole line, which neighbouring pieces share.
__device__ __forceinline__ void copy_vector(char* target, const char* source, int bytes) {
  if (bytes == 0) {
    *reinterpret_cast<uint4*>(target) = uint4{};
    return;
  }
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(source),
               "r"(bytes)
               : "memory");
}

/// Where a lane's rows of B or C lie in shared memory: [state of the lane][lane][step]. Rows are
/// shorter than the memory's banks; vectors of some lanes change places so that a warp meets all.
struct OwnRows {
  int first;    // byte offset of the lane's first row
  int row;      // bytes of a row
  int swizzle;  // of the lane
  int step;     // byte offset of a step in its row
  DType dtype;

  __device__ OwnRows(int base, int row, int lane, DType dtype)
      : first(base + lane * row), row(row), swizzle(swizzle_of(row, lane)), step(0), dtype(dtype) {}

  static __device__ int swizzle_of(int row, int lane) {
    constexpr int kBankBytes = 128;
    return (lane * row / kBankBytes * kOwnVector) & (row - 1);
  }
  __device__ char* at(int state) const {
    return shared_memory() + first + state * kWarpSize * row + (step ^ swizzle);
  }

  template <class T, int kStates>
  __device__ __forceinline__ OwnBlock<T, kStates> block() const {
    OwnBlock<T, kStates> block;
    with_element<T>(dtype, [&](auto type) {
      using Element = decltype(type);
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const auto raw = load_pack<Element, kBlockSteps>(reinterpret_cast<const Element*>(at(s)));
#pragma unroll
        for (int j = 0; j < kBlockSteps; ++j) block.rows[s].v[j] = to_real(raw.v[j]);
      }
    });
    return block;
  }
  template <class T, int kStates>
  __device__ __forceinline__ void replace(const OwnBlock<T, kStates>& block) const {
#pragma unroll
    for (int s = 0; s < kStates; ++s) store_elements(at(s), dtype, block.rows[s]);
  }
  __device__ __forceinline__ void advance(int steps) {
    step += steps * static_cast<int>(element_size(dtype));
  }
};

/// B and C of a warp's channels.
template <class T, int kStates>
class OwnProjections {
 public:
  template <class Plans>
  __device__ OwnProjections(const ScanParams& params, const Plans&, const Geometry& geometry,
                            const SharedLayout& layout, const ThreadRole& role,
                            const WorkItem& item, int64_t channel, bool exists)
      : params_(params),
        size_(static_cast<int>(element_size(params.B.dtype))),
        row_(geometry.piece_steps * size_),
        base_(layout.warps + role.warp * layout.warp_bytes + layout.own),
        lane_(role.lane),
        first_state_((role.in_warp.part & ~1) * kStates),
        states_(exists ? static_cast<int>(params.dstate) - first_state_ : 0),
        batch_(item.batch),
        channel_(channel) {}

  /// Starts copying a piece into buffer 0 or 1. What does not exist is zero.
  __device__ void copy(int64_t first_step, int64_t end, int buffer = 0) const {
    const auto copy_of = [&](const ArrayView& view, int kind) {
      for_each_vector(
          view, kind, first_step, end, buffer,
          [&](char* shared, char* global, int bytes) { copy_vector(shared, global, bytes); });
    };
    copy_of(params_.B, 0);
    copy_of(params_.C, 1);
  }

  /// Writes the piece's dB and dC, which have taken the place of B and C in buffer 0. They end with
  /// a whole vector.
  __device__ void write_gradients(const ArrayView& dB, const ArrayView& dC, int64_t first_step,
                                  int64_t end) const {
    const auto write = [&](const ArrayView& view, int kind) {
      for_each_vector(view, kind, first_step, end, 0, [&](char* shared, char* global, int bytes) {
        if (bytes > 0) store_pack(global, load_pack<char, kOwnVector>(shared));
      });
    };
    write(dB, 0);
    write(dC, 1);
  }

  /// Nothing: a piece is read as it is.
  __device__ void convert(int) const {}

  __device__ OwnRows B(int buffer) const { return rows(0, buffer); }
  __device__ OwnRows C(int buffer) const { return rows(1, buffer); }

 private:
  __device__ int array(int kind, int buffer) const {
    return base_ + (2 * buffer + kind) * kStates * kWarpSize * row_;
  }
  __device__ OwnRows rows(int kind, int buffer) const {
    return OwnRows(array(kind, buffer), row_, lane_, params_.B.dtype);
  }

  /// function(shared, global, bytes that exist) for the vectors of a piece that this lane copies:
  /// every other one of its own rows and of those of the lane beside it, which has the same
  /// channel.
  template <class Function>
  __device__ __forceinline__ void for_each_vector(const ArrayView& view, int kind,
                                                  int64_t first_step, int64_t end, int buffer,
                                                  const Function& function) const {
    char* const first_row =
        static_cast<char*>(view.data) + (batch_ * view.batch + channel_ * view.group +
                                         first_state_ * view.state + first_step * view.step) *
                                            size_;
    const int64_t state_bytes = view.state * size_;
    const int swizzle = OwnRows::swizzle_of(row_, lane_);
    for (int at = (lane_ & 1) * kOwnVector; at < row_; at += 2 * kOwnVector) {
      const int64_t left = (end - first_step) * size_ - at;
      const int bytes = left <= 0 ? 0 : left < kOwnVector ? static_cast<int>(left) : kOwnVector;
#pragma unroll
      for (int state = 0; state < 2 * kStates; ++state) {
        const int owner = (lane_ & ~1) | (state / kStates);
        char* const shared = shared_memory() + array(kind, buffer) +
                             (state % kStates * kWarpSize + owner) * row_ + (at ^ swizzle);
        function(shared, first_row + state * state_bytes + at, state < states_ ? bytes : 0);
      }
    }
  }

  const ScanParams& params_;
  int size_;  // of an element
  int row_;   // bytes of a row of a piece
  int base_;
  int lane_;
  int first_state_;  // of this lane and the one beside it
  int states_;       // from that one on
  int64_t batch_;
  int64_t channel_;
};

}  // namespace selective_scan::cuda::general
