// Definitions for launch.h; included by the instances only.
#pragma once

#include <type_traits>

#include "common/launch_kernel.cuh"
#include "layer/kernel.cuh"
#include "layer/launch.h"

namespace flashmhf {

template <bool bf16> cudaError_t launch_q_norm(int head_dim, const QNormParams &p, cudaStream_t stream) {
    using T = std::conditional_t<bf16, kittens::bf16, kittens::half>;
    return QNormHeadDims::dispatch(head_dim, [&]<int d_h>() {
        const dim3 grid(static_cast<unsigned>(ceil_div(p.rows, QNormPolicy<d_h>::rows)));
        return launch_kernel(true, flashmhf_q_norm<d_h, T>, grid, q_norm_threads, 0, stream, p);
    });
}

}  // namespace flashmhf
