// For x86-64 processors with AVX-512.
#define SELECTIVE_SCAN_AVX512
#include "real_sweeps.h"
