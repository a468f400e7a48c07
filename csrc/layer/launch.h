// Launches the normalisation of Q, in place: q[t, h] = q[t, h] / sqrt(mean(q[t, h]^2) + eps) * weight[h]. Defined once per element type,
// in a file that CMake writes (cmake/instances.cmake).
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace flashmhf {

struct QNormParams {
    void *q;             // [rows, d_h], dense; row t * heads + h
    const void *weight;  // [heads, d_h]
    int64_t rows;
    int heads;
    float eps;
    bool float_weight;  // otherwise in q's type
};

template <bool bf16> cudaError_t launch_q_norm(int head_dim, const QNormParams &params, cudaStream_t stream);  // otherwise fp16

}  // namespace flashmhf
