// The general diagonal scan on the GPU. It moves three values for every multiply-add (five in the
// backward pass), so memory bounds it, and all that is done here keeps loads wide and in flight.
//
// A team of lanes owns a chain: a row, or one segment of time of a row where rows are few. Lane l
// of a team takes kItems consecutive steps of each sub-tile of kTeam·kItems steps, composes their
// affine maps h -> product·h + offset, learns the composition of all lanes before it by a scan with
// shuffles, and then walks its steps. kGroup sub-tiles are loaded before the first is used. There
// is no shared memory and no synchronisation beyond the warp.
//   kTeam = 32  a warp for a row that is contiguous in time
//   kTeam = 1   a thread for a row: where rows are short, or time is not the contiguous dimension,
//               neighbouring threads then read neighbouring rows
//
// Loads and stores are vectors of up to 16 bytes. A sub-tile therefore begins up to kItems - 1
// steps before its row, at an aligned address; steps outside the chain are identities.
//
// Segmented rows take three kernels: the map of every segment, the state with which every segment
// begins (a warp for each row), and the scan itself. Nothing depends on the order in which blocks
// run.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cub/cub.cuh>

#include "../core/diagonal_step.h"
#include "diagonal_access.cuh"
#include "diagonal_scan.h"

namespace selective_scan::cuda::diagonal {

constexpr int kWarp = 32;
constexpr int kThreads = 128;
constexpr int kMaxItems = 8;
/// Segments are whole numbers of this many steps.
constexpr int64_t kSegmentUnit = 1024;
/// Rows are split until every multiprocessor has this many warps.
constexpr int64_t kWantedWarps = 16;
/// Contiguous rows up to this length have a thread each.
constexpr int64_t kShortRow = 128;

/// How many steps a lane takes of a sub-tile, and how many sub-tiles are in flight.
template <class T, class Storage, bool kBackward>
struct TileShape {
  static constexpr int kItems = sizeof(T) == 4   ? (kIsHalf<Storage> ? 8 : 4)
                                : sizeof(T) == 8 ? 4
                                                 : 2;
  static constexpr int kGroup = sizeof(T) == 4 && !kBackward ? 4 : 2;
};

template <int kTeam, class T>
__device__ T from_lane(const T& value, int lane) {
  if constexpr (kTeam == 1) {
    return value;
  } else {
    return cub::ShuffleIndex<kTeam>(value, lane, 0xffffffffu);
  }
}

/// The composition of the lanes before this one, and of all lanes.
template <int kTeam, class T>
__device__ void scan_lanes(int lane, const AffineMap<T>& own, AffineMap<T>& before,
                           AffineMap<T>& all) {
  if constexpr (kTeam == 1) {
    before = AffineMap<T>::identity();
    all = own;
  } else {
    using Scan = cub::WarpScan<AffineMap<T>, kTeam>;
    typename Scan::TempStorage unused;
    AffineMap<T> inclusive;
    Scan(unused).InclusiveScan(own, inclusive, Compose());
    before = from_lane<kTeam>(inclusive, lane - 1);
    if (lane == 0) before = AffineMap<T>::identity();
    all = from_lane<kTeam>(inclusive, kTeam - 1);
  }
}

/// How rows are split; decided on the host.
struct Segmentation {
  int64_t segments;
  int64_t steps;  // of a segment; a segment may begin up to kMaxItems - 1 steps early
  bool thread_per_row;
};

/// What one team works on.
template <class Step, class Params, class Storage, int kTeam>
class Chain {
  using T = typename Step::Value;
  using Shape = TileShape<T, Storage, Step::kBackward>;
  static constexpr int kItems = Shape::kItems;
  static constexpr int kGroup = Shape::kGroup;
  using Items = T[kItems];

 public:
  __device__ Chain(const Params& params, const Segmentation& split, int64_t index, int lane)
      : params_(params),
        row_(index / split.segments),
        segment_(index % split.segments),
        lane_(lane),
        a_(params, params.a, row_),
        x_(params, input(params), row_),
        out_(params, output(params), row_),
        da_(params, gradient(params), row_),
        previous_(params, states(params), row_) {
    const int shift = common_shift();
    vectorised_ = shift >= 0;
    origin_ = segment_ * split.steps - (vectorised_ ? shift : 0);
    begin_ = origin_ < 0 ? 0 : origin_;
    const int64_t end = origin_ + split.steps;
    end_ = segment_ == split.segments - 1 || end > params.seqlen ? params.seqlen : end;
  }

  __device__ T load_initial_state() const {
    if (!params_.initial_state.present()) return T{};
    return load_state(params_.initial_state);
  }

  /// What the state is before the first position of the row.
  __device__ T start() const { return Step::kBackward ? T{} : load_initial_state(); }

  /// The map of the whole chain; nothing is written.
  __device__ AffineMap<T> map() const {
    AffineMap<T> total = AffineMap<T>::identity();
    for (int64_t first = origin_; first < end_; first += kGroup * kTeam * kItems) {
      Items a[kGroup], x[kGroup];
      load_group(first, a, x);
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        AffineMap<T> before, all;
        scan_lanes<kTeam>(lane_, map_of(a[g], x[g]), before, all);
        total = Compose()(total, all);
      }
    }
    return total;
  }

  __device__ void scan(T state) const {
    T da_sum{};
    for (int64_t first = origin_; first < end_; first += kGroup * kTeam * kItems) {
      Items a[kGroup], x[kGroup], h[kGroup];
      load_group(first, a, x);
      if constexpr (Step::kBackward) load_previous_group(first, h);
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        const int64_t position = lane_position(first, g);
        AffineMap<T> before, all;
        scan_lanes<kTeam>(lane_, map_of(a[g], x[g]), before, all);
        T own = before(state);
        state = all(state);
#pragma unroll
        for (int i = 0; i < kItems; ++i) x[g][i] = Step::advance(a[g][i], x[g][i], own);
        store(out_, position, x[g]);
        if constexpr (Step::kBackward) {
#pragma unroll
          for (int i = 0; i < kItems; ++i) h[g][i] = x[g][i] * conj(h[g][i]);
          if (!params_.sum_da) {
            store(da_, position, h[g]);
          } else {
#pragma unroll
            for (int i = 0; i < kItems; ++i) {
              if (position + i >= begin_ && position + i < end_) da_sum += h[g][i];
            }
          }
        }
      }
    }
    if constexpr (Step::kBackward) finish(state, da_sum);
  }

 private:
  static __device__ const RowArray& input(const DiagonalForwardParams& p) { return p.b; }
  static __device__ const RowArray& input(const DiagonalBackwardParams& p) { return p.dh; }
  static __device__ const RowArray& output(const DiagonalForwardParams& p) { return p.h; }
  static __device__ const RowArray& output(const DiagonalBackwardParams& p) { return p.db; }
  // The forward pass has neither; its cursors are never used.
  static __device__ const RowArray& gradient(const DiagonalForwardParams& p) { return p.h; }
  static __device__ const RowArray& gradient(const DiagonalBackwardParams& p) { return p.da; }
  static __device__ const RowArray& states(const DiagonalForwardParams& p) { return p.h; }
  static __device__ const RowArray& states(const DiagonalBackwardParams& p) { return p.h_previous; }

  /// The misalignment that all arrays share, -1 if vectors are out of the question.
  __device__ int common_shift() const {
    const int shift = x_.is_contiguous() ? x_.misalignment(kItems) : -1;
    const auto agrees = [&](const Cursor& cursor) {
      return cursor.is_contiguous() && cursor.misalignment(kItems) == shift;
    };
    bool all = shift >= 0 && agrees(out_) && (a_.step == 0 || agrees(a_));
    if constexpr (Step::kBackward) {
      all = all && agrees(states_now()) && (params_.sum_da || agrees(da_));
    }
    return all ? shift : -1;
  }

  /// h at the position itself: h_previous points one step further.
  __device__ Cursor states_now() const {
    Cursor now = previous_;
    now.data -= now.step * element_size(now.dtype);
    return now;
  }

  __device__ int64_t lane_position(int64_t first, int g) const {
    return first + (static_cast<int64_t>(g) * kTeam + lane_) * kItems;
  }

  /// Whether all steps of a group are inside the chain and may be read as vectors.
  __device__ bool is_whole(int64_t first) const {
    return vectorised_ && first >= begin_ && first + kGroup * kTeam * kItems <= end_;
  }

  __device__ void load_group(int64_t first, Items (&a)[kGroup], Items (&x)[kGroup]) const {
    using Access = VectorAccess<T, Storage>;
    if (is_whole(first)) {
#pragma unroll
      for (int g = 0; g < kGroup; ++g) Access::load(x_, lane_position(first, g), x[g]);
      if (a_.step != 0) {
#pragma unroll
        for (int g = 0; g < kGroup; ++g) Access::load(a_, lane_position(first, g), a[g]);
        return;
      }
    } else {
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        load_items(x_, lane_position(first, g), begin_, end_, T{}, x[g]);
      }
    }
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      load_items(a_, lane_position(first, g), begin_, end_, one<T>(), a[g]);
    }
  }

  __device__ void load_previous_group(int64_t first, Items (&h)[kGroup]) const {
    const int64_t last = params_.seqlen - 1;
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      const int64_t position = lane_position(first, g);
      if (is_whole(first)) {
        Items now;
        VectorAccess<T, Storage>::load(states_now(), position, now);
#pragma unroll
        for (int i = 0; i + 1 < kItems; ++i) h[g][i] = now[i + 1];
        T next[1];
        load_items(previous_, position + kItems - 1, 0, last, T{}, next);
        h[g][kItems - 1] = next[0];
      } else {
        load_items(previous_, position, begin_, end_ < last ? end_ : last, T{}, h[g]);
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (position + i == last) h[g][i] = load_initial_state();
      }
    }
  }

  static __device__ AffineMap<T> map_of(const Items& a, const Items& x) {
    AffineMap<T> map{Step::factor(a[0]), Step::offset(a[0], x[0])};
#pragma unroll
    for (int i = 1; i < kItems; ++i) {
      map.product = Step::factor(a[i]) * map.product;
      Step::advance(a[i], x[i], map.offset);
    }
    return map;
  }

  __device__ void store(const Cursor& cursor, int64_t position, const Items& values) const {
    if (vectorised_ && position >= begin_ && position + kItems <= end_) {
      VectorAccess<T, Storage>::store(cursor, position, values);
    } else {
      store_items(cursor, position, begin_, end_, values);
    }
  }

  __device__ void finish(T state, T da_sum) const {
    if (params_.sum_da) {
      if constexpr (kTeam > 1) {
#pragma unroll
        for (int distance = kTeam / 2; distance > 0; distance /= 2) {
          da_sum += from_lane<kTeam>(da_sum, lane_ ^ distance);
        }
      }
      const T sums[1] = {da_sum};
      if (lane_ == 0) store_items(da_, segment_, 0, segment_ + 1, sums);
    }
    const bool is_last = end_ == params_.seqlen && begin_ < end_;
    if (params_.dinitial_state.present() && is_last && lane_ == 0) {
      const T states[1] = {state};
      store_items(Cursor(params_, params_.dinitial_state, row_), 0, 0, 1, states);
    }
  }

  __device__ T load_state(const RowArray& array) const {
    T state[1];
    load_items(Cursor(params_, array, row_), 0, 0, 1, T{}, state);
    return state[0];
  }

  const Params& params_;
  int64_t row_;
  int64_t segment_;
  int lane_;
  Cursor a_;
  Cursor x_;         // b or dh
  Cursor out_;       // h or db
  Cursor da_;        // backward
  Cursor previous_;  // backward
  bool vectorised_;
  int64_t origin_;  // where the first sub-tile begins, perhaps before begin_
  int64_t begin_;
  int64_t end_;
};

template <class Step, class Params, class Storage, int kTeam>
__global__ void __launch_bounds__(kThreads)
    map_kernel(const __grid_constant__ Params params, Segmentation split,
               AffineMap<typename Step::Value>* maps) {
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t index = thread / kTeam;
  if (index >= params.rows * split.segments) return;
  const int lane = static_cast<int>(thread % kTeam);
  const auto map = Chain<Step, Params, Storage, kTeam>(params, split, index, lane).map();
  if (lane == 0) maps[index] = map;
}

/// Replaces each map's offset by the state with which its segment begins. A warp owns a row.
template <class Step, class Params>
__global__ void __launch_bounds__(kThreads)
    start_kernel(const __grid_constant__ Params params, Segmentation split,
                 AffineMap<typename Step::Value>* maps) {
  using T = typename Step::Value;
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  if (row >= params.rows) return;
  const int lane = threadIdx.x % kWarp;
  // Any of the row's chains knows the state before the row.
  T state =
      Chain<Step, Params, AnyStorage, kWarp>(params, split, row * split.segments, lane).start();
  AffineMap<T>* row_maps = maps + row * split.segments;
  for (int64_t first = 0; first < split.segments; first += kWarp) {
    const int64_t segment = first + lane;
    const AffineMap<T> own =
        segment < split.segments ? row_maps[segment] : AffineMap<T>::identity();
    AffineMap<T> before, all;
    scan_lanes<kWarp>(lane, own, before, all);
    if (segment < split.segments) row_maps[segment].offset = before(state);
    state = all(state);
  }
}

template <class Step, class Params, class Storage, int kTeam>
__global__ void __launch_bounds__(kThreads)
    scan_kernel(const __grid_constant__ Params params, Segmentation split,
                const AffineMap<typename Step::Value>* maps) {
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t index = thread / kTeam;
  if (index >= params.rows * split.segments) return;
  const Chain<Step, Params, Storage, kTeam> chain(params, split, index,
                                                  static_cast<int>(thread % kTeam));
  chain.scan(split.segments == 1 ? chain.start() : maps[index].offset);
}

inline unsigned num_blocks(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

template <class Step, class Params, class Storage, int kTeam>
cudaError_t launch_teams(const Params& params, const Segmentation& split, void* workspace,
                         cudaStream_t stream) {
  auto* maps = static_cast<AffineMap<typename Step::Value>*>(workspace);
  const unsigned blocks = num_blocks(params.rows * split.segments * kTeam);
  if (split.segments > 1) {
    map_kernel<Step, Params, Storage, kTeam><<<blocks, kThreads, 0, stream>>>(params, split, maps);
    start_kernel<Step, Params>
        <<<num_blocks(params.rows * kWarp), kThreads, 0, stream>>>(params, split, maps);
  }
  scan_kernel<Step, Params, Storage, kTeam><<<blocks, kThreads, 0, stream>>>(params, split, maps);
  return cudaGetLastError();
}

inline bool all_stored_as(DType dtype, int64_t imag,
                          std::initializer_list<const RowArray*> arrays) {
  return std::all_of(arrays.begin(), arrays.end(), [&](const RowArray* array) {
    return array->dtype == dtype && array->imag == imag;
  });
}
inline bool all_stored_as(DType dtype, int64_t imag, const DiagonalForwardParams& params) {
  return all_stored_as(dtype, imag, {&params.a, &params.b, &params.h});
}
inline bool all_stored_as(DType dtype, int64_t imag, const DiagonalBackwardParams& params) {
  return all_stored_as(dtype, imag,
                       {&params.a, &params.dh, &params.h_previous, &params.db, &params.da});
}

inline bool is_reversed(const DiagonalForwardParams& params) {
  return params.b.step < 0;
}
inline bool is_reversed(const DiagonalBackwardParams& params) {
  return params.dh.step < 0;
}

template <template <class> class Step, class Params>
cudaError_t launch(const Params& params, const Segmentation& split, void* workspace,
                   cudaStream_t stream) {
  const auto with_any = [&]<class T>(T*) {
    return split.thread_per_row
               ? launch_teams<Step<T>, Params, AnyStorage, 1>(params, split, workspace, stream)
               : launch_teams<Step<T>, Params, AnyStorage, kWarp>(params, split, workspace, stream);
  };
  const auto with = [&]<class T, class Element>(T*, Element*) {
    return is_reversed(params) ? launch_teams<Step<T>, Params, Stored<Element, true>, kWarp>(
                                     params, split, workspace, stream)
                               : launch_teams<Step<T>, Params, Stored<Element, false>, kWarp>(
                                     params, split, workspace, stream);
  };
  if (params.is_double) {
    return params.is_complex ? with_any(static_cast<Complex<double>*>(nullptr))
                             : with_any(static_cast<double*>(nullptr));
  }
  if (params.is_complex) {
    Complex<float>* const complex = nullptr;
    if (split.thread_per_row || !all_stored_as(DType::kFloat32, 1, params)) {
      return with_any(complex);
    }
    return with(complex, complex);
  }
  float* const real = nullptr;
  if (!split.thread_per_row) {
    if (all_stored_as(DType::kFloat32, 0, params)) return with(real, real);
    if (all_stored_as(DType::kBFloat16, 0, params)) {
      return with(real, static_cast<BFloat16*>(nullptr));
    }
    if (all_stored_as(DType::kFloat16, 0, params)) return with(real, static_cast<Half*>(nullptr));
  }
  return with_any(real);
}

inline bool is_contiguous_in_time(const RowArray& array) {
  const int64_t components = array.imag == 0 ? 1 : 2;
  return array.step == components || array.step == -components;
}

/// A function of the sizes, the layout of `x` (b or dh) and the device.
inline Segmentation make_segmentation(const DiagonalScanParams& params, const RowArray& x) {
  int device = 0;
  int multiprocessors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);

  Segmentation split;
  split.thread_per_row = params.seqlen <= kShortRow || !is_contiguous_in_time(x);
  const int64_t chains_per_warp = split.thread_per_row ? kWarp : 1;
  const int64_t wanted = multiprocessors * kWantedWarps * chains_per_warp / params.rows;
  // A row's first sub-tile may begin before the row.
  const int64_t positions = params.seqlen + kMaxItems;
  const int64_t segments =
      std::clamp<int64_t>(params.seqlen / kSegmentUnit, 1, std::max<int64_t>(wanted, 1));
  const int64_t steps = (positions + segments - 1) / segments;
  split.steps = (steps + kSegmentUnit - 1) / kSegmentUnit * kSegmentUnit;
  split.segments = (positions + split.steps - 1) / split.steps;
  return split;
}

inline int64_t workspace_bytes(const DiagonalScanParams& params, const Segmentation& split) {
  const int64_t value = (params.is_double ? 8 : 4) * (params.is_complex ? 2 : 1);
  return split.segments == 1 ? 0 : params.rows * split.segments * 2 * value;
}

}  // namespace selective_scan::cuda::diagonal
