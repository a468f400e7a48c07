// Definitions for launch.h; included by the instances only.
#pragma once

#include "common/launch_kernel.cuh"
#include "forward_fp8/kernel.cuh"
#include "forward_fp8/launch.h"

namespace flashmhf {
namespace {

// May be started before its predecessor has finished; it waits for that before it touches any data.
template <int d_h, typename T, bool few_rows> cudaError_t launch_instance(const ForwardFp8Launch &l, cudaStream_t stream) {
    constexpr auto kernel = flashmhf_forward_fp8<d_h, T, few_rows>;
    if (cudaError_t error = allow_shared_memory(kernel, ForwardFp8Policy<d_h, few_rows>::shared_memory)) return error;
    const dim3 grid(l.plan.schedule.clusters * l.plan.cluster_size, l.plan.schedule.lanes);
    return launch_clusters(l.plan.cluster_size, true, kernel, grid, forward_fp8_threads(l.plan.consumers), l.shared_memory, stream, l.q,
                           l.k, l.u, l.v, l.out, l.r, l.params);
}
template <int d_h, typename T> cudaError_t launch_typed(const ForwardFp8Launch &l, cudaStream_t stream) {
    return divides_few_rows(l.plan) ? launch_instance<d_h, T, true>(l, stream) : launch_instance<d_h, T, false>(l, stream);
}

}  // namespace

template <int d_h> cudaError_t launch_forward_fp8(const ForwardFp8Launch &l, cudaStream_t stream) {
    const cudaError_t error = l.bf16 ? launch_typed<d_h, kittens::bf16>(l, stream) : launch_typed<d_h, kittens::half>(l, stream);
    return error ? error : combine_parts<d_h>(l.bf16, l.plan, l.params, stream);
}

}  // namespace flashmhf
