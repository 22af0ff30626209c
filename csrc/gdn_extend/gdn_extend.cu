// Launches for programs that nvcc builds; the plugin launches the same kernels through the driver.
#include <cuda_runtime.h>

#include "gdn_extend.cuh"

namespace bcg {

template <typename Job>
cudaError_t launch(void (*kernel)(Job), const Job& job, int blocks, int threads, int shared_bytes,
                   cudaStream_t stream) {
    // more than 48 KiB have to be asked for
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<blocks, threads, shared_bytes, stream>>>(job);
    return cudaGetLastError();
}

// `bf16` says what halves are; blocks are as many as the device runs at a time, or fewer
cudaError_t launch(const GdnPrepare& job, bool bf16, int blocks, cudaStream_t stream) {
    const auto kernel = bf16 ? bcg_gdn_prepare_bf16 : bcg_gdn_prepare_f16;
    return launch(kernel, job, blocks, kGroup, kPrepareSharedBytes, stream);
}

cudaError_t launch(const GdnAdvance& job, bool bf16, int blocks, cudaStream_t stream) {
    const auto kernel = bf16 ? bcg_gdn_advance_bf16 : bcg_gdn_advance_f16;
    return launch(kernel, job, blocks, kThreads, kSharedBytes, stream);
}

}  // namespace bcg
