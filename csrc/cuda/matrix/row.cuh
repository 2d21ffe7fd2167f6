// The data of both passes' kernels: a channel of a batch entry, its basis, and the shared memory by
// which the warps of its block exchange values.
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

/// Steps whose B or C are transformed to the basis together, so that one read of Q serves all of
/// them.
constexpr int kGroup = 4;
/// Steps of B or C in the basis that are kept at a time.
constexpr int kRing = 2 * kGroup;

/// The layout of shared memory. With a null base it only measures the size.
template <class T>
struct Shared {
  T* H = nullptr;
  Factors<T> factors;  // of even positions; those of odd ones are factors_bytes further
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

/// Loads the entries of an array, one per state. It handles all dtypes, so it is not inlined.
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
/// Loads an element of a sequence, of D or of a similar array.
template <class R>
__device__ __noinline__ R load_real(ArrayView view, int64_t offset) {
  return load_component<R>(view, offset);
}

/// A channel of a batch entry, and the channel's basis: A = Q·H·Q^H.
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

  /// Copies H to shared memory, with all warps of the block.
  __device__ void copy_H(int warp, T* target) const {
    for (int row = warp; row < order; row += kWarps) {
      for_own<kOwn>(order,
                    [&](int, int n) { target[row * pitch_of(order) + n] = H[row * order + n]; });
    }
  }

  /// Returns the channel's index in its group.
  __device__ int64_t tile(const ScanParams& params) const {
    return channel - group * (params.dim / params.groups);
  }
  __device__ int64_t offset(const ArrayView& view) const {
    return batch * view.batch + channel * view.channel;
  }
  /// Returns this lane's element of a sequence, in the compute type, for the chunk that starts at
  /// step `first`; 0 past the end.
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
  /// Returns the steps of the input, which are `delta` unless the call has input_delta.
  __device__ R load_input_delta(const ScanParams& params, int64_t first, R delta) const {
    return params.input_delta.present() ? load_steps(params.input_delta, first) : delta;
  }

  /// Returns Q·x.
  template <int kCount>
  __device__ Vectors<kCount> by_Q(const Vectors<kCount>& x) const {
    return sum_of_rows(Q_transposed, x, [](T entry) { return entry; });
  }
  __device__ Vector by_Q(const Vector& x) const { return by_Q(Vectors<1>{{x}}).v[0]; }
  /// Returns Q^H·x.
  template <int kCount>
  __device__ Vectors<kCount> by_adjoint_Q(const Vectors<kCount>& x) const {
    return sum_of_rows(Q, x, [](T entry) { return conj(entry); });
  }
  /// Returns Q^T·x.
  template <int kCount>
  __device__ Vectors<kCount> by_transposed_Q(const Vectors<kCount>& x) const {
    return sum_of_rows(Q, x, [](T entry) { return entry; });
  }

  /// Loads B or C, not in the basis, at the steps step_of(0), step_of(1), ...; 0 if a step does not
  /// exist. If it is not variable, all steps have the same values.
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
  /// Stores a group's values to its positions' slots in a ring.
  __device__ void store_group(T* ring, int64_t position, const Vectors<kGroup>& x) const {
#pragma unroll
    for (int s = 0; s < kGroup; ++s) store_values(at_position(ring, position + s, kRing), x.v[s]);
  }
  __device__ T* at_position(T* ring, int64_t position, unsigned slots) const {
    return ring + static_cast<unsigned>(position) % slots * order;
  }

  /// Loads a state and transforms it to the basis. Without steps it stays as it is.
  __device__ Vector load_state(const ArrayView& view) const {
    const Vector x = load_entries<T, kOwn>(view, offset(view), order);
    return seqlen > 0 ? by_adjoint_Q(Vectors<1>{{x}}).v[0] : x;
  }
  __device__ void store_state(const ArrayView& view, const Vector& x) const {
    store_entries(view, offset(view), order, seqlen > 0 ? by_Q(x) : x);
  }
  /// Returns the place of the states saved at the end of `chunk`.
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
  /// Stores the states, and zeros after them up to `padded` values.
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

/// Returns a launch with one block per row.
template <class T>
LaunchShape shape_of_rows(const ScanParams& params) {
  return {params.batch * params.dim, kThreads,
          Shared<T>(nullptr, static_cast<int>(params.dstate)).bytes};
}

/// Calls visit with a null pointer of the compute type and the number of entries per lane, a
/// constant.
template <class Visit>
cudaError_t with_types(const ScanParams& params, const Visit& visit) {
  if (params.dstate > kMaxMatrixDstate) return cudaErrorInvalidValue;
  return with_state_type(params, [&](auto* type) {
    return params.dstate <= kWarpSize ? visit(type, std::integral_constant<int, 1>())
                                      : visit(type, std::integral_constant<int, 2>());
  });
}

}  // namespace selective_scan::cuda::matrix
