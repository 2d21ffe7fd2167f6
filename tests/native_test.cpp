// Tests csrc/core and csrc/cpu without Python and PyTorch, for machines that have neither:
// tools/cross_test.sh cross-compiles the program and runs it under an emulator.
//
// The vector functions are compared with long double, the scans with plain loops in double below,
// and gradients with central differences of these loops.

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/discretization.h"
#include "core/dtype.h"
#include "core/element.h"
#include "core/params.h"
#include "cpu/capability.h"
#include "cpu/flush_denormals.h"
#include "cpu/launch.h"
#include "cpu/simd/tile.h"
#include "cpu/simd/vector.h"
#include "cpu/simd/vector_math.h"
#include "cpu/tasks.h"

namespace selective_scan {
namespace {

using cpu::Baseline;
using cpu::Vec;
using cpu::VectorMath;

std::mt19937_64 random_bits;
int failures = 0;
int checks = 0;

void expect(bool holds, const std::string& what) {
  ++checks;
  if (holds) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

double uniform(double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(random_bits);
}

// --- vector functions ----------------------------------------------------------------------------

/// Returns the distance in units of the last place of the exact value.
template <class T>
long double ulps(T actual, long double exact) {
  constexpr int kDigits = std::numeric_limits<T>::digits;
  constexpr int kLowest = std::numeric_limits<T>::min_exponent;
  int exponent = kLowest;
  if (exact != 0) std::frexp(exact, &exponent);
  return std::fabs(actual - exact) / std::ldexp(1.0L, std::max(exponent, kLowest) - kDigits);
}

/// Returns sin(x + quarters·π/2) for x up to some thousands. The angle is reduced here, since a C
/// library may leave the reduction to the x87 (mingw-w64's does), whose π has 66 bits.
long double sine(long double x, int quarters) {
  // π/2 in two parts; multiples of the first are exact.
  constexpr long double kHigh = 0x1.921fb544p+0L, kLow = 0x4.2d18469898cc51701b839a2p-36L;
  const long double count = std::round(x / kHigh);
  const long double rest = x - count * kHigh - count * kLow;
  const int quadrant = (static_cast<int>(count) + quarters) & 3;
  const long double value = quadrant % 2 == 0 ? std::sin(rest) : std::cos(rest);
  return quadrant < 2 ? value : -value;
}

template <class T>
struct Function {
  const char* name;
  std::function<Vec<T, Baseline>(Vec<T, Baseline>)> vector;
  std::function<long double(long double)> exact;
  double low, high;
  double limit = 2;  // ulp
};

template <class T>
std::vector<Function<T>> functions() {
  using R = Vec<T, Baseline>;
  const double high = std::log(std::numeric_limits<T>::max()) * 0.9999;
  const double low = std::log(std::numeric_limits<T>::min());
  return {
      {"exp", [](R x) { return VectorMath::exp(x); }, [](long double x) { return std::exp(x); },
       low, high},
      {"sin",
       [](R x) {
         R sine, cosine;
         VectorMath::sincos(x, sine, cosine);
         return sine;
       },
       [](long double x) { return sine(x, 0); }, -5e3, 5e3},
      {"cos",
       [](R x) {
         R sine, cosine;
         VectorMath::sincos(x, sine, cosine);
         return cosine;
       },
       [](long double x) { return sine(x, 1); }, -5e3, 5e3},
      {"softplus", [](R x) { return VectorMath::softplus(x); },
       [](long double x) { return x > 20 ? x : std::log1p(std::exp(x)); }, -80, 80, 2.75},
      {"sigmoid", [](R x) { return VectorMath::sigmoid(x); },
       [](long double x) { return 1 / (1 + std::exp(-x)); }, -80, 80, 2.75},
  };
}

template <class T>
void test_functions() {
  using R = Vec<T, Baseline>;
  for (const Function<T>& function : functions<T>()) {
    long double worst = 0;
    for (int i = 0; i < 3000; ++i) {
      T lanes[R::kWidth], results[R::kWidth];
      for (T& x : lanes) {  // uniform, around zero, or spread over the magnitudes
        x = static_cast<T>(i % 3 == 0   ? uniform(function.low, function.high)
                           : i % 3 == 1 ? uniform(-2, 2)
                                        : std::pow(10.0, uniform(-12, 1)));
        x = std::max(x, static_cast<T>(function.low));
      }
      function.vector(R::load(lanes)).store(results);
      for (int lane = 0; lane < R::kWidth; ++lane) {
        worst = std::max(worst, ulps(results[lane], function.exact(lanes[lane])));
      }
    }
    std::printf("%s, %zu bytes: %.2Lf ulp\n", function.name, sizeof(T), worst);
    expect(worst <= function.limit, std::string(function.name) + " to the limit");
    const T nan = std::numeric_limits<T>::quiet_NaN();
    expect(std::isnan(function.vector(R(nan)).lane(0)), std::string(function.name) + " of NaN");
  }
  const T infinity = std::numeric_limits<T>::infinity();
  expect(VectorMath::exp(R(infinity)).lane(0) == infinity, "exp(inf)");
  expect(VectorMath::exp(R(-infinity)).lane(0) == 0, "exp(-inf)");
  expect(VectorMath::softplus(R(-infinity)).lane(0) == 0, "softplus(-inf)");
  expect(VectorMath::sigmoid(R(infinity)).lane(0) == 1, "sigmoid(inf)");
}

/// Decodes a binary16 from its exponent and mantissa.
float value_of(Half half) {
  const int exponent = (half.bits >> 10) & 31, mantissa = half.bits & 1023;
  const double magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                           : exponent > 0 ? std::ldexp(1024 + mantissa, exponent - 25)
                                          : std::ldexp(mantissa, -24);
  return static_cast<float>(half.bits >> 15 ? -magnitude : magnitude);
}
float value_of(BFloat16 value) {
  return bit_cast<float>(uint32_t{value.bits} << 16);
}

/// Vectors convert 16-bit elements as the scalar functions do, for all bit patterns and random
/// floats, and the scalar functions return the values that the patterns encode.
template <class Element>
void test_conversions(const std::string& name) {
  using R = Vec<float, Baseline>;
  using Convert = cpu::Converter<R, Element>;
  bool values_hold = true, loads = true, stores = true;
  for (int i = 0; i < 1 << 16; i += R::kWidth) {
    Element elements[R::kWidth], stored[R::kWidth];
    float values[R::kWidth];
    for (int lane = 0; lane < R::kWidth; ++lane) {
      elements[lane].bits = static_cast<uint16_t>(i + lane);
      values[lane] = bit_cast<float>(static_cast<uint32_t>(random_bits()));
    }
    const R loaded = Convert::load(elements);
    Convert::store(R::load(values), stored);
    for (int lane = 0; lane < R::kWidth; ++lane) {
      const float expected = to_float(elements[lane]);
      const float exact = value_of(elements[lane]);
      values_hold &= bit_cast<uint32_t>(expected) == bit_cast<uint32_t>(exact) ||
                     (std::isnan(expected) && std::isnan(exact));
      loads &= bit_cast<uint32_t>(loaded.lane(lane)) == bit_cast<uint32_t>(expected) ||
               (std::isnan(expected) && std::isnan(loaded.lane(lane)));
      const auto alone = to_element<Element>(values[lane]);
      stores &= alone.bits == stored[lane].bits ||
                (std::isnan(to_float(alone)) && std::isnan(to_float(stored[lane])));
    }
  }
  expect(values_hold, "value of " + name);
  expect(loads, "load " + name);
  expect(stores, "store " + name);
}

// --- scans ---------------------------------------------------------------------------------------

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

/// Returns a pool whose workers run one after the other: only the assignment of tasks matters here.
cpu::ThreadPool pool_of(int threads) {
  return {[](int64_t count, void (*task)(int64_t, int64_t, void*), void* context) {
            for (int64_t i = 0; i < count; ++i) task(i, i + 1, context);
          },
          threads};
}

// --- denormal numbers ----------------------------------------------------------------------------

/// Returns whether this thread's arithmetic treats denormal results and operands as 0.
template <class T>
bool flushes() {
  using Limits = std::numeric_limits<T>;
  volatile T least = Limits::min(), denormal = Limits::denorm_min(), half = T(0.5),
             large = T(1) / Limits::epsilon();
  volatile T result = least * half, scaled = denormal * large;
  const T results[] = {result, scaled}, zeros[] = {0, 0};
  const bool all = std::memcmp(results, zeros, sizeof(zeros)) == 0;
  expect(all == (scaled == 0), "results and operands are flushed alike");
  return all;
}
bool flushes() {
  expect(flushes<float>() == flushes<double>(), "single and double are flushed alike");
  return flushes<float>();
}

/// Tasks flush denormals and leave the mode of their caller unchanged, also after an exception.
void test_mode(const std::string& text) {
  const bool before = flushes();
  const auto stays = [&](const char* what) {
    expect(flushes() == before, "the mode stays: " + text + ", " + what);
  };
  for (const int threads : {1, 3}) {
    const cpu::ThreadPool pool = pool_of(threads);
    bool inside = true;
    cpu::run_tasks(7, threads, pool, [&](int64_t, int64_t) {
      inside &= flushes();
      cpu::run_tasks(2, 1, pool.one_thread(), [](int64_t, int64_t) {});
      inside &= flushes();  // also after a task's own tasks
    });
    stays("run_tasks");
    cpu::parallel_for(pool, 7, [&](int64_t) { inside &= flushes(); });
    stays("parallel_for");
    expect(inside, "tasks flush: " + text);
    try {
      cpu::parallel_for(pool, 7, [](int64_t) { throw std::runtime_error("of a task"); });
      expect(false, "a task's exception passes");
    } catch (const std::runtime_error&) {
      stays("an exception");
    }
  }
}

void test_denormals() {
  expect(!flushes(), "a program begins without flushing");
  test_mode("off");
  const cpu::FlushDenormals flush;
  test_mode("on");
  test_conversions<Half>("float16, flushing");
  test_conversions<BFloat16>("bfloat16, flushing");
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
/// `rounding` bounds the error of sequences. The other results are sums over steps, which may
/// cancel.
template <class Element>
void test_elements(const Problem& problem, const std::string& text, double rounding) {
  KernelRun<float, Element> run(problem);
  const Arrays exact = KernelRun<double, double>(run.rounded_problem()).run(1);
  const Arrays results = run.run(1);
  for (const auto& [name, values] : exact) {
    const double bound = run.sequences.count(name) > 0 ? rounding : 5e-5;
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

  test_elements<float>(problem, text + " in float", 1e-5);
  test_elements<Half>(problem, text + " in half", 1e-3);
  test_elements<BFloat16>(problem, text + " in bfloat16", 8e-3);
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

int run_all(uint64_t seed) {
  std::printf("seed %llu, capability %s, %d floats to a vector\n",
              static_cast<unsigned long long>(seed), cpu::capability(),
              Vec<float, Baseline>::kWidth);
  random_bits.seed(seed);
  test_functions<float>();
  test_functions<double>();
  test_conversions<Half>("float16");
  test_conversions<BFloat16>("bfloat16");
  test_denormals();
  // In the first shape lanes are channels, in the second they are segments of the sequences.
  for (const Shape& shape : {Shape{2, 2, 14, 6, 45}, Shape{2, 2, 4, 5, 301}}) {
    for (int method = 0; method < kNumMethods; ++method) {
      for (const bool is_complex : {false, true}) {
        test_scan(shape, static_cast<Method>(method), is_complex);
      }
    }
  }
  test_denormal_scan();
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace selective_scan

int main(int count, char** arguments) {
  const uint64_t seed =
      count > 1 ? std::strtoull(arguments[1], nullptr, 10) : std::random_device{}();
  return selective_scan::run_all(seed);
}
