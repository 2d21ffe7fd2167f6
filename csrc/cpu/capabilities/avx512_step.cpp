// A token's step through a stack of layers for x86-64 processors with AVX-512.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#include "begin_avx512.h"

#include "../step/step.h"

namespace selective_scan::cpu {

template struct StackStep<Vec<float, Avx512>>;
template struct StackStep<Vec<double, Avx512>>;

}  // namespace selective_scan::cpu

#include "end.h"

#endif
