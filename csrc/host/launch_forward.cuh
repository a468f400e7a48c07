// Definitions for host/launch_forward.h; included by the instances only.
#pragma once

#include "host/launch_forward.h"
#include "kernels/combine_tiles.cuh"
#include "kernels/forward_tiles.cuh"

namespace flashmhf {
namespace {

// All kernels may be started before their predecessor has finished; they wait for that before they touch any data.
cudaLaunchAttribute early_start() {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return attribute;
}
cudaLaunchAttribute clusters_of(int size) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = size;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    return attribute;
}

template <int d_h, typename T> cudaError_t configure(cudaLaunchConfig_t &config) {
    config.blockDim = dim3(ForwardPolicy<d_h>::threads);
    config.dynamicSmemBytes = ForwardPolicy<d_h>::shared_memory;
    return cudaFuncSetAttribute(forward<d_h, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, ForwardPolicy<d_h>::shared_memory);
}

template <int d_h, typename T> cudaError_t launch_typed(const ForwardLaunch &l, cudaStream_t stream) {
    const ForwardSchedule &s = l.plan.schedule;
    cudaLaunchAttribute attributes[] = {early_start(), clusters_of(l.plan.cluster_size)};
    if constexpr (ForwardPolicy<d_h>::may_add_parts)
        if (l.plan.flags) {
            cudaLaunchConfig_t before{};
            before.gridDim = dim3(1);
            before.blockDim = dim3(clear_threads);
            before.stream = stream;
            before.attrs = attributes;
            before.numAttrs = 1;
            if (cudaError_t error = cudaLaunchKernelEx(&before, clear_flags, l.params.flags, l.plan.flags)) return error;
        }
    cudaLaunchConfig_t config{};
    if (cudaError_t error = configure<d_h, T>(config)) return error;
    config.dynamicSmemBytes = l.plan.shared_memory;
    config.gridDim = dim3(s.clusters * l.plan.cluster_size);
    config.blockDim = dim3(128 * (l.plan.consumers + 1));
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    if (cudaError_t error = cudaLaunchKernelEx(&config, forward<d_h, T>, l.q, l.k, l.u, l.v, l.out, l.r, l.params)) return error;
    if (l.plan.partials == 0 || l.plan.flags) return cudaSuccess;

    const int64_t tiles = l.params.batch * int64_t{l.plan.row_tiles}, of_item = l.plan.row_ctas * l.plan.consumers;
    cudaLaunchConfig_t after{};
    after.gridDim = dim3(static_cast<unsigned>(s.rest * (tiles < of_item ? tiles : of_item)), d_h / 8);
    after.blockDim = dim3(128);
    after.stream = stream;
    after.attrs = attributes;
    after.numAttrs = 1;
    return cudaLaunchKernelEx(&after, combine<d_h, T>, l.params);
}

}  // namespace

template <int d_h> cudaError_t launch_forward(const ForwardLaunch &launch, cudaStream_t stream) {
    return launch.bf16 ? launch_typed<d_h, kittens::bf16>(launch, stream) : launch_typed<d_h, kittens::half>(launch, stream);
}

template <int d_h> cudaError_t count_clusters(int size, int *count) {
    cudaLaunchAttribute attribute = clusters_of(size);
    cudaLaunchConfig_t config{};
    if (cudaError_t error = configure<d_h, kittens::bf16>(config)) return error;
    config.gridDim = dim3(size);
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaOccupancyMaxActiveClusters(count, forward<d_h, kittens::bf16>, &config);
}

}  // namespace flashmhf
