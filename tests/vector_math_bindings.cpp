// Exposes the vector functions of csrc/cpu to the test suite, over arrays of floats or doubles. It
// is compiled once per instruction set: CAPABILITY names its type, and the compiler's flags enable
// it.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

#include "core/math.h"
#include "cpu/simd/vector.h"
#include "cpu/simd/vector_math.h"

namespace py = pybind11;

namespace selective_scan::cpu {
namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

/// Returns function(x) for every entry, computed a vector at a time.
template <class T, class Function>
Array<T> map(const Array<T>& x, const Function& function) {
  using R = Vec<T, CAPABILITY>;
  Array<T> result(x.size());
  T lanes[R::kWidth];
  for (py::ssize_t first = 0; first < x.size(); first += R::kWidth) {
    for (int i = 0; i < R::kWidth; ++i)
      lanes[i] = first + i < x.size() ? x.data()[first + i] : T(0);
    function(R::load(lanes)).store(lanes);
    for (int i = 0; i < R::kWidth && first + i < x.size(); ++i) {
      result.mutable_data()[first + i] = lanes[i];
    }
  }
  return result;
}

template <class T>
void define(py::module_& m) {
  using R = Vec<T, CAPABILITY>;
  m.def("exp", [](const Array<T>& x) { return map(x, [](R v) { return VectorMath::exp(v); }); });
  m.def("sin", [](const Array<T>& x) {
    return map(x, [](R v) {
      R sine, cosine;
      VectorMath::sincos(v, sine, cosine);
      return sine;
    });
  });
  m.def("cos", [](const Array<T>& x) {
    return map(x, [](R v) {
      R sine, cosine;
      VectorMath::sincos(v, sine, cosine);
      return cosine;
    });
  });
  m.def("softplus",
        [](const Array<T>& x) { return map(x, [](R v) { return VectorMath::softplus(v); }); });
  m.def("sigmoid",
        [](const Array<T>& x) { return map(x, [](R v) { return VectorMath::sigmoid(v); }); });
  m.def("exp_of", [](const Array<T>& x) {
    return map(x, [](R v) { return VectorMath::exp_of(VectorMath::exponent(v)); });
  });
  m.def("exp_beside_growth", [](const Array<T>& x) {
    return map(x, [](R v) { return VectorMath::exp_and_growth(VectorMath::exponent(v)).exp; });
  });
  m.def("growth", [](const Array<T>& x) {
    return map(x, [](R v) { return VectorMath::exp_and_growth(VectorMath::exponent(v)).growth; });
  });
}

}  // namespace
}  // namespace selective_scan::cpu

PYBIND11_MODULE(vector_math_bindings, m) {
  selective_scan::cpu::define<float>(m);
  selective_scan::cpu::define<double>(m);
}
