// A = silu(M) N in e4m3, from the product [M | N] of one chunk of inter rows. The gate is applied to the sums of a sub-network.
#pragma once

#include "common/fp8.cuh"

namespace flashmhf {

template <int inter> using Fp8Scores = uint32_t[inter / 2];      // [64 x 2 inter], M then N
template <int inter> using Fp8Activation = uint32_t[inter / 8];  // [64 x inter]

// silu(x) = x / 2 (1 + tanh(x / 2)): A = m (1 + tanh(half m)) n, where m and n are sums of quantised operands and `half` takes m to x / 2;
// the output's scale has the rest. half: of rows g and g + 8, each as a pair.
template <int n> __device__ __forceinline__ void swiglu(uint32_t (&a)[n], const uint32_t (&mn)[4 * n], const uint32_t (&half)[2]) {
#pragma unroll
    for (int b = 0; b < n; b += 2)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t x[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint32_t m = mn[2 * (b + j) + i], up = mn[2 * (b + j + n) + i];
                x[j] = fp8::multiply_half(fp8::fma_half(m, fp8::tanh_half(fp8::multiply_half(m, half[i])), m), up);
            }
            a[b + i] = fp8::to_fp8(x[0], x[1]);
        }
}

}  // namespace flashmhf
