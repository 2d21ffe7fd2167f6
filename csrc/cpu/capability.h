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

/// All kernels of one instruction set that compute in fp32, or in fp64.
struct KernelTable {
  Kernels selective[2];  // is_complex
  UnitaryKernels unitary;
  DiagonalKernels diagonal[2];  // is_complex
  ConvKernels conv;
  NormKernels norm;
  UpdateKernels update[2];         // is_complex
  const MatrixKernels* matrix[2];  // is_complex
  const StepKernels* step;
};

extern const KernelTable kDefaultDoubleKernels;
extern const KernelTable kAvx2DoubleKernels;

struct Capability {
  const char* name;
  const KernelTable* tables[2];  // is_double
};

extern const Capability kDefaultCapability;
extern const Capability kAvx2Capability;
extern const Capability kAvx512Capability;

/// Returns the kernels of the best capability that the processor supports, or of the one that
/// SELECTIVE_SCAN_CPU_CAPABILITY names.
const KernelTable& chosen_kernels(bool is_double);

/// Returns the name of the chosen capability: "default", "avx2" or "avx512".
const char* capability();

}  // namespace selective_scan::cpu
