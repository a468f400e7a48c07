// Definitions for launch.h; included by the instances only.
#pragma once

#include <iterator>
#include <utility>

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

template <typename T, size_t... i>
cudaError_t launch_planned(std::index_sequence<i...>, const ProjectPlan &plan, const ProjectParams &p, cudaStream_t stream) {
    static constexpr auto tiles = project_tiles;
    constexpr cudaError_t (*launches[])(const ProjectParams &, int, cudaStream_t) = {
        launch_tiles<ProjectPolicy<tiles[i].warpgroups, tiles[i].max_tokens, tiles[i].cluster>, T>...};
    return launches[plan.tile](p, plan.blocks, stream);
}

}  // namespace

template <bool bf16> cudaError_t launch_project(const ProjectPlan &plan, const ProjectParams &p, cudaStream_t stream) {
    using T = std::conditional_t<bf16, kittens::bf16, kittens::half>;
    return launch_planned<T>(std::make_index_sequence<std::size(project_tiles)>(), plan, p, stream);
}

}  // namespace flashmhf
