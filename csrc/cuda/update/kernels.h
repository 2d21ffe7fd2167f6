// The interface of the state update's kernels to their launcher.
#pragma once

#include <cuda_runtime_api.h>

#include "../plan/update.h"

namespace selective_scan::cuda::update {

struct UpdateArgs {
  UpdateParams params;
  UpdatePlan plan;
};

/// The kernel for states of type T. A lane has kPacks packs of kStates states, 16 bytes each.
template <class T, int kStates, int kPacks>
struct Update {
  static cudaError_t launch(const UpdateArgs& args, cudaStream_t stream);
};

/// The arguments of the kernel for UpdatePlan::is_dense. Strides count elements.
template <class Input>
struct DenseArgs {
  void* state;
  const Input *x, *dt, *z;
  Input* out;
  const void* A;
  const Input *B, *C;
  const void *D, *dt_bias;
  IndexArray sources;
  int64_t pad_slot_id;
  int slots;
  uint32_t slot;        // slot stride
  uint32_t row;         // row stride of x, dt and out
  uint32_t z_row;       // row stride of z
  uint32_t projection;  // row stride of B and C
  DType parameters;     // of D and dt_bias
  DType A_dtype;
  bool A_is_log;

  explicit DenseArgs(const UpdateParams& params)
      : state(params.state.data),
        x(static_cast<const Input*>(params.x.data)),
        dt(static_cast<const Input*>(params.dt.data)),
        z(static_cast<const Input*>(params.z.data)),
        out(static_cast<Input*>(params.out.data)),
        A(params.A.data),
        B(static_cast<const Input*>(params.B.data)),
        C(static_cast<const Input*>(params.C.data)),
        D(params.D.data),
        dt_bias(params.dt_bias.data),
        sources(params.sources),
        pad_slot_id(params.pad_slot_id),
        slots(static_cast<int>(params.slots)),
        slot(static_cast<uint32_t>(params.state.batch)),
        row(static_cast<uint32_t>(params.x.batch)),
        z_row(static_cast<uint32_t>(params.z.batch)),
        projection(static_cast<uint32_t>(params.B.batch)),
        parameters(params.D.dtype),
        A_dtype(params.A.dtype),
        A_is_log(params.A_is_log) {}
};

/// The dense kernel for a type of states and a type of inputs.
template <class State, class Input>
struct DenseUpdate {
  static cudaError_t launch(const DenseArgs<Input>&, const LaunchShape&, cudaStream_t);
};

}  // namespace selective_scan::cuda::update
