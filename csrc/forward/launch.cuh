// Definitions for launch.h; included by the instances only.
#pragma once

#include "common/launch_kernel.cuh"
#include "forward/combine.cuh"
#include "forward/kernel.cuh"
#include "forward/launch.h"

namespace flashmhf {
namespace {

template <int d_h, typename T> cudaError_t combine_typed(const ForwardPlan &plan, const ForwardParams &params, cudaStream_t stream) {
    if (plan.partials == 0 || plan.flags) return cudaSuccess;

    const int64_t tiles = int64_t{params.bundles} * params.head_tiles, of_item = plan.row_ctas * plan.consumers;
    const dim3 grid(static_cast<unsigned>(plan.schedule.rest * (tiles < of_item ? tiles : of_item)), d_h / 8, plan.schedule.lanes);
    return launch_kernel(true, flashmhf_forward_combine<d_h, T>, grid, 128, 0, stream, params);
}

// All kernels may be started before their predecessor has finished; they wait for that before they touch any data.
template <int d_h, typename T, Division division> cudaError_t launch_instance(const ForwardLaunch &l, cudaStream_t stream) {
    const ForwardSchedule &s = l.plan.schedule;
    if (cudaError_t error = allow_shared_memory(flashmhf_forward<d_h, T, division>, ForwardPolicy<d_h>::shared_memory)) return error;
    if (cudaError_t error = allow_cluster(flashmhf_forward<d_h, T, division>, l.plan.cluster_size)) return error;
    return launch_clusters(l.plan.cluster_size, true, flashmhf_forward<d_h, T, division>, dim3(s.clusters * l.plan.cluster_size, s.lanes),
                           128 * (l.plan.consumers + 1), l.shared_memory, stream, l.q, l.k, l.u, l.v, l.out, l.r, l.params);
}
template <int d_h, typename T> cudaError_t launch_typed(const ForwardLaunch &l, cudaStream_t stream) {
    using P = ForwardPolicy<d_h>;
    const Division division = l.plan.schedule.division();
    if constexpr (P::may_add_parts)
        if (division == Division::gathers) return launch_instance<d_h, T, Division::gathers>(l, stream);
    if constexpr (P::may_slice)
        if (division == Division::slices) return launch_instance<d_h, T, Division::slices>(l, stream);
    if (cudaError_t error = launch_instance<d_h, T, Division::waves>(l, stream)) return error;
    return combine_typed<d_h, T>(l.plan, l.params, stream);
}

}  // namespace

template <int d_h> cudaError_t launch_forward(const ForwardLaunch &launch, cudaStream_t stream) {
    return launch.bf16 ? launch_typed<d_h, kittens::bf16>(launch, stream) : launch_typed<d_h, kittens::half>(launch, stream);
}

template <int d_h> cudaError_t combine_parts(bool bf16, const ForwardPlan &plan, const ForwardParams &params, cudaStream_t stream) {
    return bf16 ? combine_typed<d_h, kittens::bf16>(plan, params, stream) : combine_typed<d_h, kittens::half>(plan, params, stream);
}

}  // namespace flashmhf
