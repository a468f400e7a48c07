// A = r act(M) N, from the product [M | N] = Q [K;U]^T of one tile.
#pragma once

#include "common/activation.cuh"
#include "forward/f16/policy.h"

namespace flashmhf {

using ScoreTile = kittens::rt_fl<16, 2 * tile_inter>;
template <typename T> using ActivationTile = kittens::rt<T, 16, tile_inter>;

// In place over M: rows g and g + 8 of the warp's fragment (pairs 0, 2 and 1, 3 of a base tile) have weights r.x and r.y. Where Q came
// divided by q_part, N did, too, and r must be so much larger.
template <typename Activation, int q_part> __device__ __forceinline__ void swiglu(ScoreTile &mn, float2 r) {
    constexpr int width = tile_inter / 16;
    constexpr float to_x = float{q_part} / Activation::part;
    auto &tile = mn.tiles[0];
#pragma unroll
    for (int j = 0; j < width; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float2 &m = tile[j].data[k];
            const float2 n = tile[j + width].data[k];
            const float gate = k % 2 ? r.y : r.x;
            m.x = Activation::forward(to_x * m.x) * (n.x * gate);
            m.y = Activation::forward(to_x * m.y) * (n.y * gate);
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
