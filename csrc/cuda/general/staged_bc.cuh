// B and C on their way from global memory to shared memory.
//
// Variable projections are staged by the whole block, a piece of `piece_steps` steps at a time:
// first copied as they are, asynchronously where addresses allow, then converted to [step][B states
// | C states] rows of the compute type. A thread converts what it has copied itself, so no barrier
// lies between the two. A constant projection is put once into a slot of each thread's own and read
// with stride 0.
#pragma once

#include "rows.cuh"
#include "shared_layout.h"

namespace selective_scan::cuda::general {

/// B or C as a lane reads it: its states of step t of the piece lie `first + t·stride` bytes into
/// shared memory.
struct ProjectionRows {
  int first;
  int stride;

  template <class T, int kStates>
  __device__ __forceinline__ Pack<T, kStates> load(int step) const {
    return load_pack<T, kStates>(
        reinterpret_cast<const T*>(shared_memory() + first + step * stride));
  }
  __device__ __forceinline__ void advance(int steps) { first += steps * stride; }
};

/// One variable projection of a block's work item.
struct ProjectionWindow {
  const char* data;  // step 0
  int64_t state;
  int64_t step;
  int64_t imag;
  int size;
  ProjectionPlan plan;
  DType dtype;
  int dstate;

  __device__ ProjectionWindow(const ArrayView& view, ProjectionPlan plan, const WorkItem& item,
                              int64_t dstate)
      : data(static_cast<const char*>(view.data)),
        state(view.state),
        step(view.step),
        imag(view.imag),
        size(static_cast<int>(element_size(view.dtype))),
        plan(plan),
        dtype(view.dtype),
        dstate(static_cast<int>(dstate)) {
    data += (item.batch * view.batch + item.group * view.group) * size;
  }

  __device__ const char* at(int n, int64_t t) const { return data + (n * state + t * step) * size; }
};

/// A quad's first state and step.
struct Quad {
  int state;
  int step;

  __device__ Quad(const ProjectionPlan& plan, int piece_steps, int padded_states, int q) {
    if (plan.mode == ProjectionMode::kStates) {
      const int per_step = ceil_div(padded_states, kQuad);
      step = q / per_step;
      state = q % per_step * kQuad;
    } else {
      const int per_state_bits = __ffs(piece_steps / kQuad) - 1;  // a power of two
      state = q >> per_state_bits;
      step = (q & ((1 << per_state_bits) - 1)) * kQuad;
    }
  }
  static __device__ int count(const ProjectionPlan& plan, int piece_steps, int padded_states) {
    if (plan.mode == ProjectionMode::kStates) {
      return piece_steps * ceil_div(padded_states, kQuad);
    }
    return padded_states * (piece_steps / kQuad);
  }
};

/// Copies a quad of any layout, complete or not; all of its elements are on their way at a time.
/// Out of line, and given copies of its arguments.
template <int kComponents>
__device__ __noinline__ void copy_quad_of_any_kind(ProjectionWindow window, Quad quad,
                                                   int64_t first_step, int steps, char* target) {
  const bool along_states = window.plan.mode == ProjectionMode::kStates;
  uint16_t halves[kQuad * kComponents] = {};
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    const int n = quad.state + (along_states ? j : 0);
    const int t = quad.step + (along_states ? 0 : window.plan.reversed ? kQuad - 1 - j : j);
    const bool exists = n < window.dstate && t < steps;
    const char* source = window.at(n, first_step + t);
#pragma unroll
    for (int i = 0; i < kComponents; ++i) {
      if (window.size > 2) {
        char* element = target + (j * kComponents + i) * window.size;
        copy_word_async(element, source, window.size, exists);
      } else if (exists) {
        halves[j * kComponents + i] = *reinterpret_cast<const uint16_t*>(source);
      }
      source += window.imag * window.size;
    }
  }
  if (window.size > 2) return;
#pragma unroll
  for (int i = 0; i < kQuad * kComponents; ++i) reinterpret_cast<uint16_t*>(target)[i] = halves[i];
}

/// Starts copying the `steps` steps from first_step on to `raw`, quad after quad.
template <class T>
__device__ void copy_projection(const ProjectionWindow& window, int64_t first_step, int steps,
                                int piece_steps, int padded_states, char* raw) {
  constexpr int kComponents = is_complex_v<T> ? 2 : 1;
  const int size = window.size;
  const int quad_bytes = kQuad * kComponents * size;
  const int count = Quad::count(window.plan, piece_steps, padded_states);
  const bool along_states = window.plan.mode == ProjectionMode::kStates;
#pragma unroll 1
  for (int q = threadIdx.x; q < count; q += blockDim.x) {
    const Quad quad(window.plan, piece_steps, padded_states, q);
    char* target = raw + q * quad_bytes;
    if (window.plan.mode == ProjectionMode::kSteps && quad.state < window.dstate &&
        quad.step + kQuad <= steps) {
      const int first = window.plan.reversed ? kQuad - 1 : 0;
      copy_async(target, window.at(quad.state, first_step + quad.step + first), quad_bytes);
    } else if (along_states && quad.state + kQuad <= window.dstate && quad.step < steps) {
      copy_async(target, window.at(quad.state, first_step + quad.step), quad_bytes);
    } else {
      copy_quad_of_any_kind<kComponents>(window, quad, first_step, steps, target);
    }
  }
}

/// Fills rows[step][state], rows `row_stride` apart, from what copy_projection() has copied.
template <class T>
__device__ void convert_projection(const ProjectionWindow& window, int piece_steps,
                                   int padded_states, const char* raw, int row_stride, T* rows) {
  using R = real_t<T>;
  constexpr int kComponents = is_complex_v<T> ? 2 : 1;
  const int count = Quad::count(window.plan, piece_steps, padded_states);
#pragma unroll 1
  for (int q = threadIdx.x; q < count; q += blockDim.x) {
    const Quad quad(window.plan, piece_steps, padded_states, q);
    const auto values = load_elements<R, kQuad * kComponents>(
        raw + q * kQuad * kComponents * window.size, window.dtype);
    T* target = rows + quad.step * row_stride + quad.state;
    int stride = row_stride;
    if (window.plan.mode == ProjectionMode::kStates) {
      stride = 1;
    } else if (window.plan.reversed) {
      target += (kQuad - 1) * row_stride;
      stride = -row_stride;
    }
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      if (window.plan.mode == ProjectionMode::kStates && quad.state + j >= padded_states) break;
      if constexpr (is_complex_v<T>) {
        target[j * stride] = {values.v[2 * j], values.v[2 * j + 1]};
      } else {
        target[j * stride] = values.v[j];
      }
    }
  }
}

}  // namespace selective_scan::cuda::general
