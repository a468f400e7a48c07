// Definitions for launch.h; included by the instances only.
#pragma once

#include <cuda_runtime.h>

#include "common/launch_kernel.cuh"
#include "common/tensor_map.h"
#include "project/kernel.cuh"
#include "project/launch.h"

namespace flashmhf {
namespace {

template <int max_tokens, typename T> cudaError_t launch_tiles(const ProjectParams &p, cudaStream_t stream) {
    using P = ProjectPolicy<max_tokens>;
    const MapType type = map_type(std::is_same_v<T, kittens::bf16>);
    const CUtensorMap map_w = tensor_map("w", p.w, type, {{p.depth, 1, P::step}, {p.features, p.depth, P::features}}, 128);
    const CUtensorMap map_x = tensor_map("x", p.x, type, {{p.depth, 1, P::step}, {p.tokens, p.x_stride, max_tokens}}, 128);
    constexpr size_t bytes = sizeof(ProjectShared<max_tokens, T>);
    if (cudaError_t error = allow_shared_memory(flashmhf_project<max_tokens, T>, bytes)) return error;
    return launch_clusters(P::cluster, true, flashmhf_project<max_tokens, T>, dim3(p.features / P::features * P::cluster), P::threads,
                           bytes, stream, map_w, map_x, p);
}

}  // namespace

template <bool bf16> cudaError_t launch_project(const ProjectParams &p, cudaStream_t stream) {
    using T = std::conditional_t<bf16, kittens::bf16, kittens::half>;
    return p.tokens <= 16   ? launch_tiles<16, T>(p, stream)
           : p.tokens <= 32 ? launch_tiles<32, T>(p, stream)
                            : launch_tiles<project_tokens, T>(p, stream);
}

}  // namespace flashmhf
