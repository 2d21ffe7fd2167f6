// A SIMD vector on top of the compilers' vector extensions, so that one source serves SSE2, AVX2,
// AVX-512 and NEON. A library such as Highway would add a dependency for what these lines do.
//
// A capability is a type (Baseline, Avx2, Avx512) and a template parameter of every vector. Code
// compiled for one instruction set thus has its own template instances, which the linker cannot
// merge with copies compiled for another.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../../core/complex.h"
#include "../../core/config.h"
#include "../../core/dtype.h"

// Lets multiplications and additions fuse across the operators' calls, as gcc does by default.
#if defined(__clang__)
#pragma clang fp contract(fast)
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace selective_scan::cpu {

// The name of an instruction set in SELECTIVE_SCAN_CPU_CAPABILITY, and the bytes of a vector
// register.
struct Baseline {
  static constexpr const char* kName = "default";
  static constexpr int kVectorBytes = 16;
};
struct Avx2 {
  static constexpr const char* kName = "avx2";
  static constexpr int kVectorBytes = 32;
};
struct Avx512 {
  static constexpr const char* kName = "avx512";
  static constexpr int kVectorBytes = 64;
};

/// A native vector of W elements of type E.
template <class E, int W>
struct NativeVector {
  typedef E type __attribute__((vector_size(W * sizeof(E))));
};
template <class E, int W>
using native_t = typename NativeVector<E, W>::type;

/// The signed integer type as wide as T.
template <class T>
using bits_t = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;

template <class T, class Capability>
struct Vec {
  using Scalar = T;
  static constexpr int kBytes = Capability::kVectorBytes;
  static constexpr int kWidth = kBytes / static_cast<int>(sizeof(T));
  using Native = native_t<T, kWidth>;

  Native native;

  Vec() = default;
  SELECTIVE_SCAN_HD explicit Vec(T value) { native = value - Native{}; }

  static SELECTIVE_SCAN_HD Vec from(Native native) {
    Vec result;
    result.native = native;
    return result;
  }
  static SELECTIVE_SCAN_HD Vec load(const T* source) {
    Vec result;
    memcpy(&result.native, source, sizeof(Native));
    return result;
  }
  SELECTIVE_SCAN_HD void store(T* target) const { memcpy(target, &native, sizeof(Native)); }

  SELECTIVE_SCAN_HD T lane(int i) const { return native[i]; }
  SELECTIVE_SCAN_HD void set_lane(int i, T value) { native[i] = value; }
};

/// The result of a comparison, lane by lane.
template <class T, class K>
struct Mask {
  static constexpr int kWidth = Vec<T, K>::kWidth;
  using Native = native_t<bits_t<T>, kWidth>;
  Native native;
};

/// The lanes' bits as integers, for work on exponents.
template <class T, class K>
struct Bits {
  using Native = native_t<bits_t<T>, Vec<T, K>::kWidth>;
  Native native;
};

template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> operator+(Vec<T, K> a, Vec<T, K> b) {
  return Vec<T, K>::from(a.native + b.native);
}
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> operator-(Vec<T, K> a, Vec<T, K> b) {
  return Vec<T, K>::from(a.native - b.native);
}
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> operator-(Vec<T, K> a) {
  return Vec<T, K>::from(-a.native);
}
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> operator*(Vec<T, K> a, Vec<T, K> b) {
  return Vec<T, K>::from(a.native * b.native);
}
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> operator/(Vec<T, K> a, Vec<T, K> b) {
  return Vec<T, K>::from(a.native / b.native);
}
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K>& operator+=(Vec<T, K>& a, Vec<T, K> b) {
  a = a + b;
  return a;
}
template <class T, class K>
SELECTIVE_SCAN_HD Mask<T, K> operator<(Vec<T, K> a, Vec<T, K> b) {
  return {a.native < b.native};
}
template <class T, class K>
SELECTIVE_SCAN_HD Mask<T, K> operator>(Vec<T, K> a, Vec<T, K> b) {
  return {a.native > b.native};
}
template <class T, class K>
SELECTIVE_SCAN_HD Mask<T, K> operator==(Vec<T, K> a, Vec<T, K> b) {
  return {a.native == b.native};
}

template <class T, class K>
SELECTIVE_SCAN_HD Mask<T, K> operator||(Mask<T, K> a, Mask<T, K> b) {
  return {a.native | b.native};
}

template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> select(Mask<T, K> condition, Vec<T, K> a, Vec<T, K> b) {
  return Vec<T, K>::from(condition.native ? a.native : b.native);
}
template <class T, class K>
SELECTIVE_SCAN_HD bool all(Mask<T, K> mask) {
  bits_t<T> common = -1;
  for (int i = 0; i < Mask<T, K>::kWidth; ++i) common &= mask.native[i];
  return common != 0;
}

template <class T, class K>
SELECTIVE_SCAN_HD bool any(Mask<T, K> mask) {
  bits_t<T> some = 0;
  for (int i = 0; i < Mask<T, K>::kWidth; ++i) some |= mask.native[i];
  return some != 0;
}

/// a < b ? a : b. The compilers find no single instruction for this expression, as it is not fmin.
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> lesser(Vec<T, K> a, Vec<T, K> b) {
#if defined(__x86_64__)
  using R = Vec<T, K>;
  constexpr bool kIsDouble = sizeof(T) == 8;
  if constexpr (R::kBytes == 64) {
    if constexpr (kIsDouble) return R::from(_mm512_maskz_min_pd(-1, a.native, b.native));
    if constexpr (!kIsDouble) return R::from(_mm512_maskz_min_ps(-1, a.native, b.native));
  } else if constexpr (R::kBytes == 32) {
    if constexpr (kIsDouble) return R::from(_mm256_min_pd(a.native, b.native));
    if constexpr (!kIsDouble) return R::from(_mm256_min_ps(a.native, b.native));
  } else {
    if constexpr (kIsDouble) return R::from(_mm_min_pd(a.native, b.native));
    if constexpr (!kIsDouble) return R::from(_mm_min_ps(a.native, b.native));
  }
#else
  return select(a < b, a, b);
#endif
}
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> greater(Vec<T, K> a, Vec<T, K> b) {
#if defined(__x86_64__)
  using R = Vec<T, K>;
  constexpr bool kIsDouble = sizeof(T) == 8;
  if constexpr (R::kBytes == 64) {
    if constexpr (kIsDouble) return R::from(_mm512_maskz_max_pd(-1, a.native, b.native));
    if constexpr (!kIsDouble) return R::from(_mm512_maskz_max_ps(-1, a.native, b.native));
  } else if constexpr (R::kBytes == 32) {
    if constexpr (kIsDouble) return R::from(_mm256_max_pd(a.native, b.native));
    if constexpr (!kIsDouble) return R::from(_mm256_max_ps(a.native, b.native));
  } else {
    if constexpr (kIsDouble) return R::from(_mm_max_pd(a.native, b.native));
    if constexpr (!kIsDouble) return R::from(_mm_max_ps(a.native, b.native));
  }
#else
  return select(a > b, a, b);
#endif
}

/// Returns x, or the bound that x exceeds; NaN stays NaN.
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> clamp(Vec<T, K> x, T low, T high) {
  return lesser(Vec<T, K>(high), greater(Vec<T, K>(low), x));
}

template <class T, class K>
SELECTIVE_SCAN_HD Bits<T, K> bits_of(Vec<T, K> x) {
  return {bit_cast<typename Bits<T, K>::Native>(x.native)};
}
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> as_number(Bits<T, K> x) {
  return Vec<T, K>::from(bit_cast<typename Vec<T, K>::Native>(x.native));
}
/// Converts to unsigned integers, whose sums may wrap around, unlike those of signed integers: the
/// bits of NaN and infinity are large.
template <class T, class K>
SELECTIVE_SCAN_HD auto wrapping(Bits<T, K> x) {
  using Unsigned = std::make_unsigned_t<bits_t<T>>;
  return bit_cast<native_t<Unsigned, Vec<T, K>::kWidth>>(x.native);
}
template <class T, class K>
SELECTIVE_SCAN_HD Bits<T, K> operator+(Bits<T, K> a, bits_t<T> b) {
  const auto sum = wrapping(a) + static_cast<std::make_unsigned_t<bits_t<T>>>(b);
  return {bit_cast<typename Bits<T, K>::Native>(sum)};
}
template <class T, class K>
SELECTIVE_SCAN_HD Bits<T, K> operator+(Bits<T, K> a, Bits<T, K> b) {
  return {bit_cast<typename Bits<T, K>::Native>(wrapping(a) + wrapping(b))};
}
template <class T, class K>
SELECTIVE_SCAN_HD Bits<T, K> operator-(Bits<T, K> a, Bits<T, K> b) {
  return {bit_cast<typename Bits<T, K>::Native>(wrapping(a) - wrapping(b))};
}
template <class T, class K>
SELECTIVE_SCAN_HD Bits<T, K> operator&(Bits<T, K> a, bits_t<T> b) {
  return {a.native & b};
}
template <class T, class K>
SELECTIVE_SCAN_HD Bits<T, K> operator|(Bits<T, K> a, bits_t<T> b) {
  return {a.native | b};
}
template <class T, class K>
SELECTIVE_SCAN_HD Bits<T, K> operator^(Bits<T, K> a, Bits<T, K> b) {
  return {a.native ^ b.native};
}
template <class T, class K>
SELECTIVE_SCAN_HD Bits<T, K> operator<<(Bits<T, K> a, int count) {
  return {a.native << count};
}
template <class T, class K>
SELECTIVE_SCAN_HD Bits<T, K> operator>>(Bits<T, K> a, int count) {
  return {a.native >> count};
}

/// |x|
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> magnitude(Vec<T, K> x) {
  return as_number(bits_of(x) & std::numeric_limits<bits_t<T>>::max());
}
/// -|x|
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> negative_magnitude(Vec<T, K> x) {
  return as_number(bits_of(x) | std::numeric_limits<bits_t<T>>::min());
}

/// Returns x, computed before what follows: the compiler does not fuse a multiplication in x with
/// the additions there. If either of two products could fuse, this decides which one does, so that
/// all kernels round alike. On processors with separate adders it is faster, too.
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> kept_apart(Vec<T, K> x) {
#if defined(__x86_64__)
  asm("" : "+v"(x.native));
#elif defined(__aarch64__)
  asm("" : "+w"(x.native));
#endif
  return x;
}
template <class R>
SELECTIVE_SCAN_HD Complex<R> kept_apart(Complex<R> x) {
  return {kept_apart(x.re), kept_apart(x.im)};
}

#if defined(__x86_64__)
/// a·b + c with one rounding, even if the compiler would not fuse the two.
template <class K>
SELECTIVE_SCAN_HD Vec<float, K> fused_multiply_add(Vec<float, K> a, Vec<float, K> b,
                                                   Vec<float, K> c) {
  using R = Vec<float, K>;
  if constexpr (R::kBytes == 64) {
    return R::from(_mm512_fmadd_ps(a.native, b.native, c.native));
  } else {
    return R::from(_mm256_fmadd_ps(a.native, b.native, c.native));
  }
}
#endif

/// Returns 1/x for a normal x whose reciprocal is normal.
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> reciprocal_of_normal(Vec<T, K> x) {
  using R = Vec<T, K>;
#if defined(__x86_64__)
  if constexpr (R::kBytes == 64 && sizeof(T) == 4) {
    // A 14-bit estimate and one step of Newton's method take half the time of a division.
    const R estimate = R::from(_mm512_maskz_rcp14_ps(-1, x.native));
    return estimate + estimate * (R(1.f) - x * estimate);
  }
#endif
  return R(T(1)) / x;
}

/// True if one instruction looks up a table with as many entries as there are lanes.
template <class T, class K>
constexpr bool kLooksUp = false;
#if defined(__x86_64__)
template <>
inline constexpr bool kLooksUp<float, Avx2> = true;
template <>
inline constexpr bool kLooksUp<float, Avx512> = true;

/// Lane i of the result is the 32-bit entry that the low bits of lane i of `index` select.
template <class Entry, class K>
SELECTIVE_SCAN_HD Bits<float, K> look_up(const Entry (&entries)[Vec<float, K>::kWidth],
                                         Bits<float, K> index) {
  using Native = typename Bits<float, K>::Native;
  if constexpr (Vec<float, K>::kBytes == 64) {
    const __m512i table = _mm512_loadu_si512(entries);
    return {bit_cast<Native>(
        _mm512_maskz_permutexvar_epi32(-1, bit_cast<__m512i>(index.native), table))};
  } else {
    const __m256i table = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(entries));
    return {bit_cast<Native>(_mm256_permutevar8x32_epi32(table, bit_cast<__m256i>(index.native)))};
  }
}
#endif

/// True if one instruction spreads 16-bit numbers to the high halves of the lanes.
template <class R>
constexpr bool kSpreadsHalves = false;
template <class R>
R spread_into_high_halves(native_t<uint16_t, R::kWidth> halves);
#if defined(__x86_64__)
template <>
inline constexpr bool kSpreadsHalves<Vec<float, Avx512>> = true;

template <class R>
SELECTIVE_SCAN_HD R spread_into_high_halves(native_t<uint16_t, R::kWidth> halves) {
  constexpr auto kSource = [] {
    struct {
      int16_t of_half[2 * R::kWidth];
    } source{};
    for (int lane = 0; lane < R::kWidth; ++lane) source.of_half[2 * lane + 1] = int16_t(lane);
    return source;
  }();
  constexpr __mmask32 kHighHalves = 0xaaaaaaaau;
  const __m512i all = _mm512_castsi256_si512(bit_cast<__m256i>(halves));
  return R::from(bit_cast<typename R::Native>(
      _mm512_maskz_permutexvar_epi16(kHighHalves, _mm512_loadu_si512(kSource.of_half), all)));
}
#endif

/// True if one instruction converts from binary16.
template <class R>
constexpr bool kWidensHalves = false;
template <class R>
R widen_halves(native_t<uint16_t, R::kWidth> halves);
/// True if one instruction loads a part of a vector of such elements.
template <class R, class Element>
constexpr bool kLoadsParts = false;
template <class R, class Element>
auto load_native_part(const Element* source, int64_t count);
#if defined(__x86_64__)
template <>
inline constexpr bool kWidensHalves<Vec<float, Avx512>> = true;
template <class Element>
constexpr bool kLoadsParts<Vec<float, Avx512>, Element> = sizeof(Element) <= 4;
template <class Element>
constexpr bool kLoadsParts<Vec<float, Avx2>, Element> = sizeof(Element) == 4;

template <class R>
SELECTIVE_SCAN_HD R widen_halves(native_t<uint16_t, R::kWidth> halves) {
  return R::from(_mm512_maskz_cvtph_ps(-1, bit_cast<__m256i>(halves)));
}

/// Loads the first `count` elements as they are in memory, followed by zeros.
template <class R, class Element>
SELECTIVE_SCAN_HD auto load_native_part(const Element* source, int64_t count) {
  if constexpr (R::kBytes == 32) {
    static constexpr int32_t kLanes[2 * R::kWidth] = {-1, -1, -1, -1, -1, -1, -1, -1};
    const int32_t* const mask = kLanes + R::kWidth - count;
    return typename R::Native(
        _mm256_maskload_ps(source, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(mask))));
  } else {
    const auto mask = static_cast<__mmask16>((1u << count) - 1);
    if constexpr (sizeof(Element) == 4) {
      return typename R::Native(_mm512_maskz_loadu_ps(mask, source));
    } else {
      return bit_cast<native_t<uint16_t, R::kWidth>>(_mm256_maskz_loadu_epi16(mask, source));
    }
  }
}
#endif

template <class T, class K>
SELECTIVE_SCAN_HD Mask<T, K> is_set(Bits<T, K> x) {
  return {x.native != 0};
}

/// Returns |x| or, for a complex number, a size that serves comparisons as well.
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> size_of(Vec<T, K> x) {
  return magnitude(x);
}
template <class R>
SELECTIVE_SCAN_HD R size_of(Complex<R> x) {
  return magnitude(x.re) + magnitude(x.im);
}

/// Calls visit.operator()<kCount>(first) for groups of kMost, and then of one, that together cover
/// [0, count).
template <int kMost, class Visit>
SELECTIVE_SCAN_HD void for_each_group(int64_t count, const Visit& visit) {
  int64_t first = 0;
  for (; first + kMost <= count; first += kMost) visit.template operator()<kMost>(first);
  for (; first < count; ++first) visit.template operator()<1>(first);
}

/// The number of vectors in a State: one for real numbers, two for complex ones.
template <class State>
constexpr int kComponents = is_complex_v<State> ? 2 : 1;

/// Loads one number per lane; imaginary parts lie `imaginary` after the real ones.
template <class State>
SELECTIVE_SCAN_HD State load_number(const scalar_t<State>* source, int64_t imaginary) {
  using R = real_t<State>;
  if constexpr (is_complex_v<State>) {
    return {R::load(source), R::load(source + imaginary)};
  } else {
    return R::load(source);
  }
}
/// Loads one number for all lanes.
template <class State>
SELECTIVE_SCAN_HD State spread_number(const scalar_t<State>* source, int64_t imaginary) {
  using R = real_t<State>;
  if constexpr (is_complex_v<State>) {
    return {R(source[0]), R(source[imaginary])};
  } else {
    return R(source[0]);
  }
}
template <class State>
SELECTIVE_SCAN_HD void store_number(State value, scalar_t<State>* target, int64_t imaginary) {
  if constexpr (is_complex_v<State>) {
    value.re.store(target);
    value.im.store(target + imaginary);
  } else {
    value.store(target);
  }
}

}  // namespace selective_scan::cpu

namespace selective_scan {

template <class T, class Capability>
struct ScalarOf<cpu::Vec<T, Capability>> {
  using type = T;
};

}  // namespace selective_scan
