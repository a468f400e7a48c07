// The router in the backward: R = sigmoid(P) / (sum_e sigmoid(P) + eps) with P = Q W is computed again before the main kernels; after them
// its gradient dP goes into dW here, and into dQ where the dQ tiles are written (backward_collect.cuh).
#pragma once

#include "backward_params.h"
#include "kernels/backward_math.cuh"
#include "kernels/backward_policy.h"

namespace flashmhf {

// Tokens of one tile of 64 in q (strided) and in the dense [T, H, ...] tensors.
struct GateTile {
    int sequence, first, rows;
    __device__ __forceinline__ GateTile(const GateParams &g, int tile)
        : sequence(tile / g.row_tiles), first((tile - sequence * g.row_tiles) * backward_rows),
          rows(static_cast<int>(min(static_cast<int64_t>(backward_rows), g.length - first))) {}
    __device__ __forceinline__ int64_t q_offset(const GateParams &g, int head, int row) const {
        return sequence * g.q_batch + (first + row) * g.q_token + head * g.q_head;
    }
    __device__ __forceinline__ int64_t dense_row(const GateParams &g, int head, int row) const {
        return (sequence * g.dense_batch + (first + row) * g.dense_token) * g.heads + head;
    }
};

// R and 1 / (sum + eps). One CTA of four warps a (tile, head); a warp multiplies its 16 rows by W with mma.sync.
template <int d_h, typename T> __global__ void __launch_bounds__(128) flashmhf_gate_rows(const __grid_constant__ GateParams p) {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    using to = kittens::base_types::convertor<T2, float2>;
    using from = kittens::base_types::convertor<float2, T2>;
    const int head = blockIdx.y, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = threadIdx.x / 32 * 16 + g;
    const GateTile tile(p, blockIdx.x);
    T2 q[d_h / 16][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const T *src = static_cast<const T *>(p.q) + tile.q_offset(p, head, min(row + 8 * half, tile.rows - 1)) + 2 * t;
#pragma unroll
        for (int k = 0; k < d_h / 16; ++k) {
            q[k][half] = *reinterpret_cast<const T2 *>(src + 16 * k);
            q[k][2 + half] = *reinterpret_cast<const T2 *>(src + 16 * k + 8);
        }
    }
    float *out[2] = {p.r + tile.dense_row(p, head, row) * p.subnets, p.r + tile.dense_row(p, head, row + 8) * p.subnets};
    float2 sum = {0.f, 0.f};
    for (int e = 0; e < p.subnets; e += 8) {
        float s[4] = {0.f, 0.f, 0.f, 0.f};
        const int64_t at = (static_cast<int64_t>(head) * d_h + 2 * t) * p.subnets + min(e + g, p.subnets - 1);
#pragma unroll
        for (int k = 0; k < d_h / 16; ++k) {
            const int64_t x = at + static_cast<int64_t>(16 * k) * p.subnets;
            auto multiply = [&](T2 b0, T2 b1) { mma_16x8(s, q[k], reinterpret_cast<const uint32_t &>(b0), reinterpret_cast<const uint32_t &>(b1)); };
            if (p.w_is_float) {  // W = its rounding plus a remainder
                const float *w = static_cast<const float *>(p.w) + x;
                const float2 w0 = {__ldg(w), __ldg(w + p.subnets)}, w1 = {__ldg(w + 8 * p.subnets), __ldg(w + 9 * p.subnets)};
                const T2 high0 = to::convert(w0), high1 = to::convert(w1);
                const float2 back0 = from::convert(high0), back1 = from::convert(high1);
                multiply(high0, high1);
                multiply(to::convert({w0.x - back0.x, w0.y - back0.y}), to::convert({w1.x - back1.x, w1.y - back1.y}));
            } else {
                const T *w = static_cast<const T *>(p.w) + x;
                multiply(T2{__ldg(w), __ldg(w + p.subnets)}, T2{__ldg(w + 8 * p.subnets), __ldg(w + 9 * p.subnets)});
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int column = e + 2 * t + j % 2;
            if (column >= p.subnets) continue;
            s[j] = sigmoid_fast(s[j]);
            (j < 2 ? sum.x : sum.y) += s[j];
            if (row + j / 2 * 8 < tile.rows) out[j / 2][column] = s[j];
        }
    }
    sum = quad_sum(sum);
    const float2 scale = {1.f / (sum.x + p.eps), 1.f / (sum.y + p.eps)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (row + 8 * half >= tile.rows) continue;
        const float factor = half ? scale.y : scale.x;
        if (t == 0) p.scale[tile.dense_row(p, head, row + 8 * half)] = factor;
        for (int e = 0; e < p.subnets; e += 8)  // what this thread wrote above
            for (int j = 0; j < 2; ++j)
                if (e + 2 * t + j < p.subnets) out[half][e + 2 * t + j] *= factor;
    }
}

// dP = scale (dR - sum_f dR_f R_f) sigma (1 - sigma), and this CTA's part of dW = Q^T dP. A CTA takes every gridDim.x-th tile of a head,
// for 32 sub-networks. A thread reads only the elements of R and dR whose dP it writes, so with one CTA a row dP may take their place.
template <int d_h, typename T> __global__ void __launch_bounds__(256) flashmhf_gate_grad(const __grid_constant__ GateParams p) {
    constexpr int chunk = gate_chunk_columns, lanes = d_h <= 64 ? 4 : d_h <= 128 ? 2 : 1, width = chunk / lanes;  // threads of a d_h column, their sub-networks
    __shared__ T q[backward_rows][d_h];
    __shared__ __align__(16) float dp[backward_rows][chunk];
    kittens::pdl::wait();
    const int head = blockIdx.y, first = blockIdx.z * chunk, count = min(chunk, p.subnets - first), thread = threadIdx.x;
    const int column = thread % d_h, part = thread / d_h;
    float sums[width] = {};
    for (int index = blockIdx.x; index < p.batch * p.row_tiles; index += gridDim.x) {
        const GateTile tile(p, index);
        __syncthreads();
        {
            const int row = thread / 4, t = thread % 4;
            const bool valid = row < tile.rows;
            const int64_t at = tile.dense_row(p, head, min(row, tile.rows - 1));
            const int64_t dr_step = p.dr_sums ? static_cast<int64_t>(p.batch) * p.row_tiles * backward_rows : 1;
            const float *r = p.r + at * p.subnets;
            const float *dr = p.dr_sums ? p.dr_sums + head * p.subnets * dr_step + static_cast<int64_t>(index) * backward_rows + row
                                        : p.dr + at * p.subnets;
            float dot = 0.f;
            for (int e = t; valid && e < p.subnets; e += 4) dot = fmaf(dr[e * dr_step], r[e], dot);
            dot += __shfl_xor_sync(kittens::MASK_ALL, dot, 1);
            dot += __shfl_xor_sync(kittens::MASK_ALL, dot, 2);
            const float scale = p.scale[at], total = 1.f / scale;
            for (int e = t; valid && e < chunk; e += 4) {
                float x = 0.f;
                if (e < count) {
                    const float s = r[first + e] * total;
                    x = (dr[(first + e) * dr_step] - dot) * scale * s * (1.f - s);
                    p.dp[at * p.subnets + first + e] = x;
                }
                dp[row][e] = x;
            }
            for (int i = thread; p.dw && i < tile.rows * (d_h / 8); i += 256) {
                const int at = i / (d_h / 8), c = i % (d_h / 8) * 8;
                *reinterpret_cast<uint4 *>(&q[at][c]) = *reinterpret_cast<const uint4 *>(static_cast<const T *>(p.q) + tile.q_offset(p, head, at) + c);
            }
        }
        __syncthreads();
        if (!p.dw || part >= lanes) continue;
#pragma unroll 2
        for (int row = 0; row < tile.rows; ++row) {
            const float x = kittens::base_types::convertor<float, T>::convert(q[row][column]);
            const float4 *src = reinterpret_cast<const float4 *>(&dp[row][part * width]);
#pragma unroll
            for (int i = 0; i < width / 4; ++i) {
                const float4 v = src[i];
                sums[4 * i] = fmaf(x, v.x, sums[4 * i]);
                sums[4 * i + 1] = fmaf(x, v.y, sums[4 * i + 1]);
                sums[4 * i + 2] = fmaf(x, v.z, sums[4 * i + 2]);
                sums[4 * i + 3] = fmaf(x, v.w, sums[4 * i + 3]);
            }
        }
    }
    if (!p.dw || part >= lanes) return;
    float *out = p.dw_parts + ((static_cast<int64_t>(blockIdx.x) * p.heads + head) * d_h + column) * p.subnets + first;
#pragma unroll
    for (int i = 0; i < width; ++i)
        if (part * width + i < count) out[part * width + i] = sums[i];
}

// The parts of dW in order, to W's type.
template <typename T> __global__ void __launch_bounds__(256) flashmhf_gate_sum(const __grid_constant__ GateParams p, int64_t count) {
    kittens::pdl::wait();
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
        float sum = 0.f;
        for (int part = 0; part < p.dw_part_count; ++part) sum += p.dw_parts[part * count + i];
        if (p.w_is_float) static_cast<float *>(p.dw)[i] = sum;
        else static_cast<T *>(p.dw)[i] = kittens::base_types::convertor<T, float>::convert(sum);
    }
}

}  // namespace flashmhf
