// From here to end.h the code is for x86-64 processors with AVX-512.
#include "../simd/standard_headers.h"

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,avx512f,avx512dq,avx512bw,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512dq,avx512bw,avx512vl")
#endif
