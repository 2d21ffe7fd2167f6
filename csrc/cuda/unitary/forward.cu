#include "forward.cuh"

namespace selective_scan::cuda {
namespace {

template <class T>
cudaError_t run(const UnitaryForwardParams& params, cudaStream_t stream) {
  return unitary::with_team<T>(params, [&](auto lanes, auto states, auto variable) {
    const int64_t blocks = params.batches * unitary::Place<T, lanes>::num_blocks(params);
    unitary::forward_kernel<T, lanes, states, variable>
        <<<blocks, unitary::kThreads<T>, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t launch(const UnitaryForwardParams& params, const ScratchMemory&, cudaStream_t stream) {
  return params.is_double ? run<double>(params, stream) : run<float>(params, stream);
}

}  // namespace selective_scan::cuda
