// Tests the scans: their results are compared with plain loops in double, and their gradients with
// central differences of these loops.

#include <cmath>
#include <complex>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/discretization.h"
#include "core/dtype.h"
#include "core/element.h"
#include "core/params.h"
#include "cpu/launch.h"
#include "cpu/tasks.h"
#include "native_test.h"

namespace selective_scan {
namespace {

struct Shape {
  int64_t batch, groups, dim, dstate, seqlen;
};

/// The arrays of a problem by name, in double; a complex number is two components.
using Arrays = std::map<std::string, std::vector<double>>;

struct Problem {
  Shape shape;
  Method method;
  bool is_complex;
  Arrays inputs;      // u, delta, z, A, B, C, D, delta_bias, initial_state
  Arrays cotangents;  // of out, last_state

  int64_t components() const { return is_complex ? 2 : 1; }
};

/// Draws values that float represents exactly.
std::vector<double> draw(int64_t count, double low, double high) {
  std::vector<double> values(count);
  for (double& value : values) value = static_cast<float>(uniform(low, high));
  return values;
}

Problem make_problem(const Shape& shape, Method method, bool is_complex) {
  Problem problem{shape, method, is_complex, {}, {}};
  const int64_t sequence = shape.batch * shape.dim * shape.seqlen;
  const int64_t components = problem.components();
  const int64_t projection = shape.batch * shape.groups * shape.dstate * shape.seqlen * components;
  const int64_t states = shape.batch * shape.dim * shape.dstate * components;
  Arrays& inputs = problem.inputs;
  inputs["u"] = draw(sequence, -1, 1);
  inputs["delta"] = draw(sequence, -3, 1);
  inputs["z"] = draw(sequence, -2, 2);
  inputs["A"] = draw(shape.dim * shape.dstate * components, -2, -0.2);
  inputs["B"] = draw(projection, -1, 1);
  inputs["C"] = draw(projection, -1, 1);
  inputs["D"] = draw(shape.dim, -1, 1);
  inputs["delta_bias"] = draw(shape.dim, -0.5, 0.5);
  inputs["initial_state"] = draw(states, -1, 1);
  problem.cotangents["out"] = draw(sequence, -1, 1);
  problem.cotangents["last_state"] = draw(states, -1, 1);
  return problem;
}

using Number = std::complex<double>;

/// Returns abar and bbar by the scalar core, which tests/test_core.py compares with mpmath.
Coefficients<Number> discretize(Method method, double delta, Number A) {
  using T = Complex<double>;
  const auto pole = make_pole<StandardMath>(T{A.real(), A.imag()});
  Coefficients<T> value{};
  [&]<int... kMethods>(std::integer_sequence<int, kMethods...>) {
    ((static_cast<int>(method) == kMethods
          ? void(value = Formula<static_cast<Method>(kMethods)>::template value<StandardMath>(delta,
                                                                                              pole))
          : void()),
     ...);
  }(std::make_integer_sequence<int, kNumMethods>());
  return {{value.abar.re, value.abar.im}, {value.bbar.re, value.bbar.im}};
}

/// Computes out and last_state by plain loops.
Arrays plain_scan(const Problem& problem, const Arrays& inputs) {
  const Shape& shape = problem.shape;
  const auto number = [&](const char* name, int64_t index) {
    const std::vector<double>& values = inputs.at(name);
    return problem.is_complex ? Number(values[2 * index], values[2 * index + 1])
                              : Number(values[index], 0);
  };
  Arrays results{{"out", {}}, {"last_state", {}}};
  results["out"].resize(inputs.at("u").size());
  results["last_state"].resize(inputs.at("initial_state").size());
  for (int64_t row = 0; row < shape.batch * shape.dim; ++row) {
    const int64_t batch = row / shape.dim, channel = row % shape.dim;
    const int64_t group = channel / (shape.dim / shape.groups);
    std::vector<Number> h(shape.dstate);
    for (int64_t n = 0; n < shape.dstate; ++n) {
      h[n] = number("initial_state", row * shape.dstate + n);
    }
    for (int64_t t = 0; t < shape.seqlen; ++t) {
      const int64_t at = row * shape.seqlen + t;
      const double u = inputs.at("u")[at], z = inputs.at("z")[at];
      const double delta =
          std::log1p(std::exp(inputs.at("delta")[at] + inputs.at("delta_bias")[channel]));
      double y = 0;
      for (int64_t n = 0; n < shape.dstate; ++n) {
        const int64_t of_group =
            ((batch * shape.groups + group) * shape.dstate + n) * shape.seqlen + t;
        const auto [abar, bbar] =
            discretize(problem.method, delta, number("A", channel * shape.dstate + n));
        h[n] = abar * h[n] + bbar * number("B", of_group) * u;
        y += (problem.is_complex ? 2 : 1) * (number("C", of_group) * h[n]).real();
      }
      y += inputs.at("D")[channel] * u;
      results["out"][at] = y * z / (1 + std::exp(-z));
    }
    for (int64_t n = 0; n < shape.dstate; ++n) {
      const int64_t index = row * shape.dstate + n;
      results["last_state"][problem.components() * index] = h[n].real();
      if (problem.is_complex) results["last_state"][2 * index + 1] = h[n].imag();
    }
  }
  return results;
}

double dot(const Arrays& a, const Arrays& b) {
  double sum = 0;
  for (const auto& [name, values] : a) {
    for (size_t i = 0; i < values.size(); ++i) sum += values[i] * b.at(name)[i];
  }
  return sum;
}

/// The kernels on arrays of T; u, delta, z and out are of Element.
template <class T, class Element>
struct KernelRun {
  std::map<std::string, std::vector<T>> arrays;
  std::map<std::string, std::vector<Element>> sequences;
  std::vector<T> states;
  const Problem& problem;

  explicit KernelRun(const Problem& problem) : problem(problem) {
    for (const Arrays* part : {&problem.inputs, &problem.cotangents}) {
      for (const auto& [name, values] : *part) {
        const std::string key = part == &problem.inputs ? name : "d" + name;
        if (is_sequence(name)) {
          for (const double value : values) {
            sequences[key].push_back(to_element<Element>(static_cast<T>(value)));
          }
        } else {
          arrays[key].assign(values.begin(), values.end());
        }
      }
    }
  }

  static bool is_sequence(const std::string& name) {
    return name == "u" || name == "delta" || name == "z" || name == "out";
  }
  static DType dtype_of(const double*) { return DType::kFloat64; }
  static DType dtype_of(const float*) { return DType::kFloat32; }
  static DType dtype_of(const Half*) { return DType::kFloat16; }
  static DType dtype_of(const BFloat16*) { return DType::kBFloat16; }

  /// Returns a view of an array, which it resizes to the size of `like`.
  ArrayView view(const std::string& name, const std::string& like) {
    const Shape& shape = problem.shape;
    const int64_t components = problem.components();
    ArrayView view;
    view.imag = 1;
    if (is_sequence(like)) {
      auto& values = sequences[name];
      values.resize(problem.inputs.at("u").size());
      view.data = values.data();
      view.dtype = dtype_of(values.data());
      view.step = 1;
      view.channel = shape.seqlen;
      view.batch = shape.dim * shape.seqlen;
      return view;
    }
    auto& values = arrays[name];
    values.resize(problem.inputs.at(like).size());
    view.data = values.data();
    view.dtype = dtype_of(values.data());
    if (like == "D" || like == "delta_bias") {
      view.channel = 1;
    } else if (like == "B" || like == "C") {
      view.step = components;
      view.state = shape.seqlen * components;
      view.group = shape.dstate * view.state;
      view.batch = shape.groups * view.group;
    } else {
      view.state = components;
      view.channel = shape.dstate * components;
      view.batch = like == "A" ? 0 : shape.dim * view.channel;
    }
    return view;
  }

  void fill(ScanParams& params) {
    const Shape& shape = problem.shape;
    params.batch = shape.batch;
    params.dim = shape.dim;
    params.groups = shape.groups;
    params.dstate = shape.dstate;
    params.seqlen = shape.seqlen;
    params.method = problem.method;
    params.is_complex = problem.is_complex;
    params.is_double = sizeof(T) == 8;
    params.delta_softplus = params.variable_B = params.variable_C = true;
    params.u = view("u", "u");
    params.delta = view("delta", "delta");
    params.z = view("z", "z");
    params.A = view("A", "A");
    params.B = view("B", "B");
    params.C = view("C", "C");
    params.D = view("D", "D");
    params.delta_bias = view("delta_bias", "delta_bias");
    params.initial_state = view("initial_state", "initial_state");
    states.resize(num_saved_states(shape.seqlen) * problem.inputs.at("initial_state").size());
    params.states = states.data();
  }

  /// Returns the problem with its sequences rounded to Elements. Call it before run().
  Problem rounded_problem() const {
    Problem rounded = problem;
    for (Arrays* part : {&rounded.inputs, &rounded.cotangents}) {
      for (auto& [name, values] : *part) {
        if (!is_sequence(name)) continue;
        const std::vector<Element>& elements =
            sequences.at(part == &rounded.inputs ? name : "d" + name);
        for (size_t i = 0; i < values.size(); ++i) values[i] = from_element<T>(elements[i]);
      }
    }
    return rounded;
  }

  /// Returns the outputs, and the gradients under the names of their inputs prefixed with d.
  Arrays run(int threads) {
    const cpu::ThreadPool pool = pool_of(threads);
    ForwardParams forward;
    fill(forward);
    forward.out = view("out", "out");
    forward.last_state = view("last_state", "initial_state");
    cpu::launch(forward, workspace(cpu::workspace_bytes(forward, pool)), pool);

    BackwardParams backward(forward);
    backward.dout = view("dout", "out");
    backward.dlast_state = view("dlast_state", "initial_state");
    backward.du = view("du", "u");
    backward.ddelta = view("ddelta", "delta");
    backward.dz = view("dz", "z");
    backward.dA = view("dA", "A");
    backward.dB = view("dB", "B");
    backward.dC = view("dC", "C");
    backward.dD = view("dD", "D");
    backward.ddelta_bias = view("ddelta_bias", "delta_bias");
    backward.dinitial_state = view("dinitial_state", "initial_state");
    cpu::launch(backward, workspace(cpu::workspace_bytes(backward, pool)), pool);

    Arrays results;
    for (const auto& [name, values] : arrays) results[name].assign(values.begin(), values.end());
    for (const auto& [name, values] : sequences) {
      for (const Element value : values) results[name].push_back(from_element<T>(value));
    }
    return results;
  }

 private:
  std::unique_ptr<char[]> memory;

  void* workspace(int64_t bytes) {
    memory.reset(new char[bytes + 64]);
    const auto address = reinterpret_cast<uintptr_t>(memory.get());
    return memory.get() + (64 - address % 64) % 64;
  }
};

double relative_l2(const std::vector<double>& actual, const std::vector<double>& expected) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  return std::sqrt(difference / size);
}

/// Compares the change of the loss along a random direction of one input, by the plain loops, with
/// the kernels' gradient.
void test_gradient(const Problem& problem, const Arrays& results, const std::string& name,
                   const std::string& text) {
  Arrays direction{{name, draw(problem.inputs.at(name).size(), -1, 1)}};
  const auto loss_at = [&](double distance) {
    Arrays inputs = problem.inputs;
    for (size_t i = 0; i < inputs[name].size(); ++i) {
      inputs[name][i] += distance * direction[name][i];
    }
    return dot(problem.cotangents, plain_scan(problem, inputs));
  };
  constexpr double kDistance = 1e-5;
  const double expected = (loss_at(kDistance) - loss_at(-kDistance)) / (2 * kDistance);
  const double actual = dot(direction, {{name, results.at("d" + name)}});
  const double error = std::fabs(actual - expected) / (1 + std::fabs(expected));
  expect(error < 1e-6, text + ": d" + name + " is off by " + std::to_string(error));
}

/// Compares the results in fp32, of sequences of Elements, with those in double of the same values.
/// `rounding` bounds the error of sequences, `cancelling` that of the other results, which are sums
/// over steps.
template <class Element>
void test_elements(const Problem& problem, const std::string& text, double rounding,
                   double cancelling) {
  KernelRun<float, Element> run(problem);
  const Arrays exact = KernelRun<double, double>(run.rounded_problem()).run(1);
  const Arrays results = run.run(1);
  for (const auto& [name, values] : exact) {
    const double bound = run.sequences.count(name) > 0 ? rounding : cancelling;
    expect(relative_l2(results.at(name), values) < bound, text + ": " + name);
  }
}

void test_scan(const Shape& shape, Method method, bool is_complex) {
  const Problem problem = make_problem(shape, method, is_complex);
  const std::string text = std::string(kMethodNames[static_cast<int>(method)]) +
                           (is_complex ? " complex " : " real ") + std::to_string(shape.dim) + "x" +
                           std::to_string(shape.seqlen);
  const Arrays expected = plain_scan(problem, problem.inputs);
  const Arrays exact = KernelRun<double, double>(problem).run(1);
  for (const auto& [name, values] : expected) {
    expect(relative_l2(exact.at(name), values) < 1e-13, text + ": " + name + " in double");
  }
  for (const auto& [name, values] : problem.inputs) test_gradient(problem, exact, name, text);

  test_elements<float>(problem, text + " in float", 1e-5, 1e-5);
  test_elements<Half>(problem, text + " in half", 1e-3, 5e-5);
  test_elements<BFloat16>(problem, text + " in bfloat16", 8e-3, 5e-5);
  const Arrays single = KernelRun<float, float>(problem).run(1);
  expect(KernelRun<float, float>(problem).run(3) == single, text + ": with three threads");
}

/// Denormal inputs are treated as 0, so that the results are exactly 0.
void test_denormal_scan() {
  const Shape shape{2, 2, 14, 6, 45};
  Problem problem = make_problem(shape, static_cast<Method>(0), false);
  for (const char* name : {"u", "initial_state"}) {
    for (double& value : problem.inputs[name]) value *= 0x1p-130;
  }
  for (const int threads : {1, 3}) {
    const Arrays results = KernelRun<float, float>(problem).run(threads);
    for (const char* name : {"out", "last_state", "dC", "dD"}) {
      bool zero = true;
      for (const double value : results.at(name)) zero &= value == 0;
      expect(zero, std::string(name) + " of denormal inputs is 0");
    }
    expect(!flushes(), "the mode stays: a scan");
  }
}

}  // namespace

void test_scans() {
  // In the first shape lanes are channels, in the second they are segments of the sequences.
  for (const Shape& shape : {Shape{2, 2, 14, 6, 45}, Shape{2, 2, 4, 5, 301}}) {
    for (int method = 0; method < kNumMethods; ++method) {
      for (const bool is_complex : {false, true}) {
        test_scan(shape, static_cast<Method>(method), is_complex);
      }
    }
  }
  test_denormal_scan();
}

}  // namespace selective_scan
