// Definitions for launch.h; included by the instances only.
#pragma once

#include "common/launch_kernel.cuh"
#include "forward/combine.cuh"
#include "forward/e4m3/format.cuh"
#include "forward/f16/format.cuh"
#include "forward/kernel.cuh"
#include "forward/launch.h"

namespace flashmhf {
namespace {

template <int d_h, typename T> cudaError_t combine_typed(const ForwardPlan &plan, const ForwardParams &params, cudaStream_t stream) {
    const int64_t tiles = int64_t{params.bundles} * params.head_tiles, of_item = plan.row_ctas * plan.consumers;
    const dim3 grid(static_cast<unsigned>(plan.schedule.rest * (tiles < of_item ? tiles : of_item)), d_h / 8, plan.schedule.abreast);
    return launch_kernel(true, flashmhf_forward_combine<d_h, T>, grid, 128, 0, stream, params);
}

// All kernels may be started before their predecessor has finished; they wait for that before they touch any data.
template <typename Format, Division division> cudaError_t launch_instance(const ForwardLaunch &l, cudaStream_t stream) {
    constexpr auto kernel = flashmhf_forward<Format, division>;
    const ForwardSchedule &s = l.plan.schedule;
    const typename Format::Params &params = l.params;
    if (cudaError_t error = allow_shared_memory(kernel, Format::Policy::shared_memory)) return error;
    if (cudaError_t error = allow_cluster(kernel, l.plan.cluster_size)) return error;
    return launch_clusters(l.plan.cluster_size, true, kernel, dim3(s.clusters * l.plan.cluster_size, s.abreast),
                           128 * (l.plan.consumers + 1), l.shared_memory, stream, l.q, l.k, l.u, l.v, l.out, l.r, params);
}
// The instance for the way in which the plan divides items, or the one for all ways.
template <typename Format> cudaError_t launch_divided(const ForwardLaunch &l, cudaStream_t stream) {
    const Division division = l.plan.schedule.division();
    if constexpr (Format::has_instance(Division::gathers))
        if (division == Division::gathers) return launch_instance<Format, Division::gathers>(l, stream);
    if constexpr (Format::has_instance(Division::slices))
        if (division == Division::slices) return launch_instance<Format, Division::slices>(l, stream);
    return launch_instance<Format, Division::waves>(l, stream);
}
template <WeightFormat format, int d_h, typename T> cudaError_t launch_typed(const ForwardLaunch &l, cudaStream_t stream) {
    if constexpr (format == WeightFormat::same) return launch_divided<F16<d_h, T>>(l, stream);
    else if (divides_few_rows(l.plan)) return launch_divided<E4m3<d_h, T, true>>(l, stream);
    else return launch_divided<E4m3<d_h, T, false>>(l, stream);
}

}  // namespace

template <WeightFormat format, int d_h> cudaError_t launch_forward(const ForwardLaunch &l, cudaStream_t stream) {
    return l.bf16 ? launch_typed<format, d_h, kittens::bf16>(l, stream) : launch_typed<format, d_h, kittens::half>(l, stream);
}

template <int d_h> cudaError_t combine_parts(bool bf16, const ForwardPlan &plan, const ForwardParams &params, cudaStream_t stream) {
    return bf16 ? combine_typed<d_h, kittens::bf16>(plan, params, stream) : combine_typed<d_h, kittens::half>(plan, params, stream);
}

}  // namespace flashmhf
