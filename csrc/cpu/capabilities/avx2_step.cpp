// A token's step through a stack of layers for x86-64 processors with AVX2 and FMA.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#include "begin_avx2.h"

#include "../step/step.h"

namespace selective_scan::cpu {

template struct StackStep<Vec<float, Avx2>>;
template struct StackStep<Vec<double, Avx2>>;

}  // namespace selective_scan::cpu

#include "end.h"

#endif
