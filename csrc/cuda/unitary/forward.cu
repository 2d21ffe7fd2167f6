#include "forward.cuh"

#include "../kit/launch_tools.h"

namespace selective_scan::cuda {
namespace {

template <class T>
cudaError_t run(const UnitaryForwardParams& params, cudaStream_t stream) {
  return unitary::with_team<T>(params, [&](auto lanes, auto states, auto variable) {
    const int64_t blocks = params.batches * unitary::Place<T, lanes>::num_blocks(params);
    return launch_kernel(unitary::forward_kernel<T, lanes, states, variable>,
                         {blocks, unitary::kThreads<T>}, stream, params);
  });
}

}  // namespace

cudaError_t launch(const UnitaryForwardParams& params, const ScratchMemory&, cudaStream_t stream) {
  return params.is_double ? run<double>(params, stream) : run<float>(params, stream);
}

}  // namespace selective_scan::cuda
