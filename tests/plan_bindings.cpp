// Exposes the plans of csrc/cuda/plan to the test suite: what a call of a given layout would run.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/dstate1/layout.h"
#include "cuda/kit/packed_chunks.h"
#include "cuda/plan/conv.h"
#include "cuda/plan/plan.h"
#include "cuda/plan/slices.h"
#include "cuda/plan/update.h"
#include "cuda/step/plan.h"

namespace py = pybind11;

namespace selective_scan {
namespace {

/// A call as the tests describe it. Arrays begin at multiples of 256 bytes and are as dense as
/// `channel_last` and `padding` allow.
struct Call {
  int64_t batch = 1;
  int64_t dim = 1;
  int64_t seqlen = 1;
  int64_t dstate = 1;
  int64_t groups = 1;
  std::string method = "zoh";
  std::string dtype = "bfloat16";
  std::string projection_dtype;  // of B and C; if empty, dtype
  bool is_complex = false;
  std::string B = "variable";  // or constant
  std::string C = "variable";
  bool channel_last = false;
  bool reverse = false;
  bool mixed = false;  // delta has another dtype
  bool z = true;
  int64_t padding = 0;  // elements after every row
  bool packed = false;  // sequences
  bool input_delta = false;
  bool state_alone = false;         // only the initial state's gradient is computed
  bool map_alone = false;           // neither out nor states are computed
  bool wider_rows = false;          // z, B, C and their gradients are half rows
  std::vector<std::string> turned;  // arrays laid out opposite to `channel_last`

  static DType dtype_of(const std::string& name) {
    if (name == "float64") return DType::kFloat64;
    if (name == "float32") return DType::kFloat32;
    if (name == "float16") return DType::kFloat16;
    if (name == "bfloat16") return DType::kBFloat16;
    throw std::invalid_argument("no such dtype: " + name);
  }
  DType element() const { return dtype_of(dtype); }
  Method method_value() const {
    const auto found = std::find(std::begin(kMethodNames), std::end(kMethodNames), method);
    if (found == std::end(kMethodNames)) throw std::invalid_argument("no such method: " + method);
    return static_cast<Method>(found - std::begin(kMethodNames));
  }
};

/// Returns an address that is never read.
void* address() {
  return reinterpret_cast<void*>(uintptr_t{1} << 40);
}

/// Returns a view (batch, row, step) of the last `rows` rows of an array that has `times` as many.
ArrayView make_view(const Call& call, const std::string& name, DType dtype, int64_t rows,
                    int64_t times = 1) {
  const bool is_turned =
      std::find(call.turned.begin(), call.turned.end(), name) != call.turned.end();
  const bool channel_last = call.channel_last != is_turned;
  const int64_t all_rows = times * rows;
  const int64_t length = (channel_last ? all_rows : call.seqlen) + call.padding;
  ArrayView view;
  view.dtype = dtype;
  view.channel = channel_last ? 1 : length;
  view.step = channel_last ? length : 1;
  view.batch = channel_last ? length * call.seqlen : length * all_rows;
  view.data =
      static_cast<char*>(address()) + (all_rows - rows) * view.channel * element_size(dtype);
  if (call.reverse) {
    view.data = static_cast<char*>(view.data) + (call.seqlen - 1) * view.step * element_size(dtype);
    view.step = -view.step;
  }
  return view;
}

ArrayView make_projection(const Call& call, const std::string& name, DType dtype, bool variable) {
  if (!variable) return {address(), dtype, 0, call.dstate, 0, 1, 0, 1};
  ArrayView view = make_view(call, name, dtype, call.groups * call.dstate, call.wider_rows ? 2 : 1);
  view.state = view.channel;
  view.group = call.dstate * view.channel;
  view.channel = 0;
  return view;
}

ScanParams make_inputs(const Call& call) {
  const DType dtype = call.element();
  ScanParams params;
  params.batch = call.batch;
  params.dim = call.dim;
  params.groups = call.groups;
  params.dstate = call.dstate;
  params.seqlen = call.seqlen;
  params.method = call.method_value();
  params.is_complex = call.is_complex;
  params.is_double = dtype == DType::kFloat64;
  params.variable_B = call.B == "variable";
  params.variable_C = call.C == "variable";
  params.u = make_view(call, "u", dtype, call.dim);
  params.delta = make_view(call, "delta", call.mixed ? DType::kFloat32 : dtype, call.dim);
  if (call.z) params.z = make_view(call, "z", dtype, call.dim, call.wider_rows ? 2 : 1);
  const DType A_dtype = params.is_double ? DType::kFloat64 : DType::kFloat32;
  params.A = make_projection(call, "A", A_dtype, false);
  const DType variable =
      call.projection_dtype.empty() ? dtype : Call::dtype_of(call.projection_dtype);
  params.B = make_projection(call, "B", params.variable_B ? variable : A_dtype, params.variable_B);
  params.C = make_projection(call, "C", params.variable_C ? variable : A_dtype, params.variable_C);
  params.D = {address(), DType::kFloat32, 0, 1};
  params.delta_bias = params.D;
  params.states = address();
  if (call.input_delta) params.input_delta = make_view(call, "input_delta", dtype, call.dim, 1);
  if (call.packed) params.packed = {{address(), true, 0, 1}, 64, call.seqlen, call.reverse};
  return params;
}

BackwardParams make_backward(const Call& call) {
  BackwardParams params(make_inputs(call));
  params.dout = make_view(call, "dout", params.u.dtype, call.dim);
  if (call.state_alone) {
    params.wanted = BackwardWanted::kStateAlone;
    params.dinitial_state = {address(), params.A.dtype, 0, call.dstate};
    return params;
  }
  params.du = make_view(call, "du", params.u.dtype, call.dim);
  params.ddelta = make_view(call, "ddelta", params.delta.dtype, call.dim);
  if (call.input_delta) params.dinput_delta = make_view(call, "", params.u.dtype, call.dim, 1);
  if (call.z) params.dz = make_view(call, "dz", params.z.dtype, call.dim, call.wider_rows ? 2 : 1);
  params.dA = params.A;
  params.dB = params.B;
  params.dC = params.C;
  params.dD = params.D;
  params.ddelta_bias = params.delta_bias;
  return params;
}

// Describes how a plan divides a group's channels and a sequence's steps among blocks.

struct Division {
  int64_t tile_channels;
  int64_t tiles;
  int64_t segments = 1;
  int64_t segment_steps = 0;
  int64_t tiles_per_sum = 1;
};

Division of_geometry(const cuda::Geometry& geometry) {
  return {geometry.tile_channels(), geometry.tiles, geometry.segments, geometry.segment_steps,
          geometry.tiles_per_sum};
}

Division divide(const cuda::prompt::ForwardPlan& plan) {
  return {plan.scanners * plan.warp_channels, plan.tiles};
}
template <class Scratch>
Division divide(const cuda::floor::Plan<Scratch>& plan) {
  Division division = of_geometry(plan.geometry);
  if (division.segment_steps == 0) division.segments = 1;  // packed sequences are not divided
  return division;
}
template <class Scratch>
Division divide(const cuda::narrow::Plan<Scratch>& plan) {
  return {plan.warp_channels, plan.tiles};
}
Division divide(const cuda::dstate1::ForwardPlan& plan) {
  return {plan.window_channels, plan.windows};
}
Division divide(const cuda::dstate1::BackwardPlan& plan) {
  return {plan.warps / plan.window_warps * plan.window_channels, plan.tiles};
}
Division divide(const cuda::streamed::ForwardPlan& plan) {
  return {plan.geometry.warps * plan.warp_channels, plan.geometry.tiles, plan.geometry.segments,
          plan.geometry.segment_chunks * cuda::kChunk};
}
Division divide(const cuda::streamed::BackwardPlan& plan) {
  return of_geometry(plan.geometry);
}

/// Adds how the streamed kernels' lanes divide rows, and along what each array is read in vectors.
template <class Plan>
void describe_rows(const Plan& plan, py::dict& result) {
  if constexpr (requires { plan.map; }) {
    constexpr const char* kMaps[] = {"steps", "channels", "elements", "step pairs"};
    const bool along_steps = plan.map == cuda::streamed::LaneMap::kSteps;
    py::list rows;
    for (const cuda::streamed::RowArray& it : plan.rows) {
      rows.append(!it.present()                                             ? "absent"
                  : it.has_step_vectors && (along_steps || !it.has_vectors) ? "steps"
                  : it.has_vectors                                          ? "channels"
                                                                            : "elements");
    }
    result["map"] = kMaps[static_cast<size_t>(plan.map)];
    result["rows"] = rows;
  }
}

template <class AnyPlan>
py::dict describe(const AnyPlan& plan, int64_t seqlen) {
  const Division division =
      std::visit([](const auto& of_path) { return divide(of_path); }, plan.of_path);
  const cuda::LaunchShape& shape = plan.shape();
  py::dict result;
  result["path"] = std::string(cuda::kPathNames[static_cast<size_t>(plan.path())]);
  result["tile_channels"] = division.tile_channels;
  result["tiles"] = division.tiles;
  result["tiles_per_sum"] = division.tiles_per_sum;
  result["segments"] = division.segments;
  result["segment_steps"] = division.segments > 1 ? division.segment_steps : seqlen;
  result["grid"] = py::make_tuple(shape.blocks, shape.rows, shape.layers);
  result["threads"] = shape.threads;
  result["shared_bytes"] = shape.shared_bytes;
  result["scratch_bytes"] = plan.scratch_bytes();
  std::visit([&](const auto& of_path) { describe_rows(of_path, result); }, plan.of_path);
  return result;
}

std::optional<cuda::Path> find_path(const std::optional<std::string>& name) {
  if (!name) return std::nullopt;
  const auto found = std::find(cuda::kPathNames.begin(), cuda::kPathNames.end(), *name);
  if (found == cuda::kPathNames.end()) throw std::invalid_argument("no such path: " + *name);
  return static_cast<cuda::Path>(found - cuda::kPathNames.begin());
}

ForwardParams make_forward(const Call& call) {
  ForwardParams params(make_inputs(call));
  if (call.map_alone) {
    params.wanted = ForwardWanted::kMapAlone;
    params.D = params.z = {};
    params.states = nullptr;
    params.map_factor = {address(), params.A.dtype, call.dim * call.dstate, call.dstate, 0, 1, 0,
                         1};
    return params;
  }
  params.out = make_view(call, "out", params.u.dtype, call.dim);
  return params;
}

py::dict plan_forward(const Call& call, const cuda::Device& device,
                      const std::optional<std::string>& wanted) {
  return describe(cuda::plan_scan(make_forward(call), device, find_path(wanted)), call.seqlen);
}

py::dict plan_backward(const Call& call, const cuda::Device& device,
                       const std::optional<std::string>& wanted) {
  return describe(cuda::plan_scan(make_backward(call), device, find_path(wanted)), call.seqlen);
}

/// Returns how a call is arranged in slices or copies, None if it runs as it is.
template <class Params, class Plan>
py::object describe_slices(const Params& params, const cuda::Device& device, const Plan& plan) {
  auto arrangement = cuda::arrange_states(params, device);
  const bool is_sliced = arrangement.has_value();
  if (!is_sliced) arrangement = cuda::arrange_rows(params, device, plan);
  if (!arrangement) return py::none();
  int64_t bytes = 0;
  const auto made =
      cuda::plan_slices(params, *arrangement, device, std::nullopt, [&](int64_t asked) {
        bytes += asked;
        return reinterpret_cast<void*>(uintptr_t{256});
      });
  if (!is_sliced && made.slices.front().plan.path() == cuda::Path::kFloor) return py::none();
  py::list states, paths, sums;
  for (const auto& slice : made.slices) {
    states.append(slice.params.dstate);
    paths.append(std::string(cuda::kPathNames[static_cast<size_t>(slice.plan.path())]));
    sums.append(slice.sums.size());
  }
  py::dict result;
  result["states"] = states;
  result["paths"] = paths;
  result["copies"] = made.copies.size();
  result["sums"] = sums;
  result["along_steps"] = arrangement->along_steps;
  result["scratch_bytes"] = bytes + made.scratch_bytes;
  return result;
}

py::object forward_slices(const Call& call, const cuda::Device& device) {
  const ForwardParams params = make_forward(call);
  return describe_slices(params, device, cuda::plan_scan(params, device));
}

py::object backward_slices(const Call& call, const cuda::Device& device) {
  const BackwardParams params = make_backward(call);
  return describe_slices(params, device, cuda::plan_scan(params, device));
}

/// Returns an update of `seqlen` steps whose groups are heads. `padding` follows the states of
/// every channel.
UpdateParams make_update(const Call& call, const std::string& state_dtype) {
  UpdateParams params;
  params.batch = params.slots = call.batch;
  params.steps = call.seqlen;
  params.heads = params.groups = call.groups;
  params.dim = call.dim / call.groups;
  params.dstate = call.dstate;
  params.is_complex = call.is_complex;
  params.is_double = call.dtype == "float64";
  const int64_t reals = call.is_complex ? 2 : 1;

  ArrayView& A = params.A;
  A.data = address();
  A.state = reals;
  A.channel = call.dstate * reals;
  A.group = params.dim * A.channel;
  A.imag = reals - 1;
  ArrayView& state = params.state = A;
  Call of_state = call;
  of_state.dtype = state_dtype;
  state.dtype = of_state.element();
  state.channel = (call.dstate + call.padding) * reals;
  state.group = params.dim * state.channel;
  state.batch = call.groups * state.group;

  ArrayView& x = params.x;
  x.data = address();
  x.dtype = call.element();
  x.channel = 1;
  x.group = params.dim;
  x.step = call.dim;
  x.batch = call.seqlen * call.dim;
  params.dt = params.out = x;
  if (call.mixed) params.dt.dtype = DType::kFloat32;
  const int64_t times = call.wider_rows ? 2 : 1;
  if (call.z) {
    params.z = x;
    params.z.batch *= times;
  }
  params.D.data = params.dt_bias.data = address();
  params.D.channel = params.dt_bias.channel = 1;
  params.D.group = params.dt_bias.group = params.dim;
  params.dt_softplus = true;
  ArrayView& B = params.B = x;
  B.channel = 0;
  B.state = reals;
  B.imag = reals - 1;
  B.group = call.dstate * reals;
  B.step = call.groups * B.group;
  B.batch = times * call.seqlen * B.step;
  params.C = B;
  return params;
}

py::dict plan_update(const Call& call, const std::string& state_dtype) {
  const cuda::UpdatePlan plan = cuda::plan_update(make_update(call, state_dtype));
  py::dict result;
  result["kernel"] = plan.is_dense ? "dense" : "any";
  result["lane_states"] = plan.lane_states;
  result["many_packs"] = plan.many_packs;
  result["lanes"] = 1 << plan.lane_bits;
  result["grid"] = py::make_tuple(plan.shape.blocks, plan.shape.rows);
  result["threads"] = plan.shape.threads;
  return result;
}

/// Returns the plan of a convolution with the sizes and layout of the call's u.
py::dict plan_conv(const Call& call, const cuda::Device& device, int64_t width, bool is_backward) {
  using namespace cuda::conv;
  ConvBackwardParams params;
  params.batch = call.batch;
  params.dim = call.dim;
  params.seqlen = call.seqlen;
  params.width = width;
  params.sequences = call.batch;
  params.is_double = call.dtype == "float64";
  params.x = params.dout = params.dx = make_view(call, "u", call.element(), call.dim);
  if (call.packed) params.cu_seqlens.data = address();
  ConvForwardParams forward(params);
  forward.out = params.x;
  const ConvPlan plan =
      is_backward ? cuda::conv::plan_conv(params, device) : cuda::conv::plan_conv(forward, device);
  constexpr const char* kNames[] = {"none", "columns", "rows", "any strides"};
  py::dict result;
  result["kernels"] = kNames[static_cast<int>(plan.kernels)];
  result["is_whole"] = plan.is_whole;
  result["steps"] = plan.columns.steps;
  result["tile_steps"] = plan.columns.tile_steps();
  result["tiles"] = plan.columns.tiles;
  result["lanes"] = plan.kernels == Kernels::kRows ? plan.rows.lanes() : plan.columns.lanes();
  result["segments"] = plan.rows.segments;
  result["rounds"] = plan.rows.rounds;
  result["blocks"] = plan.shape.blocks;
  result["part_rows"] = plan.part_rows;
  return result;
}

/// Returns the plan of a token's step, or why there is none.
py::object plan_step(const cuda::Device& device, const std::string& dtype, int64_t rows,
                     int64_t layers, int64_t dim, int64_t vocabulary, int64_t inner, int64_t dstate,
                     int64_t rank) {
  StepParams params;
  params.batch = rows;
  params.layers = layers;
  params.dim = dim;
  params.vocabulary = vocabulary;
  params.inner = inner;
  params.dstate = dstate;
  params.rank = rank;
  params.weight_dtype = Call::dtype_of(dtype);
  params.is_double = dtype == "float64";
  cuda::step::StepPlan plan;
  if (const cuda::Refusal refusal = cuda::step::plan_step(params, device, plan)) {
    return py::str(refusal.reason + (", got " + std::to_string(refusal.got)));
  }
  py::list channels, outputs;
  for (int block = 0; block < plan.blocks; ++block) {
    channels.append(cuda::step::channels_of(inner, block, plan.blocks).count);
    outputs.append(cuda::step::channels_of(dim, block, plan.blocks).count);
  }
  py::dict result;
  result["channels"] = channels;
  result["outputs"] = outputs;
  result["activation_pitch"] = plan.activation_pitch;
  result["stages"] = plan.stages;
  result["threads"] = plan.shape.threads;
  result["shared_bytes"] = plan.shape.shared_bytes;
  result["workspace_bytes"] = plan.workspace_bytes();
  return result;
}

/// Returns the first chunk of each segment of packed sequences, then the number of chunks.
std::vector<int> cut_packed(const std::vector<int64_t>& boundaries, bool reversed, int64_t segments,
                            int64_t segment_chunks, int64_t uncut_chunks, bool backwards) {
  const auto count = static_cast<int64_t>(boundaries.size()) - 1;
  const PackedSequences packed{{boundaries.data(), true, 0, 1}, count, boundaries.back(), reversed};
  std::vector<cuda::PackedChunk> chunks;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t sequence = reversed ? count - 1 - i : i;
    for (int64_t step = packed.begin(sequence); step < packed.end(sequence); step += cuda::kChunk) {
      cuda::PackedChunk chunk;
      chunk.first_step = static_cast<int>(step);
      chunk.sequence = static_cast<int>(sequence);
      chunks.push_back(chunk);
    }
  }
  const cuda::PackedCuts cuts{segments, segment_chunks, uncut_chunks, backwards};
  std::vector<int> result;
  for (int64_t number = 0; number <= segments; ++number) {
    result.push_back(
        cuts.first_chunk(number, packed, chunks.data(), static_cast<int>(chunks.size())));
  }
  return result;
}

}  // namespace
}  // namespace selective_scan

PYBIND11_MODULE(plan_bindings, m) {
  using selective_scan::Call;
  using selective_scan::cuda::Device;
  py::class_<Call>(m, "Call")
      .def(py::init())
      .def_readwrite("batch", &Call::batch)
      .def_readwrite("dim", &Call::dim)
      .def_readwrite("seqlen", &Call::seqlen)
      .def_readwrite("dstate", &Call::dstate)
      .def_readwrite("groups", &Call::groups)
      .def_readwrite("method", &Call::method)
      .def_readwrite("dtype", &Call::dtype)
      .def_readwrite("projection_dtype", &Call::projection_dtype)
      .def_readwrite("complex", &Call::is_complex)
      .def_readwrite("B", &Call::B)
      .def_readwrite("C", &Call::C)
      .def_readwrite("channel_last", &Call::channel_last)
      .def_readwrite("reverse", &Call::reverse)
      .def_readwrite("mixed", &Call::mixed)
      .def_readwrite("z", &Call::z)
      .def_readwrite("padding", &Call::padding)
      .def_readwrite("packed", &Call::packed)
      .def_readwrite("input_delta", &Call::input_delta)
      .def_readwrite("state_alone", &Call::state_alone)
      .def_readwrite("map_alone", &Call::map_alone)
      .def_readwrite("wider_rows", &Call::wider_rows)
      .def_readwrite("turned", &Call::turned);
  py::class_<Device>(m, "Device")
      .def(py::init())
      .def_readwrite("multiprocessors", &Device::multiprocessors)
      .def_readwrite("block_shared_bytes", &Device::block_shared_bytes)
      .def_readwrite("shared_bytes", &Device::shared_bytes)
      .def_readwrite("major", &Device::major);
  m.attr("paths") = std::vector<std::string>(selective_scan::cuda::kPathNames.begin(),
                                             selective_scan::cuda::kPathNames.end());
  m.def("lessened", [](const Device& device, const std::string& text) {
    return selective_scan::cuda::lessened(device, text);
  });
  m.def("facts_of", &selective_scan::cuda::facts_of);
  m.def("cut_packed", &selective_scan::cut_packed);
  m.def("plan_forward", &selective_scan::plan_forward, py::arg("call"), py::arg("device"),
        py::arg("wanted") = py::none());
  m.def("plan_backward", &selective_scan::plan_backward, py::arg("call"), py::arg("device"),
        py::arg("wanted") = py::none());
  m.def("forward_slices", &selective_scan::forward_slices, py::arg("call"), py::arg("device"));
  m.def("backward_slices", &selective_scan::backward_slices, py::arg("call"), py::arg("device"));
  m.def("plan_conv", &selective_scan::plan_conv, py::arg("call"), py::arg("device"),
        py::arg("width"), py::arg("is_backward"));
  m.def("plan_step", &selective_scan::plan_step, py::arg("device"), py::arg("dtype"),
        py::arg("rows"), py::arg("layers"), py::arg("dim"), py::arg("vocabulary"), py::arg("inner"),
        py::arg("dstate") = 16, py::arg("rank") = 1);
  m.def("plan_update", &selective_scan::plan_update, py::arg("call"), py::arg("state_dtype"));
}
