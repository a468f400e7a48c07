// What the consumers of the FP8 forward kernel compute in registers: A = act(M) N in e4m3 from the product [M | N] of one chunk of inter rows,
// the sums of an item, to which the gate is applied, and the form in which slices send these to each other.
#pragma once

#include "common/activation.cuh"
#include "forward/e4m3/policy.h"
#include "forward/epilogue.cuh"

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

// Sums over sub-networks in pairs of fp16, to which the products of a sub-network are promoted.
template <int d_h> struct Fp8Sums {
    uint32_t x[d_h / 4];
    // += products * factor of the row
    __device__ __forceinline__ void add(const uint32_t (&products)[d_h / 4], uint32_t factors) {
        const uint32_t r[2] = {__byte_perm(factors, factors, 0x1010), __byte_perm(factors, factors, 0x3232)};
#pragma unroll
        for (int i = 0; i < d_h / 4; ++i) x[i] = fp8::fma_half(products[i], r[i % 2], x[i]);
    }
    __device__ __forceinline__ void scale(float2 factors) {
#pragma unroll
        for (int i = 0; i < d_h / 4; ++i) {
            const float f = i % 2 ? factors.y : factors.x;
            x[i] = fp8::multiply_half(x[i], fp8::pack_half(f, f));
        }
    }
    __device__ __forceinline__ void get(OutputTile<d_h> &o, float2 factors) const {
#pragma unroll
        for (int i = 0; i < d_h / 4; ++i) {
            const float2 v = fp8::unpack_half(x[i]);
            const float f = i % 2 ? factors.y : factors.x;
            o.tiles[0][i / 4].data[i % 4] = {v.x * f, v.y * f};
        }
    }
};
// What slices send each other (forward/slice_exchange.cuh): 16 columns in fp16, of the thread's rows in turn, and the scales of these rows.
template <int d_h> struct Fp8SliceSums {
    static constexpr int columns = ForwardFp8Policy<d_h>::piece_columns;
    static constexpr bool scaled = true;
    const Fp8Sums<d_h> &sums;
    const float2 factors;
    __device__ __forceinline__ float2 scale() const { return factors; }
    __device__ __forceinline__ uint4 piece(int j) const { return {sums.x[4 * j], sums.x[4 * j + 1], sums.x[4 * j + 2], sums.x[4 * j + 3]}; }
    __device__ __forceinline__ static void add(float4 (&sum)[2], uint4 piece, float2 scale) {
        add(sum[0], fp8::unpack_half(piece.x), fp8::unpack_half(piece.y), scale);
        add(sum[1], fp8::unpack_half(piece.z), fp8::unpack_half(piece.w), scale);
    }

  private:
    __device__ __forceinline__ static void add(float4 &sum, float2 above, float2 below, float2 scale) {
        sum.x = fmaf(above.x, scale.x, sum.x), sum.y = fmaf(above.y, scale.x, sum.y);
        sum.z = fmaf(below.x, scale.y, sum.z), sum.w = fmaf(below.y, scale.y, sum.w);
    }
};

}  // namespace flashmhf
