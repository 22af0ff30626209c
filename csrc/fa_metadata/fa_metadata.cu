// Launches for programs that nvcc builds; the plugin launches the same kernels through the driver.
#include <cuda_runtime.h>

#include "fa_metadata.cuh"

namespace bcg {

cudaError_t launch(const FaMetadata& job, int blocks, cudaStream_t stream) {
    bcg_fa_metadata<<<blocks, kThreads, 0, stream>>>(job);
    return cudaGetLastError();
}

cudaError_t launch(const LocalAttention& job, int blocks, cudaStream_t stream) {
    bcg_local_attention<<<blocks, kThreads, 0, stream>>>(job);
    return cudaGetLastError();
}

cudaError_t launch(const DraftExpand& job, int blocks, cudaStream_t stream) {
    bcg_draft_expand<<<blocks, kThreads, 0, stream>>>(job);
    return cudaGetLastError();
}

cudaError_t launch(const VerifyExpand& job, int blocks, cudaStream_t stream) {
    bcg_verify_expand<<<blocks, kVerifyThreads, 0, stream>>>(job);
    return cudaGetLastError();
}

}  // namespace bcg
