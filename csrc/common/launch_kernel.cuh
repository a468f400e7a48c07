// A kernel on a stream, in clusters of CTAs.
#pragma once

#include <cuda_runtime.h>

namespace flashmhf {
namespace {

// The most that any launch of the kernel asks for, always the same: other threads may be about to launch it, too.
template <typename Kernel> cudaError_t allow_shared_memory(Kernel kernel, size_t bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

// Clusters of more than 8 CTAs are for chips that have room for them.
template <typename Kernel> cudaError_t allow_cluster(Kernel kernel, int size) {
    return size <= 8 ? cudaSuccess : cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

inline cudaLaunchAttribute clusters_of(int size) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
    return attribute;
}

// early: the kernel may start while the one before it in the stream still runs; it waits for it (griddepcontrol.wait) where it must.
template <typename Kernel, typename... Args>
cudaError_t launch_clusters(int cluster_size, bool early, Kernel kernel, dim3 grid, int threads, size_t shared_memory, cudaStream_t stream,
                            const Args &...args) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_memory;
    config.stream = stream;
    cudaLaunchAttribute attributes[2]{clusters_of(cluster_size)};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes;
    config.numAttrs = 1 + early;
    return cudaLaunchKernelEx(&config, kernel, args...);
}
template <typename Kernel, typename... Args>
cudaError_t launch_kernel(bool early, Kernel kernel, dim3 grid, int threads, size_t shared_memory, cudaStream_t stream,
                          const Args &...args) {
    if (shared_memory > 0)
        if (cudaError_t error = allow_shared_memory(kernel, shared_memory)) return error;
    return launch_clusters(1, early, kernel, grid, threads, shared_memory, stream, args...);
}

}  // namespace
}  // namespace flashmhf
