// Turns fp32 tiles in fragment order into rows: sums the parts of each tile in order, then converts or adds.
#pragma once

#include "backward_params.h"
#include "kernels/backward_policy.h"
#include "kittens.cuh"

namespace flashmhf {

// One CTA of 128 threads a tile; through shared memory, so that rows are written 16 bytes a thread.
template <int d_h, typename T> __global__ void __launch_bounds__(128) flashmhf_backward_collect(const CollectParams p) {
    constexpr int vector = 16 / sizeof(T), padded = d_h + vector;
    __shared__ __align__(16) T rows[backward_rows][padded];
    const int thread = threadIdx.x, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    const int tile = p.first_tile + blockIdx.x, group = tile / p.group_tiles;
    const int64_t first = static_cast<int64_t>(tile - group * p.group_tiles) * backward_rows;
    const int valid = static_cast<int>(min(static_cast<int64_t>(backward_rows), p.group_rows - first));
    const int64_t start = (group / p.inner_groups) * p.outer_step + (group % p.inner_groups) * p.inner_step + first * p.row_step;
    const float4 *src = reinterpret_cast<const float4 *>(p.tiles + blockIdx.x * p.parts * p.part_stride) + thread;

    auto put = [&](int col, float4 sum) {
        if (p.accumulate) {
            auto add = [&](int at, float2 pair) {
                if (at >= valid) return;
                auto *dst = reinterpret_cast<float2 *>(static_cast<float *>(p.out) + (start + at * p.row_step) * d_h + col);
                const float2 old = *dst;
                *dst = {old.x + pair.x, old.y + pair.y};
            };
            add(row, {sum.x, sum.y});
            add(row + 8, {sum.z, sum.w});
        } else {
            using T2 = typename kittens::base_types::packing<T>::packed_type;
            using to = kittens::base_types::convertor<T2, float2>;
            *reinterpret_cast<T2 *>(&rows[row][col]) = to::convert({sum.x, sum.y});
            *reinterpret_cast<T2 *>(&rows[row + 8][col]) = to::convert({sum.z, sum.w});
        }
    };
    constexpr int batch = 4;  // loads in flight
#pragma unroll 1
    for (int first_j = 0; first_j < d_h / 8; first_j += batch) {
        float4 sums[batch];
#pragma unroll
        for (int i = 0; i < batch; ++i) sums[i] = __ldcs(src + 128 * (first_j + i));
#pragma unroll 1
        for (int part = 1; part < p.parts; ++part)
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                const float4 v = __ldcs(src + 128 * (first_j + i) + part * (p.part_stride / 4));
                sums[i] = {sums[i].x + v.x, sums[i].y + v.y, sums[i].z + v.z, sums[i].w + v.w};
            }
#pragma unroll
        for (int i = 0; i < batch; ++i) put(8 * (first_j + i) + 2 * (lane % 4), sums[i]);
    }
    if (p.accumulate) return;
    __syncthreads();
    for (int i = thread; i < valid * (d_h / vector); i += 128) {
        const int at = i / (d_h / vector), col = i % (d_h / vector) * vector;
        *reinterpret_cast<uint4 *>(static_cast<T *>(p.out) + (start + at * p.row_step) * d_h + col) = *reinterpret_cast<const uint4 *>(&rows[at][col]);
    }
}

// fp32 sums to the element type.
template <typename T> __global__ void __launch_bounds__(256) flashmhf_backward_round(const float *in, T *out, int64_t count) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll)
        out[i] = kittens::base_types::convertor<T, float>::convert(in[i]);
}

}  // namespace flashmhf
