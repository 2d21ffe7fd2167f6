// From here to end.h the code is for x86-64 processors with AVX2 and FMA.
#include "../simd/standard_headers.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
