// A = r silu(M) N, from the product [M | N] = Q [K;U]^T of one tile.
#pragma once

#include "common/ptx.cuh"
#include "forward/f16/policy.h"

namespace flashmhf {

using ScoreTile = kittens::rt_fl<16, 2 * tile_inter>;
template <typename T> using ActivationTile = kittens::rt<T, 16, tile_inter>;

// silu(m) = x + x tanh(x) with x = m / 2: one MUFU operation. On Hopper tanh.approx is accurate enough (measured): silu keeps a relative
// error of 6e-5 down to m = -7, 5e-3 down to m = -12, where it is below 1e-4 itself.
//
// With Q halved, M is x, and N comes at half its size; then r must be doubled.
template <bool halved> __device__ __forceinline__ float silu(float m) {
    const float x = halved ? m : 0.5f * m;
    return fmaf(x, tanh_fast(x), x);
}

// In place over M: rows g and g + 8 of the warp's fragment (pairs 0, 2 and 1, 3 of a base tile) have weights r.x and r.y.
template <bool halved> __device__ __forceinline__ void swiglu(ScoreTile &mn, float2 r) {
    constexpr int width = tile_inter / 16;
    auto &tile = mn.tiles[0];
#pragma unroll
    for (int j = 0; j < width; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float2 &m = tile[j].data[k];
            const float2 n = tile[j + width].data[k];
            const float gate = k % 2 ? r.y : r.x;
            m.x = silu<halved>(m.x) * (n.x * gate);
            m.y = silu<halved>(m.y) * (n.y * gate);
        }
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
