// Definitions for host/launch_forward.h; included by the instances only.
#pragma once

#include "host/launch_forward.h"
#include "kernels/combine_tiles.cuh"
#include "kernels/forward_tiles.cuh"

namespace flashmhf {
namespace {

template <int d_h, typename T> cudaError_t configure(cudaLaunchConfig_t &config, cudaLaunchAttribute &cluster, int cluster_size) {
    config.blockDim = dim3(ForwardPolicy<d_h>::threads);
    config.dynamicSmemBytes = ForwardPolicy<d_h>::shared_memory;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = cluster_size;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return cudaFuncSetAttribute(forward<d_h, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, ForwardPolicy<d_h>::shared_memory);
}

template <int d_h, typename T> cudaError_t launch_typed(const ForwardLaunch &l, cudaStream_t stream) {
    const ForwardSchedule &s = l.plan.schedule;
    cudaLaunchConfig_t config{};
    cudaLaunchAttribute attribute{};
    if (cudaError_t error = configure<d_h, T>(config, attribute, l.plan.cluster_size)) return error;
    config.gridDim = dim3(s.clusters * l.plan.cluster_size);
    config.stream = stream;
    if (cudaError_t error = cudaLaunchKernelEx(&config, forward<d_h, T>, l.q, l.k, l.u, l.v, l.out, l.params)) return error;
    if (l.plan.partials == 0) return cudaSuccess;

    cudaLaunchConfig_t after{};
    after.gridDim = dim3(s.rest * l.plan.cluster_size * ForwardPolicy<d_h>::consumers, d_h / 8);
    after.blockDim = dim3(128);
    after.stream = stream;
    cudaLaunchAttribute dependent{};
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
    after.attrs = &dependent;
    after.numAttrs = 1;
    return cudaLaunchKernelEx(&after, combine<d_h, T>, static_cast<T *>(l.out_data), l.params);
}

}  // namespace

template <int d_h> cudaError_t launch_forward(const ForwardLaunch &launch, cudaStream_t stream) {
    return launch.bf16 ? launch_typed<d_h, kittens::bf16>(launch, stream) : launch_typed<d_h, kittens::half>(launch, stream);
}

template <int d_h> cudaError_t count_pairs(int *pairs) {
    cudaLaunchConfig_t config{};
    cudaLaunchAttribute attribute{};
    if (cudaError_t error = configure<d_h, kittens::bf16>(config, attribute, 2)) return error;
    config.gridDim = dim3(2);
    return cudaOccupancyMaxActiveClusters(pairs, forward<d_h, kittens::bf16>, &config);
}

}  // namespace flashmhf
