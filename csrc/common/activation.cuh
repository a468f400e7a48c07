// The activation of M, beside its derivative: the one file that knows which it is. Another one is another such struct, which the policies
// name (`Activation` in policy.h of forward/f16, forward/e4m3 and backward).
#pragma once

#include "common/fp8.cuh"

namespace flashmhf {

// silu(m) = x + x tanh(x) with x = m / 2: one MUFU operation. On Hopper tanh.approx is accurate enough (measured): silu keeps a relative
// error of 6e-5 down to m = -7, 5e-3 down to m = -12, where it is below 1e-4 itself.
struct Silu {
    static constexpr int part = 2;  // what m is divided by; a power of two, so that Q may be divided instead
    // Of m = part * x.
    __device__ __forceinline__ static float forward(float x) { return fmaf(x, tanh_fast(x), x); }
    // The same over `factor`, of a pair whose x are m * factor.
    __device__ __forceinline__ static uint32_t forward_half(uint32_t m, uint32_t factor) {
        return fp8::fma_half(m, fp8::tanh_half(fp8::multiply_half(m, factor)), m);
    }
    // m becomes its activation; slope: the derivative.
    __device__ __forceinline__ static void forward_and_slope(float &m, float &slope) {
        const float s = sigmoid_fast(m);
        m *= s;
        slope = fmaf(m, 1.f - s, s);
    }
};

}  // namespace flashmhf
