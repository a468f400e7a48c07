// Arithmetic on pairs of fp16 and packing to FP8 (e4m3), around products of e4m3 whose sums are fp16.
//
// The sums of a product are the fragment of the next one's operand without a shuffle: in each block of 16 of the contraction position
// 4t + i stands for column 2t + i where i < 2, and for column 8 + 2t + i - 2 otherwise. The same holds for what ldmatrix leaves a thread.
#pragma once

#include "common/ptx.cuh"
#include "kittens.cuh"
#include "ops/extensions.cuh"

namespace flashmhf::fp8 {

using flashmhf::pin;
using kittens::e4m3::descriptor, kittens::e4m3::multiply;

__device__ __forceinline__ uint32_t pack_half(float low, float high) {
    uint32_t x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
template <int n> __device__ __forceinline__ void clear(uint32_t (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = 0;
}
__device__ __forceinline__ float2 unpack_half(uint32_t x) { return __half22float2(reinterpret_cast<const __half2 &>(x)); }
__device__ __forceinline__ uint32_t multiply_half(uint32_t a, uint32_t b) {
    uint32_t x;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
}
__device__ __forceinline__ uint32_t fma_half(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t x;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
    return x;
}
__device__ __forceinline__ uint32_t tanh_half(uint32_t a) {
    uint32_t x;
    asm("tanh.approx.f16x2 %0, %1;" : "=r"(x) : "r"(a));
    return x;
}
// Four values to e4m3, in order; beyond its range to +-448, NaN to NaN.
__device__ __forceinline__ uint32_t to_fp8(uint32_t half01, uint32_t half23) {
    uint32_t x;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f16x2 low, %1;\ncvt.rn.satfinite.e4m3x2.f16x2 high, %2;\nmov.b32 %0, {low, "
        "high};\n}"
        : "=r"(x)
        : "r"(half01), "r"(half23));
    return x;
}
__device__ __forceinline__ uint32_t to_fp8(float2 x01, float2 x23) {
    uint32_t x;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, "
        "high};\n}"
        : "=r"(x)
        : "f"(x01.x), "f"(x01.y), "f"(x23.x), "f"(x23.y));
    return x;
}

}  // namespace flashmhf::fp8
