#include "../kit/launch_tools.h"
#include "backward.cuh"

namespace selective_scan::cuda {
namespace {

template <class T>
cudaError_t run(const UnitaryBackwardParams& params, cudaStream_t stream) {
  return unitary::with_team<T>(params, [&](auto lanes, auto states, auto variable) {
    const int64_t blocks = params.batches * unitary::Place<T, lanes>::num_blocks(params);
    constexpr int kBytes = sizeof(unitary::BackwardShared<T, lanes>);
    return launch_kernel(unitary::backward_kernel<T, lanes, states, variable>,
                         {blocks, unitary::kThreads<T>, kBytes}, stream, params);
  });
}

}  // namespace

cudaError_t launch(const UnitaryBackwardParams& params, const ScratchMemory&, cudaStream_t stream) {
  return params.is_double ? run<double>(params, stream) : run<float>(params, stream);
}

}  // namespace selective_scan::cuda
