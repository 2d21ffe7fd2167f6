// From a parameter struct to a launch: picks an instantiation and a geometry, lays out scratch
// memory.
#include "launch.h"

#include <algorithm>
#include <array>
#include <utility>

#include "scan.h"
#include "shared_layout.h"

namespace selective_scan::cuda {
namespace {

/// What the launcher knows of an instantiation's type.
struct Variant {
  int states;       // per lane
  int state_bytes;  // of one state
  int real_bytes;
  std::array<cudaError_t (*)(const ForwardParams&, const Geometry&, cudaStream_t), kNumMethods>
      forward;
  std::array<cudaError_t (*)(const BackwardParams&, const Geometry&, const BackwardWorkspace&,
                             cudaStream_t),
             kNumMethods>
      backward;
  cudaError_t (*reduce)(const BackwardParams&, const Geometry&, int, const BackwardWorkspace&,
                        cudaStream_t);
};

template <class T, int kStates, Method kMethod>
void add_method(Variant& variant) {
  variant.forward[static_cast<size_t>(kMethod)] = &Scan<T, kStates, kMethod>::forward;
  variant.backward[static_cast<size_t>(kMethod)] = &Scan<T, kStates, kMethod>::backward;
}

template <class T, int kStates>
Variant make_variant() {
  Variant variant{kStates, sizeof(T), sizeof(real_t<T>), {}, {}, &reduce_gradients<T>};
  [&]<int... kMethods>(std::integer_sequence<int, kMethods...>) {
    (add_method<T, kStates, static_cast<Method>(kMethods)>(variant), ...);
  }(std::make_integer_sequence<int, kNumMethods>());
  return variant;
}

template <class T, int kStates>
const Variant& variant() {
  static const Variant instance = make_variant<T, kStates>();
  return instance;
}

/// A lane holds 16 bytes of states, or one state where there are few.
const Variant& choose_variant(const ScanParams& params) {
  if (params.is_complex && params.is_double) return variant<Complex<double>, 1>();
  if (params.is_complex) return variant<Complex<float>, 2>();
  if (params.is_double) return variant<double, 2>();
  return params.dstate <= 2 ? variant<float, 1>() : variant<float, 4>();
}

struct Device {
  int multiprocessors = 1;
  int shared_bytes = 48 * 1024;  // that a block may have
};

cudaError_t current_device(Device& device) {
  int id = 0;
  cudaError_t error = cudaGetDevice(&id);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, id);
  }
  if (error == cudaSuccess) {
    error =
        cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  }
  return error;
}

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

void set_channel_warps(const ScanParams& params, Geometry& geometry, int warps) {
  geometry.channel_warps = warps;
  geometry.tiles = ceil_div(geometry.group_channels, geometry.tile_channels());
  geometry.work_items = params.batch * params.groups * geometry.tiles;
}

/// Takes the number of warps that loads the busiest multiprocessor least: what counts is how many
/// warps' worth of channels it has to work off. Of equals the largest, which reads B and C least
/// often. `shared_bytes(geometry)` is what a block needs.
template <class SharedBytes>
cudaError_t choose_geometry(const ScanParams& params, const Variant& variant, int min_tile,
                            const SharedBytes& shared_bytes, Geometry& best) {
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  Geometry geometry;
  geometry.group_channels = params.dim / params.groups;
  const int64_t lanes = ceil_div(params.dstate, variant.states);
  while (geometry.lanes() < lanes && geometry.lanes() < kWarpSize) ++geometry.lane_bits;
  geometry.state_warps = static_cast<int>(ceil_div(lanes, geometry.lanes()));

  const int64_t useful = ceil_div(geometry.group_channels, geometry.warp_channels());
  const int most =
      static_cast<int>(std::min<int64_t>(useful, kMaxWarps / geometry.state_warps));
  int64_t best_load = 0;
  for (int warps = 1; warps <= most; ++warps) {
    set_channel_warps(params, geometry, warps);
    if (shared_bytes(geometry) > device.shared_bytes) break;
    const int64_t load = ceil_div(geometry.work_items, device.multiprocessors) * warps;
    const bool too_small = best.work_items > 0 && best.tile_channels() < min_tile;
    if (best.work_items == 0 || too_small || load <= best_load) {
      best = geometry;
      best_load = load;
    }
  }
  return best.work_items > 0 ? cudaSuccess : cudaErrorInvalidConfiguration;
}

cudaError_t forward_geometry(const ForwardParams& params, const Variant& variant,
                             Geometry& geometry) {
  const auto shared_bytes = [&](const Geometry& candidate) {
    return forward_layout(params, candidate, variant.states, variant.state_bytes,
                          variant.real_bytes)
        .bytes;
  };
  return choose_geometry(params, variant, 1, shared_bytes, geometry);
}

cudaError_t backward_geometry(const BackwardParams& params, const Variant& variant,
                              Geometry& geometry) {
  const auto shared_bytes = [&](const Geometry& candidate) {
    return backward_layout(params, candidate, variant.states, variant.state_bytes,
                           variant.real_bytes)
        .bytes;
  };
  const bool any_variable = params.variable_B || params.variable_C;
  return choose_geometry(params, variant, any_variable ? kMinBackwardTile : 1, shared_bytes,
                         geometry);
}

int padded_states(const Geometry& geometry, const Variant& variant) {
  return geometry.state_warps * geometry.lanes() * variant.states;
}

/// Lays the scratch arrays out from `memory` on (which may be null, to learn the size) and returns
/// their size in bytes.
int64_t layout_workspace(const BackwardParams& params, const Variant& variant,
                         const Geometry& geometry, void* memory, BackwardWorkspace& workspace) {
  constexpr int64_t kAlignment = 256;
  int64_t bytes = 0;
  const auto take = [&](void*& array, bool wanted, int64_t count, int size) {
    if (!wanted) return;
    array = static_cast<char*>(memory) + bytes;
    bytes += ceil_div(count * size, kAlignment) * kAlignment;
  };
  const int64_t padded = padded_states(geometry, variant);
  const int64_t channels = params.batch * params.dim;
  take(workspace.projections, (params.variable_B || params.variable_C) && params.seqlen > 0,
       geometry.tiles * params.batch * params.groups * params.seqlen * 2 * padded,
       variant.state_bytes);
  take(workspace.dA, true, channels * padded, variant.state_bytes);
  take(workspace.dB, !params.variable_B, channels * padded, variant.state_bytes);
  take(workspace.dC, !params.variable_C, channels * padded, variant.state_bytes);
  take(workspace.dD, params.dD.present(), channels, variant.real_bytes);
  take(workspace.ddelta_bias, params.ddelta_bias.present(), channels, variant.real_bytes);
  return bytes;
}

bool is_empty(const ScanParams& params) {
  return params.batch == 0 || params.dim == 0 || params.dstate == 0;
}

}  // namespace

int64_t forward_workspace_bytes(const ForwardParams&) {
  return 0;
}

int64_t backward_workspace_bytes(const BackwardParams& params) {
  if (is_empty(params)) return 0;
  const Variant& variant = choose_variant(params);
  Geometry geometry;
  if (backward_geometry(params, variant, geometry) != cudaSuccess) return 0;
  BackwardWorkspace workspace;
  return layout_workspace(params, variant, geometry, nullptr, workspace);
}

cudaError_t scan_forward(const ForwardParams& params, void*, cudaStream_t stream) {
  if (is_empty(params)) return cudaSuccess;
  if (params.dstate > kMaxDstate) return cudaErrorInvalidValue;
  const Variant& variant = choose_variant(params);
  Geometry geometry;
  const cudaError_t error = forward_geometry(params, variant, geometry);
  if (error != cudaSuccess) return error;
  return variant.forward[static_cast<size_t>(params.method)](params, geometry, stream);
}

cudaError_t scan_backward(const BackwardParams& params, void* memory, cudaStream_t stream) {
  if (is_empty(params)) return cudaSuccess;
  if (params.dstate > kMaxDstate) return cudaErrorInvalidValue;
  const Variant& variant = choose_variant(params);
  Geometry geometry;
  cudaError_t error = backward_geometry(params, variant, geometry);
  if (error != cudaSuccess) return error;
  BackwardWorkspace workspace;
  layout_workspace(params, variant, geometry, memory, workspace);
  error = variant.backward[static_cast<size_t>(params.method)](params, geometry, workspace, stream);
  if (error != cudaSuccess) return error;
  return variant.reduce(params, geometry, padded_states(geometry, variant), workspace, stream);
}

}  // namespace selective_scan::cuda
