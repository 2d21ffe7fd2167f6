// For x86-64 processors with AVX2 and FMA.
#define SELECTIVE_SCAN_AVX2
#include "real_sweeps.h"
