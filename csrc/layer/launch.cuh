// RMS normalisation of Q by head, in fp32 with one rounding. A group of lanes takes a row, 16 bytes a lane. Included by the instances only.
#pragma once

#include <type_traits>

#include "common/geometry.h"
#include "common/head_dims.h"
#include "common/launch_kernel.cuh"
#include "kittens.cuh"
#include "layer/launch.h"

namespace flashmhf {

constexpr int q_norm_threads = 256;

template <int d_h> struct QNormPolicy {
    static_assert(QNormHeadDims::contains(d_h));
    static constexpr int elements = 8, lanes = d_h <= 64 ? 8 : d_h <= 128 ? 16 : 32;  // of a row; at d_h = 96 four of them have nothing
    static constexpr int rows = q_norm_threads / lanes;                               // of a CTA
};

template <typename T> struct alignas(16) EightElements {
    T x[8];
};

template <int d_h, typename T> __global__ __launch_bounds__(q_norm_threads) void flashmhf_q_norm(const __grid_constant__ QNormParams p) {
    using P = QNormPolicy<d_h>;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * P::rows + threadIdx.x / P::lanes;
    const int column = threadIdx.x % P::lanes * P::elements, of_weight = row % p.heads * d_h + column;
    const bool holds = row < p.rows && column < d_h;
    auto *const place = reinterpret_cast<EightElements<T> *>(static_cast<T *>(p.q) + row * d_h + column);
    kittens::pdl::arrive();  // the next kernel waits for this one before it touches Q
    kittens::pdl::wait();

    float x[P::elements] = {}, squares = 0.f;
    if (holds) {
        const EightElements<T> read = *place;
#pragma unroll
        for (int i = 0; i < P::elements; ++i) {
            x[i] = kittens::base_types::convertor<float, T>::convert(read.x[i]);
            squares += x[i] * x[i];
        }
    }
#pragma unroll
    for (int lane = P::lanes / 2; lane > 0; lane /= 2) squares += __shfl_xor_sync(kittens::MASK_ALL, squares, lane);
    if (!holds) return;
    const float scale = 1.f / sqrtf(squares / d_h + p.eps);
    EightElements<T> result;
#pragma unroll
    for (int i = 0; i < P::elements; ++i) {
        const float weight = p.float_weight
                                 ? static_cast<const float *>(p.weight)[of_weight + i]
                                 : kittens::base_types::convertor<float, T>::convert(static_cast<const T *>(p.weight)[of_weight + i]);
        result.x[i] = kittens::base_types::convertor<T, float>::convert(x[i] * scale * weight);
    }
    *place = result;
}

template <bool bf16> cudaError_t launch_q_norm(int head_dim, const QNormParams &p, cudaStream_t stream) {
    using T = std::conditional_t<bf16, kittens::bf16, kittens::half>;
    return QNormHeadDims::dispatch(head_dim, [&]<int d_h>() {
        const dim3 grid(static_cast<unsigned>(ceil_div(p.rows, QNormPolicy<d_h>::rows)));
        return launch_kernel(true, flashmhf_q_norm<d_h, T>, grid, q_norm_threads, 0, stream, p);
    });
}

}  // namespace flashmhf
