// Definitions for launch.h; included by the instances only.
#pragma once

#include <cuda_runtime.h>

#include "common/launch_kernel.cuh"
#include "common/tensor_map.h"
#include "project/kernel.cuh"
#include "project/launch.h"

namespace flashmhf {
namespace {

template <typename P, typename T> cudaError_t launch_tiles(const ProjectParams &p, int blocks, cudaStream_t stream) {
    const MapType type = map_type(std::is_same_v<T, kittens::bf16>);
    const CUtensorMap map_w = tensor_map("w", p.w, P::weight_bytes == 1 ? MapType::fp8 : type,
                                         {{p.depth, 1, P::step}, {p.features, p.depth, P::features}}, P::step * P::weight_bytes);
    const CUtensorMap map_x = tensor_map("x", p.x, type, {{p.depth, 1, P::step}, {p.tokens, p.x_stride, P::max_tokens}}, 128);
    constexpr size_t bytes = sizeof(ProjectShared<P, T>);
    static_assert(bytes <= shared_memory_limit);
    if (cudaError_t error = allow_shared_memory(flashmhf_project<P, T>, bytes)) return error;
    return launch_clusters(P::cluster, true, flashmhf_project<P, T>, dim3(p.features / P::features * P::cluster, blocks), P::threads, bytes,
                           stream, map_w, map_x, p);
}

// The policies that plan_project chooses from.
template <typename T, typename... Policies>
cudaError_t launch_one_of(const ProjectPlan &plan, const ProjectParams &p, cudaStream_t stream) {
    cudaError_t error = cudaErrorInvalidValue;
    auto matches = [&](auto policy) {
        using P = decltype(policy);
        if (plan.warpgroups != P::warpgroups || plan.max_tokens != P::max_tokens) return false;
        error = launch_tiles<P, T>(p, plan.blocks, stream);
        return true;
    };
    (matches(Policies{}) || ...);
    return error;
}

}  // namespace

template <template <int, int> typename P, bool bf16>
cudaError_t launch_with(const ProjectPlan &plan, const ProjectParams &p, cudaStream_t stream) {
    using T = std::conditional_t<bf16, kittens::bf16, kittens::half>;
    return launch_one_of<T, P<1, 16>, P<1, 32>, P<1, 64>, P<2, 96>, P<2, 128>>(plan, p, stream);
}

template <bool bf16> cudaError_t launch_project(const ProjectPlan &plan, const ProjectParams &p, cudaStream_t stream) {
    return launch_with<ProjectPolicy, bf16>(plan, p, stream);
}
template <bool bf16> cudaError_t launch_project_fp8(const ProjectPlan &plan, const ProjectParams &p, cudaStream_t stream) {
    return launch_with<ProjectFp8Policy, bf16>(plan, p, stream);
}

}  // namespace flashmhf
