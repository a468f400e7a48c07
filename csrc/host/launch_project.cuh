// Definitions for host/launch_project.h; included by the instances only.
#pragma once

#include <cuda_runtime.h>

#include "host/launch_kernel.cuh"
#include "host/launch_project.h"
#include "kernels/project_rows.cuh"

namespace flashmhf {
namespace {

template <int max_tokens, bool one, typename T> cudaError_t launch_chunks(const ProjectParams &p, cudaStream_t stream) {
    using P = ProjectPolicy<max_tokens, one>;
    ProjectParams params = p;
    params.chunks = P::chunks(p.inner), params.steps = P::steps_of(p.inner);
    // An SM divides its memory between L1 and shared memory as its CTAs ask; beside a CTA of the forward kernel only in this way.
    auto *kernel = project<max_tokens, one, T>;
    constexpr auto carveout = cudaFuncAttributePreferredSharedMemoryCarveout;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, carveout, cudaSharedmemCarveoutMaxShared)) return error;
    if (cudaError_t error = allow_shared_memory(kernel, P::shared_memory(max_tokens, P::steps))) return error;
    return launch_clusters(P::cluster, true, kernel, dim3(p.features / P::tile), P::threads, P::shared_memory(p.tokens, params.steps), stream, params);
}
template <int max_tokens, typename T> cudaError_t launch_few(const ProjectParams &p, cudaStream_t stream) {
    const bool one = ProjectPolicy<max_tokens, true>::chunks(p.inner) == 1;
    return one ? launch_chunks<max_tokens, true, T>(p, stream) : launch_chunks<max_tokens, false, T>(p, stream);
}

}  // namespace

template <bool bf16> cudaError_t launch_project(const ProjectParams &p, cudaStream_t stream) {
    using T = std::conditional_t<bf16, kittens::bf16, kittens::half>;
    if (p.tokens <= 2) return launch_few<2, T>(p, stream);
    if (p.tokens <= 8) return launch_few<8, T>(p, stream);
    return launch_few<project_tokens, T>(p, stream);
}

}  // namespace flashmhf
