// The interface of the kernels that take a token's step through a stack of layers.
#pragma once

#include <cstdint>

#include "../../core/step_params.h"

namespace selective_scan::cpu {

/// The parts of a layer, between which threads wait for each other, and the part after all layers.
enum class StepPhase : int8_t {
  kInputs,       // norm, in_proj and the convolution; items are channels
  kProjections,  // x_proj; items are its rows
  kScan,         // dt_proj, the states and the gate; items are channels
  kOutputs,      // out_proj and the residual; items are its rows
  kLast,         // the final norm and the head; items are the head's rows or, without a head, those
                 // of hidden
};
constexpr int kStepPhases = 5;
/// The number of phases in a layer.
constexpr int kLayerPhases = 4;

/// Adjacent items of a phase, from a multiple of the vector width on.
struct StepTask {
  StepPhase phase = StepPhase::kInputs;
  int64_t layer = 0;
  int64_t first = 0;
  int64_t count = 0;
};

/// The data that a thread keeps from one of its tasks to the next.
struct StepWorker {
  static constexpr int64_t kNone = -1;

  void* scratch = nullptr;
  int64_t normalized = kNone;  // the layer whose normalized rows are in `scratch`
};

/// The kernels of one compute type. Each output is a separate sum in a fixed order, so it depends
/// neither on the thread that computes it nor on what else that thread computes.
struct StepKernels {
  int64_t lanes;  // of a vector
  /// Return the bytes of the memory that all tasks share, and of each worker's own memory, both
  /// aligned to 64 bytes.
  int64_t (*shared_bytes)(const StepParams& params);
  int64_t (*scratch_bytes)(const StepParams& params);
  /// Called before the first task.
  void (*begin)(const StepParams& params, void* shared);
  void (*run)(const StepParams& params, const StepTask& task, void* shared, StepWorker& worker);
};

/// The kernels for one type of vectors, compiled in separate sources like the selective scan's
/// sweeps.
template <class R>
struct StackStep {
  static const StepKernels kernels;
};

}  // namespace selective_scan::cpu
