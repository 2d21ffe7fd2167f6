// What the kernels of a token's step through a stack of layers are called by.
#pragma once

#include <cstdint>

#include "../../core/step_params.h"

namespace selective_scan::cpu {

/// The parts of a layer between which threads wait for each other, and what follows the last layer.
enum class StepPhase : int8_t {
  kInputs,       // norm, in_proj and the convolution; items are channels
  kProjections,  // x_proj; items are its rows
  kScan,         // dt_proj, the states and the gate; items are channels
  kOutputs,      // out_proj and the residual; items are its rows
  kLast,         // the final norm, and the head; items are its rows, or those of hidden without one
};
constexpr int kStepPhases = 5;
/// A layer has so many phases.
constexpr int kLayerPhases = 4;

/// Some items of a phase. They lie next to each other, and begin with a whole vector of items.
struct StepTask {
  StepPhase phase = StepPhase::kInputs;
  int64_t layer = 0;
  int64_t first = 0;
  int64_t count = 0;
};

/// What a thread keeps from one of its tasks to the next.
struct StepWorker {
  static constexpr int64_t kNone = -1;

  void* scratch = nullptr;
  int64_t normalized = kNone;  // the layer whose normalized rows lie in `scratch`
};

/// The kernels of one compute type. Each output is a sum of its own, in an order of its own: so it
/// does not matter who computes it, nor what else it computes.
struct StepKernels {
  int64_t lanes;  // of a vector
  /// Memory that all tasks share, and that a worker has for itself, aligned to 64 bytes.
  int64_t (*shared_bytes)(const StepParams& params);
  int64_t (*scratch_bytes)(const StepParams& params);
  /// Before the first task.
  void (*begin)(const StepParams& params, void* shared);
  void (*run)(const StepParams& params, const StepTask& task, void* shared, StepWorker& worker);
};

/// These are for one type of vectors. They are compiled apart, as the selective scan's sweeps are.
template <class R>
struct StackStep {
  static const StepKernels kernels;
};

}  // namespace selective_scan::cpu
