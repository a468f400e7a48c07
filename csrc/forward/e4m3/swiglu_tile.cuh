// A = act(M) N in e4m3, from the product [M | N] of one chunk of inter rows. The gate is applied to the sums of a sub-network.
#pragma once

#include "common/activation.cuh"

namespace flashmhf {

template <int inter> using Fp8Scores = uint32_t[inter / 2];     // [64 x 2 inter], M then N
template <int inter> using Fp8Activated = uint32_t[inter / 8];  // [64 x inter]

// m and n are sums of quantised operands; `factor`, of rows g and g + 8, each as a pair, takes m to what the activation is a function of.
// A is the activation over that factor, times n: the output's scale has the rest.
template <typename Activation, int n>
__device__ __forceinline__ void swiglu(uint32_t (&a)[n], const uint32_t (&mn)[4 * n], const uint32_t (&factor)[2]) {
#pragma unroll
    for (int b = 0; b < n; b += 2)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t x[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint32_t m = mn[2 * (b + j) + i], up = mn[2 * (b + j + n) + i];
                x[j] = fp8::multiply_half(Activation::forward_half(m, factor[i]), up);
            }
            a[b + i] = fp8::to_fp8(x[0], x[1]);
        }
}

}  // namespace flashmhf
