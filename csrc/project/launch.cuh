// Definitions for launch.h; included by the instances only.
#pragma once

#include <cuda_runtime.h>

#include "common/driver.h"
#include "common/launch_kernel.cuh"
#include "project/kernel.cuh"
#include "project/launch.h"

namespace flashmhf {
namespace {

// The next 128 bytes of a row are of the next slot: with 256 for each miss of the L2 a projection takes 0.3 to 0.8 us more.
constexpr int project_fetch_bytes = 128;

template <typename P, typename T> cudaError_t launch_tiles(const ProjectParams &p, int blocks, cudaStream_t stream) {
    const MapType type = map_type(std::is_same_v<T, kittens::bf16>);
    const CUtensorMap map_w =
        tensor_map("w", p.w, type, {{p.depth, 1, P::step}, {p.features, p.depth, P::features}}, 128, project_fetch_bytes);
    const CUtensorMap map_x =
        tensor_map("x", p.x, type, {{p.depth, 1, P::step}, {p.tokens, p.x_stride, p.box_tokens}}, 128, project_fetch_bytes);
    constexpr size_t bytes = sizeof(ProjectShared<P, T>);
    static_assert(bytes <= shared_memory_limit);
    if (cudaError_t error = allow_shared_memory(flashmhf_project<P, T>, bytes)) return error;
    return launch_clusters(P::cluster, true, flashmhf_project<P, T>, dim3(p.features / P::features * P::cluster, blocks), P::threads, bytes,
                           stream, map_w, map_x, p);
}

// The policies that plan_project chooses from.
template <typename...> struct Policies {};
template <typename T, typename... P>
cudaError_t launch_one_of(Policies<P...>, const ProjectPlan &plan, const ProjectParams &p, cudaStream_t stream) {
    cudaError_t error = cudaErrorInvalidValue;
    auto matches = [&](auto policy) {
        using Q = decltype(policy);
        if (plan.warpgroups != Q::warpgroups || plan.max_tokens != Q::max_tokens || plan.cluster != Q::cluster) return false;
        error = launch_tiles<Q, T>(p, plan.blocks, stream);
        return true;
    };
    (matches(P{}) || ...);
    return error;
}

}  // namespace

template <bool bf16> cudaError_t launch_project(const ProjectPlan &plan, const ProjectParams &p, cudaStream_t stream) {
    using P = Policies<ProjectPolicy<1, 16, 4>, ProjectPolicy<1, 32, 4>, ProjectPolicy<1, 64, 4>, ProjectPolicy<2, 96, 4>,
                       ProjectPolicy<2, 128, 4>, ProjectPolicy<1, 48, 2>, ProjectPolicy<1, 64, 2>, ProjectPolicy<1, 96, 2>,
                       ProjectPolicy<1, 128, 2>, ProjectPolicy<1, 192, 2>>;
    return launch_one_of<std::conditional_t<bf16, kittens::bf16, kittens::half>>(P{}, plan, p, stream);
}

}  // namespace flashmhf
