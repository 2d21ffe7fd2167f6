// The general diagonal scan on the CPU.
//
// A chain is one row, or one segment of a row where rows are few. A recurrence is bound by the
// latency of its multiply-add, so a task runs kChains chains side by side: it brings a tile of
// steps of each into a buffer in L1 (conversion and strides are dealt with there, in loops that the
// compiler vectorises), walks the chains in lockstep, and writes the tile back.
//
// Segmented rows take three passes: the affine map h -> product·h + offset of every segment, the
// state with which every segment begins, and the scan itself.

#include "diagonal_scan.h"

#include <algorithm>

#include "../core/diagonal_step.h"
#include "../core/element.h"

namespace selective_scan::cpu {
namespace {

constexpr int kChains = 8;
/// Rows are split until there are this many chains, if segments keep this many steps.
constexpr int64_t kWantedChains = 256;
constexpr int64_t kMinSegment = 1024;

template <class T>
constexpr int64_t kTileSteps = 1024 / sizeof(T);

template <class T>
T* at(const RowArray& array, int64_t offset) {
  return static_cast<T*>(array.data) + offset;
}

template <class T>
void load_steps(const RowArray& array, int64_t offset, int64_t count, T* out) {
  using Real = real_t<T>;
  visit_dtype(array.dtype, [&]<class Element>(Element*) {
    const Element* source = at<const Element>(array, offset);
    if constexpr (is_complex_v<T>) {
      for (int64_t i = 0; i < count; ++i) {
        const Element* element = source + i * array.step;
        out[i].re = from_element<Real>(element[0]);
        out[i].im = array.imag == 0 ? Real(0) : from_element<Real>(element[array.imag]);
      }
    } else if (array.step == 1) {
      for (int64_t i = 0; i < count; ++i) out[i] = from_element<Real>(source[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = from_element<Real>(source[i * array.step]);
    }
  });
}

template <class T>
void store_steps(const RowArray& array, int64_t offset, int64_t count, const T* values) {
  visit_dtype(array.dtype, [&]<class Element>(Element*) {
    Element* target = at<Element>(array, offset);
    if constexpr (is_complex_v<T>) {
      for (int64_t i = 0; i < count; ++i) {
        Element* element = target + i * array.step;
        element[0] = to_element<Element>(values[i].re);
        if (array.imag != 0) element[array.imag] = to_element<Element>(values[i].im);
      }
    } else if (array.step == 1) {
      for (int64_t i = 0; i < count; ++i) target[i] = to_element<Element>(values[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) target[i * array.step] = to_element<Element>(values[i]);
    }
  });
}

/// What every chain of a task has at hand.
template <class T>
struct Tile {
  alignas(64) T a[kChains][kTileSteps<T>];
  alignas(64) T x[kChains][kTileSteps<T>];  // b or dh, then h or g
  alignas(64) T h[kChains][kTileSteps<T>];  // backward: the states before the steps
  T state[kChains];
  T product[kChains];
};

template <class Step, int N, class T>
void walk(Tile<T>& tile, int64_t steps) {
  T state[N];
  for (int c = 0; c < N; ++c) state[c] = tile.state[c];
  for (int64_t t = 0; t < steps; ++t) {
#pragma GCC unroll 8
    for (int c = 0; c < N; ++c) {
      tile.x[c][t] = Step::advance(tile.a[c][t], tile.x[c][t], state[c]);
    }
  }
  for (int c = 0; c < N; ++c) tile.state[c] = state[c];
}

/// As walk, but for the affine map of the segment: nothing is written but its two coefficients.
template <class Step, int N, class T>
void accumulate(Tile<T>& tile, int64_t steps) {
  T state[N], product[N];
  for (int c = 0; c < N; ++c) state[c] = tile.state[c];
  for (int c = 0; c < N; ++c) product[c] = tile.product[c];
  for (int64_t t = 0; t < steps; ++t) {
#pragma GCC unroll 8
    for (int c = 0; c < N; ++c) {
      Step::advance(tile.a[c][t], tile.x[c][t], state[c]);
      product[c] = Step::factor(tile.a[c][t]) * product[c];
    }
  }
  for (int c = 0; c < N; ++c) tile.state[c] = state[c];
  for (int c = 0; c < N; ++c) tile.product[c] = product[c];
}

/// Calls visit with the number of chains to walk as a constant.
template <class Visit>
void with_chains(int chains, const Visit& visit) {
  if (chains == 1) {
    visit(std::integral_constant<int, 1>());
  } else if (chains <= kChains / 2) {
    visit(std::integral_constant<int, kChains / 2>());
  } else {
    visit(std::integral_constant<int, kChains>());
  }
}

template <class T>
struct Widened {
  using type = double;
};
template <class R>
struct Widened<Complex<R>> {
  using type = Complex<double>;
};

inline double widen(float value) {
  return value;
}
inline double widen(double value) {
  return value;
}
template <class R>
Complex<double> widen(Complex<R> value) {
  return {value.re, value.im};
}
template <class T>
T narrow(double value) {
  return static_cast<T>(value);
}
template <class T>
T narrow(Complex<double> value) {
  return {static_cast<real_t<T>>(value.re), static_cast<real_t<T>>(value.im)};
}

template <class T>
void store_one(const RowArray& array, int64_t offset, T value) {
  store_steps(array, offset, 1, &value);
}

/// One pass over the chains [chain_begin, chain_end) of a task.
template <class Step, class Params>
class Task {
  using T = typename Step::Value;

 public:
  Task(const Params& params, AffineMap<T>* maps, int64_t segments)
      : params_(params),
        segments_(segments),
        segment_steps_((params.seqlen + segments - 1) / segments),
        maps_(maps) {}

  int64_t count() const { return (params_.rows * segments_ + kChains - 1) / kChains; }

  /// The affine maps of the segments.
  void map_segments(int64_t task) const {
    Tile<T> tile;
    const int chains = begin(tile, task);
    for (int c = 0; c < chains; ++c) tile.state[c] = T{};
    for (int64_t first = 0; first < segment_steps_; first += kTileSteps<T>) {
      const int64_t steps = load(tile, task, chains, first);
      with_chains(chains, [&](auto n) { accumulate<Step, n>(tile, steps); });
    }
    for (int c = 0; c < chains; ++c) {
      maps_[task * kChains + c] = {tile.product[c], tile.state[c]};
    }
  }

  /// Replaces each map's offset by the state with which its segment begins.
  void start_segments() const {
    for (int64_t row = 0; row < params_.rows; ++row) {
      T state = initial_state(row);
      for (int64_t segment = 0; segment < segments_; ++segment) {
        AffineMap<T>& map = maps_[row * segments_ + segment];
        const T after = map(state);
        map.offset = state;
        state = after;
      }
    }
  }

  void scan(int64_t task) const {
    Tile<T> tile;
    typename Widened<T>::type sums[kChains] = {};
    const int chains = begin(tile, task);
    for (int64_t first = 0; first < segment_steps_; first += kTileSteps<T>) {
      const int64_t steps = load(tile, task, chains, first);
      with_chains(chains, [&](auto n) { walk<Step, n>(tile, steps); });
      for (int c = 0; c < chains; ++c) {
        const Chain chain(*this, task * kChains + c);
        const int64_t valid = chain.valid_steps(first);
        if (valid <= 0) continue;
        if constexpr (Step::kBackward) {
          store(params_.db, chain, first, valid, tile.x[c]);
          store_da(tile, c, chain, first, valid, sums[c]);
        } else {
          store(params_.h, chain, first, valid, tile.x[c]);
        }
      }
    }
    if constexpr (Step::kBackward) finish(tile, task, chains, sums);
  }

 private:
  /// Which steps of which row a chain walks.
  struct Chain {
    int64_t row;
    int64_t begin;
    int64_t end;

    Chain(const Task& task, int64_t index)
        : row(index / task.segments_),
          begin(index % task.segments_ * task.segment_steps_),
          end(std::min(begin + task.segment_steps_, task.params_.seqlen)) {}

    int64_t valid_steps(int64_t first) const {
      return std::min(end - begin - first, kTileSteps<T>);
    }
  };

  T initial_state(int64_t row) const {
    // The backward pass starts from nothing: the gradient after the last step is part of dh.
    if (Step::kBackward || !params_.initial_state.present()) return T{};
    return load_initial_state(row);
  }
  T load_initial_state(int64_t row) const {
    T state{};
    const RowArray& array = params_.initial_state;
    if (array.present()) load_steps(array, params_.row_offset(array, row), 1, &state);
    return state;
  }

  int begin(Tile<T>& tile, int64_t task) const {
    const int64_t first = task * kChains;
    const int chains =
        static_cast<int>(std::min<int64_t>(kChains, params_.rows * segments_ - first));
    for (int c = 0; c < kChains; ++c) {
      tile.product[c] = one<T>();
      tile.state[c] = T{};
      if (c >= chains) {
        std::fill_n(tile.a[c], kTileSteps<T>, one<T>());
        std::fill_n(tile.x[c], kTileSteps<T>, T{});
      } else if (segments_ == 1) {
        tile.state[c] = initial_state(first + c);
      } else {
        tile.state[c] = maps_[first + c].offset;
      }
    }
    return chains;
  }

  /// Loads the tile at step `first` of every chain; returns its length. The end of a shorter chain
  /// is filled with steps that leave the state alone.
  int64_t load(Tile<T>& tile, int64_t task, int chains, int64_t first) const {
    const int64_t steps = std::min(segment_steps_ - first, kTileSteps<T>);
    for (int c = 0; c < chains; ++c) {
      const Chain chain(*this, task * kChains + c);
      const int64_t valid = std::max<int64_t>(chain.valid_steps(first), 0);
      std::fill(tile.a[c] + valid, tile.a[c] + steps, one<T>());
      std::fill(tile.x[c] + valid, tile.x[c] + steps, T{});
      load_from(params_.a, chain, first, valid, tile.a[c]);
      if constexpr (Step::kBackward) {
        load_from(params_.dh, chain, first, valid, tile.x[c]);
      } else {
        load_from(params_.b, chain, first, valid, tile.x[c]);
      }
    }
    return steps;
  }

  int64_t offset(const RowArray& array, const Chain& chain, int64_t first) const {
    return params_.row_offset(array, chain.row) + (chain.begin + first) * array.step;
  }
  void load_from(const RowArray& array, const Chain& chain, int64_t first, int64_t count,
                 T* out) const {
    if (count > 0) load_steps(array, offset(array, chain, first), count, out);
  }
  void store(const RowArray& array, const Chain& chain, int64_t first, int64_t count,
             const T* values) const {
    store_steps(array, offset(array, chain, first), count, values);
  }

  /// da of a tile, from g in tile.x.
  void store_da(Tile<T>& tile, int c, const Chain& chain, int64_t first, int64_t valid,
                typename Widened<T>::type& sum) const {
    T* h = tile.h[c];
    const bool has_first_step = chain.begin + first + valid == params_.seqlen;
    load_from(params_.h_previous, chain, first, valid - has_first_step, h);
    if (has_first_step) h[valid - 1] = load_initial_state(chain.row);
    for (int64_t t = 0; t < valid; ++t) h[t] = tile.x[c][t] * conj(h[t]);
    if (params_.sum_da) {
      for (int64_t t = 0; t < valid; ++t) sum = sum + widen(h[t]);
    } else {
      store(params_.da, chain, first, valid, h);
    }
  }

  void finish(const Tile<T>& tile, int64_t task, int chains,
              const typename Widened<T>::type* sums) const {
    for (int c = 0; c < chains; ++c) {
      const int64_t index = task * kChains + c;
      const Chain chain(*this, index);
      const int64_t segment = index % segments_;
      if (params_.sum_da) {
        const RowArray& da = params_.da;
        store_one(da, params_.row_offset(da, chain.row) + segment * da.step, narrow<T>(sums[c]));
      }
      const RowArray& dinitial = params_.dinitial_state;
      if (dinitial.present() && segment == segments_ - 1) {
        store_one(dinitial, params_.row_offset(dinitial, chain.row), tile.state[c]);
      }
    }
  }

  const Params& params_;
  int64_t segments_;
  int64_t segment_steps_;
  AffineMap<T>* maps_;  // (row, segment)
};

template <class Body>
void parallel_for(const ThreadPool& pool, int64_t count, const Body& body) {
  const auto run = [](int64_t begin, int64_t end, void* context) {
    for (int64_t i = begin; i < end; ++i) (*static_cast<const Body*>(context))(i);
  };
  pool.parallel_for(count, run, const_cast<Body*>(&body));
}

template <template <class> class Step, class T, class Params>
void run(const Params& params, void* workspace, const ThreadPool& pool) {
  const int64_t segments = num_segments(params);
  const Task<Step<T>, Params> task(params, static_cast<AffineMap<T>*>(workspace), segments);
  if (segments > 1) {
    parallel_for(pool, task.count(), [&](int64_t i) { task.map_segments(i); });
    task.start_segments();
  }
  parallel_for(pool, task.count(), [&](int64_t i) { task.scan(i); });
}

template <template <class> class Step, class Params>
void dispatch(const Params& params, void* workspace, const ThreadPool& pool) {
  if (params.is_complex && params.is_double) {
    run<Step, Complex<double>>(params, workspace, pool);
  } else if (params.is_complex) {
    run<Step, Complex<float>>(params, workspace, pool);
  } else if (params.is_double) {
    run<Step, double>(params, workspace, pool);
  } else {
    run<Step, float>(params, workspace, pool);
  }
}

}  // namespace

int64_t num_segments(const DiagonalScanParams& params) {
  if (params.rows == 0) return 1;
  const int64_t wanted = (kWantedChains + params.rows - 1) / params.rows;
  const int64_t segments = std::clamp<int64_t>(params.seqlen / kMinSegment, 1, wanted);
  // Whole segments: none may be empty, which the last ones could be.
  const int64_t steps = (params.seqlen + segments - 1) / segments;
  return steps == 0 ? 1 : (params.seqlen + steps - 1) / steps;
}

int64_t workspace_bytes(const DiagonalScanParams& params) {
  const int64_t segments = num_segments(params);
  const int64_t value = (params.is_double ? 8 : 4) * (params.is_complex ? 2 : 1);
  return segments == 1 ? 0 : params.rows * segments * 2 * value;
}

void diagonal_scan_forward(const DiagonalForwardParams& params, void* workspace,
                           const ThreadPool& pool) {
  dispatch<ForwardStep>(params, workspace, pool);
}

void diagonal_scan_backward(const DiagonalBackwardParams& params, void* workspace,
                            const ThreadPool& pool) {
  dispatch<BackwardStep>(params, workspace, pool);
}

}  // namespace selective_scan::cpu
