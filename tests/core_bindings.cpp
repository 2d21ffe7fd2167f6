// Exposes the scalar core of csrc/core to the test suite, elementwise over arrays. Each function
// exists for float and double, real and complex, selected by the dtype of its arrays.

#include <pybind11/complex.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <complex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "core/config.h"
#include "core/discretization.h"
#include "core/dtype.h"
#include "core/math.h"

namespace py = pybind11;

namespace selective_scan {
namespace {

// The element type of a numpy array of T.
template <class T>
struct Numpy {
  using type = T;
};
template <class R>
struct Numpy<Complex<R>> {
  using type = std::complex<R>;
};
template <class T>
using numpy_t = typename Numpy<T>::type;
template <class T>
using Array = py::array_t<numpy_t<T>, py::array::c_style>;

template <class T>
T from_numpy(numpy_t<T> value) {
  if constexpr (is_complex_v<T>) {
    return {value.real(), value.imag()};
  } else {
    return value;
  }
}

template <class T>
numpy_t<T> to_numpy(T value) {
  if constexpr (is_complex_v<T>) {
    return {value.re, value.im};
  } else {
    return value;
  }
}

/// Returns function(x) for every entry.
template <class T, class Result, class Function>
Array<Result> map(const Array<T>& x, const Function& function) {
  Array<Result> result(x.size());
  for (py::ssize_t i = 0; i < x.size(); ++i) {
    result.mutable_data()[i] = to_numpy<Result>(function(from_numpy<T>(x.data()[i])));
  }
  return result;
}

Method parse_method(const std::string& name) {
  for (int i = 0; i < kNumMethods; ++i) {
    if (name == kMethodNames[i]) return static_cast<Method>(i);
  }
  throw std::invalid_argument(name);
}

/// Calls visit with the method and, as a template argument, with the method whose formula it uses:
/// "series:poly" is poly by the formula that takes its coefficients at run time.
template <class Visit>
void with_method(const std::string& name, const Visit& visit) {
  const std::string prefix = "series:";
  if (name.starts_with(prefix)) {
    return visit.template operator()<Method::kSeries>(parse_method(name.substr(prefix.size())));
  }
  const Method method = parse_method(name);
  [&]<int... kMethods>(std::integer_sequence<int, kMethods...>) {
    ((static_cast<int>(method) == kMethods
          ? visit.template operator()<static_cast<Method>(kMethods)>(method)
          : void()),
     ...);
  }(std::make_integer_sequence<int, kNumMethods>());
}

template <class T>
std::pair<Array<T>, Array<T>> coefficients(const std::string& name, const Array<real_t<T>>& delta,
                                           const Array<T>& A) {
  Array<T> abar(A.size()), bbar(A.size());
  with_method(name, [&]<Method kMethod>(Method method) {
    for (py::ssize_t i = 0; i < A.size(); ++i) {
      const auto pole = make_pole<StandardMath>(from_numpy<T>(A.data()[i]), method);
      const auto value = Formula<kMethod>::template value<StandardMath>(delta.data()[i], pole);
      abar.mutable_data()[i] = to_numpy<T>(value.abar);
      bbar.mutable_data()[i] = to_numpy<T>(value.bbar);
    }
  });
  return {abar, bbar};
}

template <class T>
std::tuple<Array<T>, Array<T>, Array<T>, Array<T>> derivatives(const std::string& name,
                                                               const Array<real_t<T>>& delta,
                                                               const Array<T>& A) {
  std::tuple result{Array<T>(A.size()), Array<T>(A.size()), Array<T>(A.size()), Array<T>(A.size())};
  auto& [abar_delta, abar_A, bbar_delta, bbar_A] = result;
  with_method(name, [&]<Method kMethod>(Method method) {
    using F = Formula<kMethod>;
    for (py::ssize_t i = 0; i < A.size(); ++i) {
      const auto pole = make_pole<StandardMath>(from_numpy<T>(A.data()[i]), method);
      const auto step = delta.data()[i];
      const auto value = F::template value<StandardMath>(step, pole);
      const auto d = F::template derivatives<StandardMath>(step, pole, value);
      abar_delta.mutable_data()[i] = to_numpy<T>(d.abar_delta);
      abar_A.mutable_data()[i] = to_numpy<T>(d.abar_A);
      bbar_delta.mutable_data()[i] = to_numpy<T>(d.bbar_delta);
      bbar_A.mutable_data()[i] = to_numpy<T>(d.bbar_A);
    }
  });
  return result;
}

template <class T>
std::pair<Array<real_t<T>>, Array<T>> step_gradient(const std::string& name,
                                                    const Array<real_t<T>>& delta,
                                                    const Array<T>& A, const Array<T>& dabar,
                                                    const Array<T>& dbbar) {
  Array<real_t<T>> ddelta(A.size());
  Array<T> dA(A.size());
  with_method(name, [&]<Method kMethod>(Method method) {
    for (py::ssize_t i = 0; i < A.size(); ++i) {
      const auto pole = make_pole<StandardMath>(from_numpy<T>(A.data()[i]), method);
      const auto step = delta.data()[i];
      const auto value = Formula<kMethod>::template value<StandardMath>(step, pole);
      const auto gradient = backpropagate<kMethod, StandardMath>(
          step, pole, value, from_numpy<T>(dabar.data()[i]), from_numpy<T>(dbbar.data()[i]));
      ddelta.mutable_data()[i] = gradient.delta;
      dA.mutable_data()[i] = to_numpy<T>(gradient.A);
    }
  });
  return {ddelta, dA};
}

/// A policy with the members that the formulas require for scans that prepare their poles.
struct PreparedMath : StandardMath {
  template <class T>
  struct ExactHoldStep {
    T abar;
    T phi1;
  };

  template <class T>
  static T rate(T A) {
    return A;
  }
  template <class T>
  static T exp_at(real_t<T> delta, T rate) {
    return exp(delta * rate);
  }
  template <class T>
  static T exact_hold_constants(T A) {
    return A;
  }
  template <class T>
  static ExactHoldStep<T> exact_hold_step(real_t<T> delta, T A) {
    const T x = delta * A;
    return {exp(x),
            norm(x) == 0 ? one<T>() : selective_scan::expm1<StandardMath>(x) * reciprocal(x)};
  }
};

/// A policy with the members that ExactIncrements requires.
struct IncrementMath : StandardMath {
  template <class T>
  struct Constants {
    T A;
    T inverse;
  };

  /// Replaces a pole of 0 by one small enough to act as 0.
  template <class T>
  static Constants<T> exact_hold_constants(T A) {
    if (norm(A) == 0) A = constant<T>(1e-30) * one<T>();
    return {A, reciprocal(A)};
  }
  template <class T>
  static Growth<T> growth(real_t<T> delta, const Constants<T>& constants) {
    const T x = delta * constants.A;
    return {exp(x), selective_scan::expm1<StandardMath>(x), norm(x) < 0.01};
  }
};

/// Formula F reduced to its value and derivatives; every other form is the derived one.
template <class F>
struct Derived : StepForms<Derived<F>> {
  static constexpr bool kAbarIsExponential = F::kAbarIsExponential;
  static constexpr bool kBbarDependsOnA = F::kBbarDependsOnA;

  template <class Math, class T>
  static Hold<T> hold(real_t<T> delta, const Pole<T>& pole) {
    if constexpr (requires { F::template hold<Math>(delta, pole); }) {
      return F::template hold<Math>(delta, pole);
    } else {
      const auto value = PreparedMath::exact_hold_step(delta, pole.A);
      return {value.abar, value.phi1};
    }
  }
  template <class Math, class T>
  static Slopes<T> slopes(real_t<T> delta, const Pole<T>& pole, const Hold<T>& hold) {
    return F::template slopes<Math>(delta, pole, hold);
  }
};

template <class T, class Input>
T advance(const Step<T, Input>& step, T h, T B) {
  return step.abar * h + step.input * B;
}
template <class T>
T advance(const TustinStep<T>& step, T h, T B) {
  return step.advance(h, B);
}

template <class T>
py::dict results_of(const Array<T>& stepped, const Array<T>& advanced, const Array<T>& dh,
                    const Array<T>& dB, const Array<T>& dA, const Array<real_t<T>>& ddelta,
                    const Array<real_t<T>>& du) {
  py::dict result;
  result["stepped"] = stepped;
  result["advanced"] = advanced;
  result["h"] = dh;
  result["B"] = dB;
  result["A"] = dA;
  result["delta"] = ddelta;
  result["u"] = du;
  return result;
}

/// Takes a step from h with the input u·B, by F's step() and by its advance(), and computes from g,
/// the gradient of the state after it, the gradients of h, B, Δ, A and u.
template <class F, class T>
py::dict take_step(const Array<real_t<T>>& delta, const Array<real_t<T>>& u, const Array<T>& A,
                   const Array<T>& B, const Array<T>& h, const Array<T>& g, Method method) {
  using R = real_t<T>;
  const py::ssize_t count = A.size();
  Array<T> stepped(count), advanced(count), dh(count), dB(count), dA(count);
  Array<R> ddelta(count), du(count);
  for (py::ssize_t i = 0; i < count; ++i) {
    const R step_size = delta.data()[i], input = step_size * u.data()[i];
    const T pole = from_numpy<T>(A.data()[i]), b = from_numpy<T>(B.data()[i]);
    const T before = from_numpy<T>(h.data()[i]), gradient = from_numpy<T>(g.data()[i]);
    const auto constants = F::template constants<PreparedMath>(pole, series_of<R>(method));
    const T after =
        advance(F::template step<PreparedMath, T>(step_size, input, constants), before, b);
    stepped.mutable_data()[i] = to_numpy<T>(after);
    auto kept =
        F::template keep<PreparedMath, T>(step_size, constant<T>(F::kPoleScale) * pole, constants);
    advanced.mutable_data()[i] =
        to_numpy<T>(F::advance(kept, constant<T>(F::kInputScale) * input, before, b));
    const StepGradient<T> back =
        F::template step_back<PreparedMath, T>(input, kept, before, after, b, gradient);
    const T w = constant<T>(F::kInputScale) * back.input, x = constant<T>(F::kXScale) * back.x;
    const R through_input = real_of_product_conj(w, b);
    dh.mutable_data()[i] = to_numpy<T>(back.state);
    dB.mutable_data()[i] = to_numpy<T>(input * w);
    dA.mutable_data()[i] = to_numpy<T>(step_size * x);
    ddelta.mutable_data()[i] = real_of_product_conj(x, pole) + u.data()[i] * through_input;
    du.mutable_data()[i] = step_size * through_input;
  }
  return results_of<T>(stepped, advanced, dh, dB, dA, ddelta, du);
}

/// Takes the same step by ExactIncrements.
template <class T>
py::dict take_increments(const Array<real_t<T>>& delta, const Array<real_t<T>>& u,
                         const Array<T>& A, const Array<T>& B, const Array<T>& h,
                         const Array<T>& g) {
  using R = real_t<T>;
  const py::ssize_t count = A.size();
  Array<T> stepped(count), advanced(count), dh(count), dB(count), dA(count);
  Array<R> ddelta(count), du(count);
  for (py::ssize_t i = 0; i < count; ++i) {
    const R step_size = delta.data()[i], input = u.data()[i];
    const T b = from_numpy<T>(B.data()[i]), gradient = from_numpy<T>(g.data()[i]);
    const auto constants = IncrementMath::exact_hold_constants(from_numpy<T>(A.data()[i]));
    const T before = constants.A * from_numpy<T>(h.data()[i]);
    const auto step = ExactIncrements::step<IncrementMath, T>(step_size, input, constants);
    stepped.mutable_data()[i] = to_numpy<T>(constants.inverse * step.advance(before, b));
    ExactIncrements::StepCache<T> kept;
    const T after =
        ExactIncrements::advance<IncrementMath, T>(step_size, input, constants, before, b, kept);
    advanced.mutable_data()[i] = to_numpy<T>(constants.inverse * after);
    const auto back = ExactIncrements::step_back(kept, before, input * b, gradient);
    dh.mutable_data()[i] = to_numpy<T>(back.state);
    dB.mutable_data()[i] = to_numpy<T>(input * back.input);
    const T of_A = ExactIncrements::gradient_of_A(step_size, constants.A, kept, before, input * b,
                                                  gradient, back.state);
    dA.mutable_data()[i] = to_numpy<T>(of_A * conj(constants.inverse));
    ddelta.mutable_data()[i] = real(back.x);
    du.mutable_data()[i] = real_of_product_conj(back.input, b);
  }
  return results_of<T>(stepped, advanced, dh, dB, dA, ddelta, du);
}

/// Takes a step by a formula's own forms ("own"), by those derived for it ("derived"; a formula
/// that takes coefficients has none), or by ExactIncrements ("increments").
template <class T>
py::dict step_forms(const std::string& name, const std::string& forms,
                    const Array<real_t<T>>& delta, const Array<real_t<T>>& u, const Array<T>& A,
                    const Array<T>& B, const Array<T>& h, const Array<T>& g) {
  if (forms == "increments") return take_increments<T>(delta, u, A, B, h, g);
  py::dict result;
  with_method(name, [&]<Method kMethod>(Method method) {
    if constexpr (kMethod != Method::kSeries) {
      if (forms == "derived") {
        result = take_step<Derived<Formula<kMethod>>, T>(delta, u, A, B, h, g, method);
        return;
      }
    }
    result = take_step<Formula<kMethod>, T>(delta, u, A, B, h, g, method);
  });
  return result;
}

/// Defines the functions of real and complex numbers.
template <class T>
void define_common(py::module_& m) {
  const auto x = py::arg("x").noconvert();
  const auto delta = py::arg("delta").noconvert();
  const auto A = py::arg("A").noconvert();
  m.def(
      "phi1_logarithmic_derivative",
      [](const Array<T>& x) {
        return map<T, T>(x, [](T v) { return phi1_logarithmic_derivative(v, norm(v)); });
      },
      x);
  m.def("coefficients", &coefficients<T>, py::arg("method"), delta, A);
  m.def("derivatives", &derivatives<T>, py::arg("method"), delta, A);
  m.def("step_gradient", &step_gradient<T>, py::arg("method"), delta, A,
        py::arg("dabar").noconvert(), py::arg("dbbar").noconvert());
  m.def("step_forms", &step_forms<T>, py::arg("method"), py::arg("forms"), delta,
        py::arg("u").noconvert(), A, py::arg("B").noconvert(), py::arg("h").noconvert(),
        py::arg("g").noconvert());
}

/// Defines the functions of real numbers only.
template <class R>
void define_real(py::module_& m) {
  const auto x = py::arg("x").noconvert();
  m.def("softplus", [](const Array<R>& x) { return map<R, R>(x, softplus<StandardMath, R>); }, x);
  m.def("silu", [](const Array<R>& x) { return map<R, R>(x, silu<StandardMath, R>); }, x);
  m.def(
      "silu_derivative",
      [](const Array<R>& x) {
        return map<R, R>(x, [](R v) { return silu_derivative(v, sigmoid<StandardMath>(v)); });
      },
      x);
}

template <class Stored>
Stored narrow(float value) {
  if constexpr (std::is_same_v<Stored, Half>) {
    return to_half(value);
  } else {
    return to_bfloat16(value);
  }
}

template <class Stored>
void define_conversions(py::module_& m, const std::string& name) {
  m.def(("float_from_" + name).c_str(), [](const Array<uint16_t>& bits) {
    return map<uint16_t, float>(bits, [](uint16_t value) { return to_float(Stored{value}); });
  });
  m.def(("float_to_" + name).c_str(), [](const Array<float>& values) {
    return map<float, uint16_t>(values, [](float value) { return narrow<Stored>(value).bits; });
  });
}

}  // namespace
}  // namespace selective_scan

PYBIND11_MODULE(core_bindings, m) {
  using namespace selective_scan;
  define_common<float>(m);
  define_common<double>(m);
  define_common<Complex<float>>(m);
  define_common<Complex<double>>(m);
  define_real<float>(m);
  define_real<double>(m);
  define_conversions<Half>(m, "half");
  define_conversions<BFloat16>(m, "bfloat16");
  m.def("method_names",
        [] { return std::vector<std::string>(std::begin(kMethodNames), std::end(kMethodNames)); });
  m.def("num_saved_states", [](int64_t seqlen) { return num_saved_states(seqlen); });
  m.attr("state_chunk") = kStateChunk;
  m.attr("softplus_threshold") = kSoftplusThreshold;
}
