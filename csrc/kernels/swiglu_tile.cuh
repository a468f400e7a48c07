// A = r silu(M) N, from the product [M | N] = Q [K;U]^T of one tile.
#pragma once

#include "kernels/ptx_ext.cuh"
#include "kernels/policy.h"

namespace flashmhf {

using ScoreTile = kittens::rt_fl<16, 2 * tile_inter>;
template <typename T> using ActivationTile = kittens::rt<T, 16, tile_inter>;

__device__ __forceinline__ float silu_exact(float m) { return m * sigmoid_fast(m); }
__device__ __forceinline__ float silu_tanh(float m) {
    const float x = 0.5f * m;
    return fmaf(x, tanh_fast(x), x);
}

#ifndef FLASHMHF_SILU
#define FLASHMHF_SILU 1
#endif

// In place over M: rows g and g + 8 of the warp's fragment (pairs 0, 2 and 1, 3 of a base tile) have weights r.x and r.y.
__device__ __forceinline__ void swiglu(ScoreTile &mn, float2 r) {
    constexpr int width = tile_inter / 16;
    auto &t = mn.tiles[0];
    auto each = [&](auto &&silu) {
#pragma unroll
        for (int j = 0; j < width; ++j)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                float2 &m = t[j].data[k];
                const float2 n = t[j + width].data[k];
                m.x = silu(m.x, k % 2) * (n.x * (k % 2 ? r.y : r.x));
                m.y = silu(m.y, k % 2) * (n.y * (k % 2 ? r.y : r.x));
            }
    };
#if FLASHMHF_SILU == 0
    each([](float m, int) { return silu_exact(m); });
#elif FLASHMHF_SILU == 1
    each([](float m, int) { return silu_tanh(m); });
#else
    // As unsigned integers, all floats above -2 are less than -2.
    constexpr uint32_t minus_two = 0xC0000000u;
    auto below = [&](int k) {
        auto bits = [&](int j) { return __float_as_uint(t[j].data[k].x); };
        return min(__vimin3_u32(bits(0), bits(1), bits(2)), bits(3)) > minus_two;
    };
    const bool low = below(0), high = below(1);
    if (low || high) each([&](float m, int k) { return (k ? high : low) ? silu_exact(m) : silu_tanh(m); });
    else each([](float m, int) { return silu_tanh(m); });
#endif
}

// To the 16-bit operand of the second product: accumulator and operand fragments have the same order.
template <typename T> __device__ __forceinline__ void pack(ActivationTile<T> &a, const ScoreTile &mn) {
#pragma unroll
    for (int j = 0; j < tile_inter / 16; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k)
            a.tiles[0][j].data[k] = kittens::base_types::convertor<typename ActivationTile<T>::T2, float2>::convert(mn.tiles[0][j].data[k]);
}

}  // namespace flashmhf
