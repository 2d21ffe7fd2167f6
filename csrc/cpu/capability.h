// The kernels of every instruction set, and the choice of a set for this processor.
#pragma once

#include "conv/kernels.h"
#include "diagonal/kernels.h"
#include "matrix/kernels.h"
#include "norm/kernels.h"
#include "selective/kernels.h"
#include "step/kernels.h"
#include "unitary/kernels.h"
#include "update/kernels.h"

namespace selective_scan::cpu {

/// All kernels of one instruction set.
struct Capability {
  const char* name;
  Kernels kernels[2][2];           // is_double, is_complex
  UnitaryKernels unitary[2];       // is_double
  DiagonalKernels diagonal[2][2];  // is_double, is_complex
  ConvKernels conv[2];             // is_double
  NormKernels norm[2];             // is_double
  UpdateKernels update[2][2];      // is_double, is_complex
  const MatrixKernels* matrix[2][2];
  const StepKernels* step[2];  // is_double
};

extern const Capability kDefaultCapability;
extern const Capability kAvx2Capability;
extern const Capability kAvx512Capability;

/// Returns the best capability that the processor supports, or the one that
/// SELECTIVE_SCAN_CPU_CAPABILITY names.
const Capability& chosen_capability();

/// Returns the name of the chosen capability: "default", "avx2" or "avx512".
const char* capability();

}  // namespace selective_scan::cpu
