// Where the accumulators of a 64-row product of a warpgroup lie.
#pragma once

#include "kittens.cuh"

namespace flashmhf {

// First of the two rows (the other is 8 below) of a thread of the warpgroup.
__device__ __forceinline__ int fragment_row(int thread) { return thread / 32 * 16 + thread % 32 / 4; }

// Accumulators 4j..4j + 3 of a thread: columns 8j + 2 (thread % 4), + 1 of its first row, then of its second.
template <int columns> __device__ __forceinline__ float4 fragment_quad(const kittens::rt_fl<16, columns> &o, int j) {
    const auto &pair = o.tiles[0][j / 2].data;
    const float2 low = pair[j % 2 * 2], high = pair[j % 2 * 2 + 1];
    return {low.x, low.y, high.x, high.y};
}
template <int columns> __device__ __forceinline__ void add_quad(kittens::rt_fl<16, columns> &o, int j, float4 x) {
    auto &pair = o.tiles[0][j / 2].data;
    float2 &low = pair[j % 2 * 2], &high = pair[j % 2 * 2 + 1];
    low.x += x.x, low.y += x.y, high.x += x.z, high.y += x.w;
}
// Sums over the four threads that share two rows, of each row.
__device__ __forceinline__ float2 quad_sum(float2 v) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
        v.x += __shfl_xor_sync(kittens::MASK_ALL, v.x, lanes);
        v.y += __shfl_xor_sync(kittens::MASK_ALL, v.y, lanes);
    }
    return v;
}
// A pair of factors as two 16-bit terms each: its rounding, and that of what it leaves.
template <typename T2> struct SplitPair {
    T2 high, low;
    __device__ __forceinline__ SplitPair(float2 x) {
        using to = kittens::base_types::convertor<T2, float2>;
        high = to::convert(x);
        const float2 back = kittens::base_types::convertor<float2, T2>::convert(high);
        low = to::convert({x.x - back.x, x.y - back.y});
    }
};
__device__ __forceinline__ void add(float4 &sum, float4 x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; }

}  // namespace flashmhf
