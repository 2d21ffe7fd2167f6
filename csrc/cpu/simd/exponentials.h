// The building blocks of VectorMath (vector_math.h): constants, and exponentials by argument
// reduction.
//
// The polynomials are minimax fits of
//   exp      ((exp(f) - 1)/f - 1)/f, |f| <= log(2)/2
//   exp2     (2^f - 1)/f, |f| <= 1/2
//   log      (2 atanh(s)/s - 2)/s² in s², with log(1 + f) = 2 atanh(s), s = f/(2 + f)
//   log1p    (t - log(1 + t))/t², 0 <= t <= 1
//   sin      (sin(x)/x - 1)/x² in x², |x| <= π/4
//   cos      (cos(x) - 1 + x²/2)/x⁴ in x², |x| <= π/4
// The constants for argument reduction are split so that their products with the leading parts are
// exact even without fused multiply-add.
#pragma once

#include <limits>

#include "vector.h"

namespace selective_scan::cpu {

template <class T>
struct MathConstants;

template <>
struct MathConstants<float> {
  static constexpr int kMantissaBits = 23;
  static constexpr int kExponentBias = 127;
  static constexpr float kRound =
      0x1.8p23f;  // adding it rounds to an integer, kept in the low bits

  static constexpr float kLn2High = 0x1.62ep-1f;
  static constexpr float kLn2Low = 0x1.0bfbe8p-15f;
  static constexpr float kExpPolynomial[] = {0.5000000027096035302f, 0.16666576646949404091f,
                                             0.041666374138780873595f, 0.0083632350535429253384f,
                                             0.0013941213519610395326f};
  static constexpr float kExpLow = -104.f;  // exp is 0 below and infinite above
  static constexpr float kExpHigh = 89.f;
  static constexpr int32_t kSubnormalShift = 32;  // the mantissa's bits and a few more
  static constexpr float kSubnormalScale = 0x1p-32f;
  static constexpr float kExp2Polynomial[] = {
      0.69314718055994530942f,   0.24022650825470427335f,   0.05550380983528258887f,
      0.0096180617978680603403f, 0.0013381325129943239838f, 0.00015461468325526495305f};

  static constexpr float kLogPolynomial[] = {0.66666685839065502853f, 0.39988487386516276949f,
                                             0.29592458350355689355f};
  static constexpr float kLog1pPolynomial[] = {
      0.49999932760013766f,  -0.3333051127819373f,  0.249585870644267f,
      -0.19695398683885576f, 0.15355390922094583f,  -0.10680546594555543f,
      0.0576643597002322f,   -0.02020454222317087f, 0.0033184636171026765f};

  /// n·kHalfPi[i] is exact for i < 3, and so are the remainders of x after the first kExactParts
  /// parts.
  static constexpr int kExactParts = 2;
  static constexpr float kHalfPi[] = {0x1.92p+0f, 0x1.fb4p-12f, 0x1.444p-24f, 0x1.68c234p-39f};
  static constexpr float kSinPolynomial[] = {-0.16666664655954273308f, 0.0083327466687048269786f,
                                             -0.00019587505521976781684f};
  static constexpr float kCosPolynomial[] = {0.041666664652181885298f, -0.0013888301308017324336f,
                                             0.000024547536061329399187f};
};

template <>
struct MathConstants<double> {
  static constexpr int kMantissaBits = 52;
  static constexpr int kExponentBias = 1023;
  static constexpr double kRound = 0x1.8p52;

  static constexpr double kLn2High = 0x1.62e42fefa2p-1;
  static constexpr double kLn2Low = 0x1.9ef35793c7673p-41;
  static constexpr double kExpPolynomial[] = {0.50000000000000010314,     0.16666666666666674584,
                                              0.041666666666623820631,    0.0083333333333221414468,
                                              0.0013888888917366819232,   0.00019841269886791508943,
                                              0.000024801521058387744166, 2.7557244216139603175e-6,
                                              2.7620201349713796859e-7,   2.511013060099439632e-8};
  static constexpr double kExpLow = -746.;
  static constexpr double kExpHigh = 710.;
  static constexpr int64_t kSubnormalShift = 64;
  static constexpr double kSubnormalScale = 0x1p-64;
  static constexpr double kExp2Polynomial[] = {
      0.69314718055994530942,     0.24022650695910076149,   0.055504108664821606109,
      0.0096181291076186498791,   0.0013333558146410650291, 0.00015403530424813948095,
      0.000015252733838886554288, 1.3215451605345717746e-6, 1.017805762101754121e-7,
      7.0709842384314917973e-9,   4.45581794611090611e-10};

  static constexpr double kLogPolynomial[] = {0.6666666666666669951,  0.39999999999892153762,
                                              0.28571428629230372521, 0.22222210614037096151,
                                              0.18182926419190156827, 0.15330500525603109161,
                                              0.14631340761670104637};

  static constexpr int kExactParts = 1;
  static constexpr double kHalfPi[] = {0x1.921fb544p+0, 0x1.0b4611a4p-34, 0x1.13198a2cp-65,
                                       0x1.01b839a25204ap-96};
  static constexpr double kSinPolynomial[] = {
      -0.16666666666666664601,  0.0083333333333309264585,  -0.00019841269836724874377,
      2.7557316084930620411e-6, -2.5051128150263107358e-8, 1.5917861883425869298e-10};
  static constexpr double kCosPolynomial[] = {
      0.041666666666666665375,   -0.0013888888888887383325, 0.000024801587298744434472,
      -2.7557317260628159693e-7, 2.0876143942645769045e-9,  -1.138246420488501465e-11};
};

constexpr double kTwoOverPi = 0.63661977236758134308;

/// Returns Σ coefficients[i]·x^i.
template <class R, class T, int kTerms>
SELECTIVE_SCAN_HD R polynomial(R x, const T (&coefficients)[kTerms]) {
  R sum(coefficients[kTerms - 1]);
  for (int i = kTerms - 2; i >= 0; --i) sum = R(coefficients[i]) + x * sum;
  return sum;
}

/// x = n·log(2) + f with |f| <= log(2)/2. growth = exp(f) - 1.
template <class T, class K>
struct ReducedExp {
  using R = Vec<T, K>;
  using Constants = MathConstants<T>;

  R growth;
  Bits<T, K> biased;  // the low bits are n + kExponentBias

  SELECTIVE_SCAN_HD explicit ReducedExp(R x) {
    const R round(Constants::kRound + Constants::kExponentBias);
    const R rounded = round + R(static_cast<T>(kLog2e)) * x;
    const R n = rounded - round;
    const R f = (x - n * R(Constants::kLn2High)) - n * R(Constants::kLn2Low);
    growth = f + (f * f) * polynomial(f, Constants::kExpPolynomial);
    biased = bits_of(rounded);
  }

  /// Returns n + kExponentBias as a plain integer.
  SELECTIVE_SCAN_HD Bits<T, K> biased_exponent() const {
    return biased - bits_of(R(Constants::kRound));
  }
};

/// exp(x) and exp(x) - 1, the latter without cancellation near 0.
template <class State>
struct ExpAndGrowth {
  State exp;
  State growth;
};

/// y = n + f with |f| <= 1/2; 2^f = 1 + f·slope. In fp32 2^n is infinite from 128 on and 0 from
/// -127 down. If kIsBounded, y is known to lie between these two, which saves the clamps. The
/// clamps follow the computation of y, so that y is rounded, or fused, alike with and without them.
template <class T, class K, bool kIsBounded>
struct ReducedExp2 {
  using R = Vec<T, K>;
  using Constants = MathConstants<T>;

  R n;
  R f;
  R slope;
  R power;  // 2^n

  SELECTIVE_SCAN_HD explicit ReducedExp2(R y) {
    constexpr int kBias = Constants::kExponentBias;
    const R round(Constants::kRound + kBias);
    R rounded = y + round;
    if constexpr (!kIsBounded) {
      rounded = clamp(rounded, Constants::kRound, Constants::kRound + (2 * kBias + 1));
    }
    n = rounded - round;
    f = y - n;
    if constexpr (!kIsBounded) f = clamp(f, T(-1), T(1));
    slope = polynomial(f, Constants::kExp2Polynomial);
    power = as_number(bits_of(rounded) << Constants::kMantissaBits);
  }

  SELECTIVE_SCAN_HD R value() const { return (R(1) + f * slope) * power; }
  /// Returns 2^y and 2^y - 1.
  SELECTIVE_SCAN_HD ExpAndGrowth<R> exp_and_growth() const {
    const R part = kept_apart((f * power) * slope);
    const ExpAndGrowth<R> result{part + power, part + (power - R(1))};
    if constexpr (kIsBounded) return result;
    const auto is_infinite = n > R(Constants::kExponentBias);
    return {select(is_infinite, power, result.exp), select(is_infinite, power, result.growth)};
  }
};

/// Tables for 2^(i/kEntries), and polynomials for |f| <= 1/(2·kEntries). kBits: the bits of the
/// power, less i at the place where PowerByTable adds it. kLacking: the correction of the logarithm
/// for the rounding of the power. kPolynomial and kGrowthPolynomial: (2^f - 1)/f, as exactly as 2^f
/// and 2^f - 1, respectively, need it.
template <int kEntries>
struct Exp2Table;
template <>
struct Exp2Table<8> {
  static constexpr int32_t kBits[] = {0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                                      0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};
  static constexpr float kLacking[] = {0.f,        -1.7301e-8f, 4.6071e-8f,  -4.471e-8f,
                                       2.4691e-8f, 7.5501e-9f,  -2.1236e-8f, -8.8412e-9f};
  static constexpr float kPolynomial[] = {0.69314717213215430565f, 0.2402576333531912231f,
                                          0.055511474832634743733f};
  static constexpr float kGrowthPolynomial[] = {0.69314717800718272f, 0.24022650843390019f,
                                                0.055509327225469096f, 0.0096181290862956819f};
};
template <>
struct Exp2Table<16> {
  static constexpr int32_t kBits[] = {0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3,
                                      0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
                                      0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c,
                                      0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};
  static constexpr float kLacking[] = {0.f,         6.6776e-8f,  -1.7301e-8f, 6.8236e-8f,
                                       4.6071e-8f,  5.2241e-8f,  -4.471e-8f,  -1.0784e-8f,
                                       2.4691e-8f,  -4.3969e-8f, 7.5501e-9f,  8.8114e-9f,
                                       -2.1236e-8f, -7.5868e-9f, -8.8412e-9f, 7.4163e-9f};
  static constexpr float kPolynomial[] = {0.69314718003327698022f, 0.2402342882371435169f,
                                          0.055505950091402383938f};
  static constexpr float kGrowthPolynomial[] = {0.69314718040038075f, 0.24022650705127654f,
                                                0.055505413312140018f, 0.0096181291026569277f};
};

/// 2^y by a table in one register, with W entries for W lanes: y = n + f, n a multiple of 1/W. It
/// takes a third less work than ReducedExp2 and, more importantly, a chain of dependent operations
/// half as long.
template <class K>
struct PowerByTable {
  using R = Vec<float, K>;
  using Table = Exp2Table<R::kWidth>;

  R n;
  R f;
  R power;  // 2^n
  Bits<float, K> low;

  PowerByTable() = default;
  SELECTIVE_SCAN_HD explicit PowerByTable(R y) {
    // Keeping y apart costs a multiplication, but two of the three sums can use separate adders.
    // Also, y is rounded once, alike with and without within_range, whatever the compiler would
    // fuse.
    y = kept_apart(y);
    take(y + R(kRound));
    f = y - n;
  }
  /// Represents exp(x)·2^kShift, with y = log2(e)·x as if it were not rounded.
  template <int kShift = 0>
  static SELECTIVE_SCAN_HD PowerByTable of_exp(R x) {
    PowerByTable result;
    const R log2e{float(kLog2e)};
    result.template take<kShift>(x * log2e + R(kRound));
    result.f =
        fused_multiply_add(x, log2e, -result.n) + x * R(float(kLog2e - double(float(kLog2e))));
    return result;
  }

  SELECTIVE_SCAN_HD R value() const {
    return power + (power * f) * polynomial(f, Table::kPolynomial);
  }
  /// Returns 2^y and 2^y - 1. For n = 0 nothing cancels in 2^y - 1; for other n the rounding error
  /// of the power would show without the correction.
  SELECTIVE_SCAN_HD ExpAndGrowth<R> exp_and_growth() const {
    const R exact = f + as_number(look_up(Table::kLacking, low));
    const R part = kept_apart((power * exact) * polynomial(exact, Table::kGrowthPolynomial));
    return {part + power, part + (power - R(1.f))};
  }
  /// Returns `result`, but `below` for n < -126 and infinity from n = 128 up.
  SELECTIVE_SCAN_HD R within_range(R result, float below) const {
    const R beyond = select(n < R(0.f), R(below), R(std::numeric_limits<float>::infinity()));
    return select(n < R(-126.f) || n > R(127.95f), beyond, result);
  }

 private:
  static constexpr float kRound = MathConstants<float>::kRound / R::kWidth;

  template <int kShift = 0>
  SELECTIVE_SCAN_HD void take(R rounded) {
    constexpr int kEntriesLog2 = R::kWidth == 8 ? 3 : 4;
    constexpr int kMantissaBits = MathConstants<float>::kMantissaBits;
    static_assert(R::kWidth == 1 << kEntriesLog2);
    n = rounded - R(kRound);
    // The low bits of n·W select the entry, the others are the exponent.
    low = bits_of(rounded);
    Bits<float, K> bits = look_up(Table::kBits, low) + (low << (kMantissaBits - kEntriesLog2));
    if constexpr (kShift != 0) bits = bits + (kShift << kMantissaBits);
    power = as_number(bits);
  }
};

}  // namespace selective_scan::cpu
