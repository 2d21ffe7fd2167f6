// What the kernels of both passes read and write: a channel of a batch entry, its basis, and what
// the warps of its block hand to each other.
#pragma once

#include "../kit/launch_tools.h"
#include "../kit/states.cuh"
#include "../launch.h"
#include "system.cuh"
#include "workspace.h"

namespace selective_scan::cuda::matrix {

/// Warps of a block, which share a row.
constexpr int kWarps = 3;
constexpr int kThreads = kWarps * kWarpSize;

/// Returns the warp's index in the block. It comes from a lane, so that the compiler knows that
/// lanes branch alike on it.
__device__ inline int warp_index() {
  return shuffle(static_cast<int>(threadIdx.x) / kWarpSize, 0);
}

/// Steps whose B or C go into the basis together: an entry of Q that is read serves all of them.
constexpr int kGroup = 4;
/// Steps of B or C in the basis that are there at a time.
constexpr int kRing = 2 * kGroup;

/// What is in shared memory; over a null base it only measures.
template <class T>
struct Shared {
  T* H = nullptr;
  Factors<T> factors;  // of even positions; those of odd ones lie factors_bytes behind
  T* B = nullptr;      // (position % kRing, state)
  T* C = nullptr;
  T* states = nullptr;  // (position % 2, state)
  int factors_bytes = 0;
  int bytes = 0;

  SELECTIVE_SCAN_HD Shared(char* base, int order) {
    const auto take = [&](auto*& part, int count) {
      using Part = std::remove_reference_t<decltype(*part)>;
      part = reinterpret_cast<Part*>(base + bytes);
      bytes += round_up(count * static_cast<int>(sizeof(Part)), 16);
    };
    take(H, matrix_values(order));
    factors_bytes = -bytes;
    take(factors.U, matrix_values(order));
    take(factors.inverse, order);
    take(factors.eliminations, order);
    factors_bytes += bytes;
    bytes += factors_bytes;
    take(B, kRing * order);
    take(C, kRing * order);
    take(states, 2 * order);
  }

  __device__ Factors<T> factors_at(int64_t position) const {
    const int distance = position % 2 ? factors_bytes : 0;
    const auto moved = [&](auto* part) {
      return reinterpret_cast<decltype(part)>(reinterpret_cast<char*>(part) + distance);
    };
    return {moved(factors.U), moved(factors.inverse), moved(factors.eliminations)};
  }
};

/// Entries of an array, a state each. Of all dtypes, so not inlined at every use.
template <class T, int kOwn>
__device__ __noinline__ Entries<T, kOwn> load_entries(ArrayView view, int64_t offset, int order) {
  Entries<T, kOwn> x{};
  for_own<kOwn>(order,
                [&](int i, int n) { x.v[i] = load_component<T>(view, offset + n * view.state); });
  return x;
}
template <class T, int kOwn>
__device__ __noinline__ void store_entries(ArrayView view, int64_t offset, int order,
                                           Entries<T, kOwn> x) {
  for_own<kOwn>(order,
                [&](int i, int n) { store_component(view, offset + n * view.state, x.v[i]); });
}
/// An element of a sequence or of D or the like.
template <class R>
__device__ __noinline__ R load_real(ArrayView view, int64_t offset) {
  return load_component<R>(view, offset);
}

/// A channel of a batch entry, and the basis of the channel: A = Q·H·Q^H.
template <class T, int kOwn>
struct Row {
  using R = real_t<T>;
  using Vector = Entries<T, kOwn>;
  template <int kCount>
  struct Vectors {
    Vector v[kCount];
  };

  int order;
  int64_t seqlen;
  int64_t batch;
  int64_t channel;
  int64_t group;
  const T* H;
  const T* Q;
  const T* Q_transposed;

  __device__ Row(const ScanParams& params, const Workspace& workspace, int64_t index)
      : order(static_cast<int>(params.dstate)),
        seqlen(params.seqlen),
        batch(index / params.dim),
        channel(index % params.dim),
        group(channel / (params.dim / params.groups)),
        H(static_cast<const T*>(workspace.bases) + 3 * channel * order * order),
        Q(H + order * order),
        Q_transposed(Q + order * order) {}

  /// The block copies H to shared memory.
  __device__ void copy_H(int warp, T* target) const {
    for (int row = warp; row < order; row += kWarps) {
      for_own<kOwn>(order,
                    [&](int, int n) { target[row * pitch_of(order) + n] = H[row * order + n]; });
    }
  }

  /// The number of the channel in its group.
  __device__ int64_t tile(const ScanParams& params) const {
    return channel - group * (params.dim / params.groups);
  }
  __device__ int64_t offset(const ArrayView& view) const {
    return batch * view.batch + channel * view.channel;
  }
  /// Element of this lane of a sequence, in the chunk that starts with step `first`, of the compute
  /// type; 0 beyond the end.
  __device__ R load_steps(const ArrayView& view, int64_t first) const {
    const int64_t step = first + lane_index();
    return step < seqlen ? load_real<R>(view, offset(view) + step * view.step) : R(0);
  }
  __device__ void store_steps(const ArrayView& view, int64_t first, R value) const {
    const int64_t step = first + lane_index();
    if (step < seqlen) store_component(view, offset(view) + step * view.step, value);
  }
  __device__ R load_raw_delta(const ScanParams& params, int64_t first) const {
    return load_steps(params.delta, first) +
           load_real<R>(params.delta_bias, channel * params.delta_bias.channel);
  }
  __device__ R load_delta(const ScanParams& params, int64_t first) const {
    const R raw = load_raw_delta(params, first);
    return finite_step(params.delta_softplus ? softplus<DeviceMath>(raw) : raw);
  }
  /// The steps of the input.
  __device__ R load_input_delta(const ScanParams& params, int64_t first, R delta) const {
    return params.input_delta.present() ? load_steps(params.input_delta, first) : delta;
  }

  /// Q·x
  template <int kCount>
  __device__ Vectors<kCount> by_Q(const Vectors<kCount>& x) const {
    return sum_of_rows(Q_transposed, x, [](T entry) { return entry; });
  }
  __device__ Vector by_Q(const Vector& x) const { return by_Q(Vectors<1>{{x}}).v[0]; }
  /// Q^H·x
  template <int kCount>
  __device__ Vectors<kCount> by_adjoint_Q(const Vectors<kCount>& x) const {
    return sum_of_rows(Q, x, [](T entry) { return conj(entry); });
  }
  /// Q^T·x
  template <int kCount>
  __device__ Vectors<kCount> by_transposed_Q(const Vectors<kCount>& x) const {
    return sum_of_rows(Q, x, [](T entry) { return entry; });
  }

  /// B or C, out of the basis, at the steps step_of(0), step_of(1)...; 0 where there is no such
  /// step. The same for all steps if it is not variable.
  template <int kCount, class StepOf>
  __device__ Vectors<kCount> projections(const ArrayView& view, bool is_variable,
                                         const StepOf& step_of) const {
    Vectors<kCount> x{};
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      const int64_t step = step_of(s);
      if (!is_variable) {
        x.v[s] = load_entries<T, kOwn>(view, channel * view.channel, order);
      } else if (step >= 0 && step < seqlen) {
        x.v[s] = load_entries<T, kOwn>(
            view, batch * view.batch + group * view.group + step * view.step, order);
      }
    }
    return x;
  }
  template <int kCount, class StepOf>
  __device__ Vectors<kCount> B_in_basis(const ScanParams& params, const StepOf& step_of) const {
    return by_adjoint_Q(projections<kCount>(params.B, params.variable_B, step_of));
  }
  template <int kCount, class StepOf>
  __device__ Vectors<kCount> C_in_basis(const ScanParams& params, const StepOf& step_of) const {
    return by_transposed_Q(projections<kCount>(params.C, params.variable_C, step_of));
  }
  /// Fills a ring's slots of a group's positions.
  __device__ void store_group(T* ring, int64_t position, const Vectors<kGroup>& x) const {
#pragma unroll
    for (int s = 0; s < kGroup; ++s) store_values(at_position(ring, position + s, kRing), x.v[s]);
  }
  __device__ T* at_position(T* ring, int64_t position, unsigned slots) const {
    return ring + static_cast<unsigned>(position) % slots * order;
  }

  /// A state in the basis; as it is where there are no steps.
  __device__ Vector load_state(const ArrayView& view) const {
    const Vector x = load_entries<T, kOwn>(view, offset(view), order);
    return seqlen > 0 ? by_adjoint_Q(Vectors<1>{{x}}).v[0] : x;
  }
  __device__ void store_state(const ArrayView& view, const Vector& x) const {
    store_entries(view, offset(view), order, seqlen > 0 ? by_Q(x) : x);
  }
  /// Saved states, of the boundary behind `chunk`.
  __device__ T* saved(const ScanParams& params, int64_t chunk) const {
    const int64_t index = (batch * num_saved_states(seqlen) + chunk) * params.dim + channel;
    return static_cast<T*>(params.states) + index * order;
  }
  __device__ Vector load_values(const T* values) const {
    Vector x{};
    for_own<kOwn>(order, [&](int i, int n) { x.v[i] = values[n]; });
    return x;
  }
  __device__ void store_values(T* values, const Vector& x) const {
    for_own<kOwn>(order, [&](int i, int n) { values[n] = x.v[i]; });
  }
  /// Stores zeros behind the states, up to `padded` of them.
  __device__ void store_padded(T* values, int padded, const Vector& x) const {
    for_own<kOwn>(padded, [&](int i, int n) { values[n] = n < order ? x.v[i] : T{}; });
  }

 private:
  template <int kCount, class Form>
  __device__ Vectors<kCount> sum_of_rows(const T* matrix, const Vectors<kCount>& x,
                                         const Form& form) const {
    Vectors<kCount> result{};
    for_all<kOwn>(0, order, [&](int part, int lane, int k) {
      T values[kCount];
#pragma unroll
      for (int s = 0; s < kCount; ++s) values[s] = shuffle(x.v[s].v[part], lane);
      for_own<kOwn>(order, [&](int i, int n) {
        const T entry = form(matrix[k * order + n]);
#pragma unroll
        for (int s = 0; s < kCount; ++s) {
          result.v[s].v[i] = multiply_add(entry, values[s], result.v[s].v[i]);
        }
      });
    });
    return result;
  }
};

/// A block for each row.
template <class T>
LaunchShape shape_of_rows(const ScanParams& params) {
  LaunchShape shape;
  shape.blocks = params.batch * params.dim;
  shape.threads = kThreads;
  shape.shared_bytes = Shared<T>(nullptr, static_cast<int>(params.dstate)).bytes;
  return shape;
}

/// Calls visit with a null pointer of the compute type and the entries of a lane as a constant.
template <class Visit>
cudaError_t with_types(const ScanParams& params, const Visit& visit) {
  if (params.dstate > kMaxMatrixDstate) return cudaErrorInvalidValue;
  return with_state_type(params, [&](auto* type) {
    return params.dstate <= kWarpSize ? visit(type, std::integral_constant<int, 1>())
                                      : visit(type, std::integral_constant<int, 2>());
  });
}

}  // namespace selective_scan::cuda::matrix
