// The router in the backward, first part: R = sigmoid(P) / (sum_e sigmoid(P) + eps) with P = Q W, computed again before the main kernels.
#pragma once

#include "backward/params.h"
#include "backward/policy.h"
#include "backward/swiglu_grad.cuh"

namespace flashmhf {

// A row tile in q (strided) and in the dense [T, H, ...] tensors.
struct RouterTile : TokenTile {
    int rows;  // that hold a token
    __device__ __forceinline__ RouterTile(const RouterParams &g, int index)
        : TokenTile(index, g.row_tiles),
          rows(static_cast<int>(min(static_cast<int64_t>(tile_rows), g.length - token()))) {}
    __device__ __forceinline__ int64_t q_offset(const RouterParams &g, int head, int row) const {
        return sequence * g.q.batch_stride + (token() + row) * g.q.token_stride + head * g.q.head_stride;
    }
    __device__ __forceinline__ int64_t dense_row(const RouterParams &g, int head, int row) const {
        return g.dense.index(sequence, token() + row) * g.heads + head;
    }
};

// Writes R and 1 / (sum + eps), and clears the sums that the main kernels add to. A CTA of four warps takes every gridDim.x-th tile of a
// head; a warp multiplies its 16 rows by W with mma.sync. Thread t of a quad holds d_h = 32 i + 8 t .. + 7 of Q: any order is right that W
// has too.
template <int d_h, typename T>
__global__ void __launch_bounds__(row_tile_threads, d_h > 128 ? 3 : 5) flashmhf_gate_rows(const __grid_constant__ RouterParams p) {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    constexpr int chunk = gate_chunk_columns, blocks = chunk / 8, steps = d_h / 16;
    __shared__ uint4 fragments[blocks][steps][32];  // B fragments of W: two words of its rounding, and two of what that leaves of an fp32 W
    const int head = blockIdx.y, thread = threadIdx.x, lane = thread % 32, g = lane / 4, t = lane % 4, row = thread / 32 * 16 + g;
    const int tiles = p.batch * p.row_tiles;

    const int64_t zeros = p.sums_floats / 4, block = blockIdx.y * gridDim.x + blockIdx.x, all = gridDim.x * gridDim.y;
    for (int64_t i = zeros * block / all + thread, end = zeros * (block + 1) / all; i < end; i += 128)
        reinterpret_cast<float4 *>(p.sums)[i] = {};

    auto stage_w = [&](int first) {
        __syncthreads();  // the chunk before has been read
        for (int i = thread; i < blocks * steps * 32; i += 128) {
            const int l = i % 32, j = i / 32 % steps, e = first + i / 32 / steps * 8 + l / 4, k = j / 2 * 32 + l % 4 * 8 + j % 2 * 4;
            const int64_t at = (static_cast<int64_t>(head) * d_h + k) * p.subnets + e;
            float w[4] = {};
            if (e < p.subnets)
#pragma unroll
                for (int n = 0; n < 4; ++n) w[n] = load_real<T>(p.w, at + n * p.subnets, p.w_is_float);
            const SplitPair<T2> first_two({w[0], w[1]}), last_two({w[2], w[3]});
            auto bits = [](const T2 &x) { return reinterpret_cast<const uint32_t &>(x); };
            fragments[i / 32 / steps][j][l] = {bits(first_two.high), bits(last_two.high), bits(first_two.low), bits(last_two.low)};
        }
        __syncthreads();
    };
    const bool one_chunk = p.subnets <= chunk;
    if (one_chunk) stage_w(0);

#pragma unroll 1
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        const RouterTile tile(p, index);
        uint4 q[2][steps / 2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const T *src = static_cast<const T *>(p.q.data) + tile.q_offset(p, head, min(row + 8 * half, tile.rows - 1)) + 8 * t;
#pragma unroll
            for (int i = 0; i < steps / 2; ++i) q[half][i] = __ldcs(reinterpret_cast<const uint4 *>(src + 32 * i));
        }
        // sigma of sub-networks first + 8 b + 2t, + 1, of row g, then of row g + 8; 0 beyond E. The sums need all sub-networks before the
        // first weight is written: a chunk of them stays in registers meanwhile.
        float s[blocks][4];
        float2 sum = {0.f, 0.f};
        auto load_chunk = [&](int first, bool add) {
            if (!one_chunk) stage_w(first);
#pragma unroll
            for (int b = 0; b < blocks; ++b) {
                if (first + 8 * b >= p.subnets) break;
                s[b][0] = s[b][1] = s[b][2] = s[b][3] = 0.f;
#pragma unroll
                for (int j = 0; j < steps; ++j) {
                    const uint4 &low = q[0][j / 2], &high = q[1][j / 2], w = fragments[b][j][lane];
                    const uint32_t words[4] = {j % 2 ? low.z : low.x, j % 2 ? high.z : high.x, j % 2 ? low.w : low.y,
                                               j % 2 ? high.w : high.y};
                    mma_16x8(s[b], reinterpret_cast<const T2(&)[4]>(words), w.x, w.y);
                    if (p.w_is_float) mma_16x8(s[b], reinterpret_cast<const T2(&)[4]>(words), w.z, w.w);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) s[b][i] = first + 8 * b + 2 * t + i % 2 < p.subnets ? sigmoid_fast(s[b][i]) : 0.f;
                if (!add) continue;
                sum.x += s[b][0] + s[b][1];
                sum.y += s[b][2] + s[b][3];
            }
        };
        for (int first = 0; first < p.subnets; first += chunk) load_chunk(first, true);
        sum = quad_sum(sum);
        const float2 scale = {1.f / (sum.x + p.eps), 1.f / (sum.y + p.eps)};
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (t == 0 && row + 8 * half < tile.rows) p.scale[tile.dense_row(p, head, row + 8 * half)] = half ? scale.y : scale.x;
        for (int first = 0; first < p.subnets; first += chunk) {
            if (!one_chunk) load_chunk(first, false);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (row + 8 * half >= tile.rows) continue;
                float *out = p.r + tile.dense_row(p, head, row + 8 * half) * p.subnets;
                const float factor = half ? scale.y : scale.x;
#pragma unroll
                for (int b = 0; b < blocks; ++b) {
                    const int e = first + 8 * b + 2 * t;
                    const float2 r = {s[b][2 * half] * factor, s[b][2 * half + 1] * factor};
                    if (e + 1 < p.subnets && p.subnets % 2 == 0) *reinterpret_cast<float2 *>(out + e) = r;
                    else {
                        if (e < p.subnets) out[e] = r.x;
                        if (e + 1 < p.subnets) out[e + 1] = r.y;
                    }
                }
            }
        }
    }
}

}  // namespace flashmhf
