// The router in the backward: R = sigmoid(P) / (sum_e sigmoid(P) + eps) with P = Q W is computed again before the main kernels; after them
// its gradient dP goes into dW and, with the fp32 tiles of dQ, into dq.
#pragma once

#include "backward/params.h"
#include "backward/policy.h"
#include "backward/rows.cuh"
#include "backward/swiglu_grad.cuh"
#include "common/real.cuh"
#include "common/token_tile.cuh"

namespace flashmhf {

// A row tile in q (strided) and in the dense [T, H, ...] tensors.
struct RouterTile : TokenTile {
    int rows;  // that hold a token
    __device__ __forceinline__ RouterTile(const RouterParams &g, int index)
        : TokenTile(index, g.row_tiles),
          rows(static_cast<int>(min(static_cast<int64_t>(tile_rows), g.length - token()))) {}
    __device__ __forceinline__ int64_t q_offset(const RouterParams &g, int head, int row) const {
        return sequence * g.q_batch + (token() + row) * g.q_token + head * g.q_head;
    }
    __device__ __forceinline__ int64_t dense_row(const RouterParams &g, int head, int row) const {
        return (sequence * g.dense_batch + (token() + row) * g.dense_token) * g.heads + head;
    }
};

// Writes R and 1 / (sum + eps), and clears the sums that the main kernels add to. A CTA of four warps takes every gridDim.x-th tile of a
// head; a warp multiplies its 16 rows by W with mma.sync. Thread t of a quad holds d_h = 32 i + 8 t .. + 7 of Q: any order is right that W
// has too.
template <int d_h, typename T>
__global__ void __launch_bounds__(128, d_h == 256 ? 3 : 5) flashmhf_gate_rows(const __grid_constant__ RouterParams p) {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    using to = kittens::base_types::convertor<T2, float2>;
    using from = kittens::base_types::convertor<float2, T2>;
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
            const T2 high[2] = {to::convert({w[0], w[1]}), to::convert({w[2], w[3]})};
            const float2 back[2] = {from::convert(high[0]), from::convert(high[1])};
            const T2 low[2] = {to::convert({w[0] - back[0].x, w[1] - back[0].y}), to::convert({w[2] - back[1].x, w[3] - back[1].y})};
            auto bits = [](const T2 &x) { return reinterpret_cast<const uint32_t &>(x); };
            fragments[i / 32 / steps][j][l] = {bits(high[0]), bits(high[1]), bits(low[0]), bits(low[1])};
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
            const T *src = static_cast<const T *>(p.q) + tile.q_offset(p, head, min(row + 8 * half, tile.rows - 1)) + 8 * t;
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

// Factors of the router's small products as two bf16 terms, whatever T is: dP has fp32's range. The remainder is below 2^-17.
struct SplitPair {
    kittens::bf16_2 high, low;
    __device__ __forceinline__ SplitPair(float2 x) {
        using to = kittens::base_types::convertor<kittens::bf16_2, float2>;
        high = to::convert(x);
        const float2 back = kittens::base_types::convertor<float2, kittens::bf16_2>::convert(high);
        low = to::convert({x.x - back.x, x.y - back.y});
    }
};

// Shared memory of flashmhf_gate_grad: what all warps read, and what each has for its own 16 rows.
template <int d_h, typename T> struct GateGradShared {
    static constexpr int chunk = gate_chunk_columns, cols = gate_staged_columns<d_h>;
    uint4 w[chunk / 16][d_h / 8][32];     // B fragments of W^T: high terms of k and k + 8, low terms of both
    alignas(16) T q[tile_rows][d_h + 8];  // padded: ldmatrix reads eight rows from eight different groups of banks
    StagedTile<cols> staged;
};

// dP = scale (dR - sum_f dR_f R_f) sigma (1 - sigma); dq = dQ + dP W^T; this CTA's part of dW = Q^T dP. A CTA takes every gridDim.x-th tile
// of a head. A warp takes 16 tokens of each tile and works alone until the parts of dW are summed. blockIdx.z: which sub-networks of dW;
// the CTAs of blockIdx.z = 0 write dq. Products are mma.sync with dP in registers: as computed, dP is the A operand of dP W^T; transposed 8
// x 8 by movmatrix, it is the B operand of Q^T dP.
template <int d_h, typename T> __global__ void __launch_bounds__(128, 2) flashmhf_gate_grad(const __grid_constant__ RouterParams p) {
    using Shared = GateGradShared<d_h, T>;
    using bf16_2 = kittens::bf16_2;
    constexpr int chunk = Shared::chunk, steps = chunk / 16, cols = Shared::cols;
    constexpr int dw_columns = gate_dw_columns<d_h>, dw_blocks = dw_columns / 8, dw_steps = dw_columns / 16;
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);
    kittens::pdl::wait();
    const int head = blockIdx.y, thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int dw_first = blockIdx.z * dw_columns, tiles = p.batch * p.row_tiles;
    const bool needs_dq = p.dq && blockIdx.z == 0, one_chunk = p.subnets <= chunk;

    auto stage_w = [&](int first) {
        for (int i = thread; i < steps * (d_h / 8) * 32; i += 128) {
            const int l = i % 32, j = i / 32 % (d_h / 8), s = i / 32 / (d_h / 8), e = first + 16 * s + l % 4 * 2;
            const int64_t at = (static_cast<int64_t>(head) * d_h + 8 * j + l / 4) * p.subnets;
            auto load = [&](int e) { return e < p.subnets ? load_real<T>(p.w, at + e, p.w_is_float) : 0.f; };
            const SplitPair k0({load(e), load(e + 1)}), k8({load(e + 8), load(e + 9)});
            shared.w[s][j][l] = {reinterpret_cast<const uint32_t &>(k0.high), reinterpret_cast<const uint32_t &>(k8.high),
                                 reinterpret_cast<const uint32_t &>(k0.low), reinterpret_cast<const uint32_t &>(k8.low)};
        }
    };
    if (needs_dq && one_chunk) {
        stage_w(0);
        __syncthreads();
    }

    float dw[d_h / 16][dw_blocks][4] = {};
#pragma unroll 1
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        const RouterTile tile(p, index);
        const int first_row = 16 * warp, row[2] = {min(first_row + g, tile.rows - 1), min(first_row + g + 8, tile.rows - 1)};
        const float4 *dq_tile = reinterpret_cast<const float4 *>(p.query_tiles) +
                                (static_cast<int64_t>(head) * tiles + index) * p.query_parts * (tile_rows * d_h / 4) + thread;
        auto fetch_dq = [&](int column) {
#pragma unroll
            for (int j = 0; j < cols / 8; ++j) copy_16_bytes_async(&shared.staged.fragment(j, thread), dq_tile + (column / 8 + j) * 128);
        };
        __syncwarp();                      // the previous tile's Q and staged rows have been read
        constexpr bool early = d_h < 256;  // arrives with R and dR, where that leaves registers
        if (early && needs_dq) fetch_dq(0);
        if (p.dw) {
            for (int i = lane; i < 16 * (d_h / 8); i += 32) {
                const int r = first_row + i / (d_h / 8), c = i % (d_h / 8) * 8;
                copy_16_bytes_async(&shared.q[r][c], static_cast<const T *>(p.q) + tile.q_offset(p, head, min(r, tile.rows - 1)) + c);
            }
        }

        // R and dR of rows g and g + 8, sub-networks first + 16 s + 2t + {0, 1, 8, 9}; zero beyond E
        const int64_t dr_step = p.dr_sums ? static_cast<int64_t>(tiles) * tile_rows : 1;
        const float *r_row[2], *dr_row[2];
        float sum[2];  // of the sigmoids, + eps; 0 where there is no token
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64_t at = tile.dense_row(p, head, row[half]);
            r_row[half] = p.r + at * p.subnets;
            dr_row[half] = p.dr_sums ? p.dr_sums + head * p.subnets * dr_step + static_cast<int64_t>(index) * tile_rows + row[half]
                                     : p.dr + at * p.subnets;
            sum[half] = first_row + g + 8 * half < tile.rows ? 1.f / p.scale[at] : 0.f;
        }
        float r[steps][2][4], dr[steps][2][4];
        auto load = [&](int first) {
#pragma unroll
            for (int s = 0; s < steps; ++s)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int e = first + 16 * s + 2 * t + i % 2 + i / 2 * 8;
                        r[s][half][i] = e < p.subnets ? r_row[half][e] : 0.f;
                        dr[s][half][i] = e < p.subnets ? dr_row[half][e * dr_step] : 0.f;
                    }
        };
        float2 dot = {0.f, 0.f};
        for (int first = 0; first < p.subnets; first += chunk) {
            load(first);
#pragma unroll
            for (int s = 0; s < steps; ++s)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    dot.x = fmaf(dr[s][0][i], r[s][0][i], dot.x);
                    dot.y = fmaf(dr[s][1][i], r[s][1][i], dot.y);
                }
        }
        dot = quad_sum(dot);
        // dP of the loaded sub-networks as A fragments: rows g, g + 8, then the same of columns + 8; 0 where there is no token
        bf16_2 high[steps][4], low[steps][4];
        auto gradients = [&] {
#pragma unroll
            for (int s = 0; s < steps; ++s)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int pair = 0; pair < 2; ++pair) {
                        auto element = [&](int i) {
                            const float x = r[s][half][i];  // sigma / sum
                            return sum[half] > 0.f ? (dr[s][half][i] - (half ? dot.y : dot.x)) * x * (1.f - x * sum[half]) : 0.f;
                        };
                        const SplitPair x({element(2 * pair), element(2 * pair + 1)});
                        high[s][2 * pair + half] = x.high;
                        low[s][2 * pair + half] = x.low;
                    }
        };

        if (!early && needs_dq) fetch_dq(0);
        if (p.dw) {
            if (!one_chunk) load(dw_first);
            gradients();
            wait_copied_words();
            __syncwarp();
            // dP of 8 sub-networks as the B operand: rows 0-7, then 8-15, of this warp's tokens
            auto transposed = [&](const bf16_2(&x)[steps][4], int n, uint32_t (&b)[2]) {
                // with one chunk the fragments hold all sub-networks, else those from dw_first on
                const int s = n / 2 + (dw_columns < chunk && one_chunk ? static_cast<int>(blockIdx.z) * dw_steps : 0);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t word = 0;
#pragma unroll
                    for (int i = 0; i < steps; ++i)
                        if (i == s) word = reinterpret_cast<const uint32_t &>(x[i][n % 2 * 2 + half]);
                    b[half] = transpose_8x8(word);
                }
            };
            constexpr bool ahead = d_h < 256;  // once for all rows of dW, where that leaves registers
            uint32_t b_high[dw_blocks][2], b_low[dw_blocks][2];
            if constexpr (ahead) {
#pragma unroll
                for (int n = 0; n < dw_blocks; ++n) transposed(high, n, b_high[n]), transposed(low, n, b_low[n]);
            }
#pragma unroll
            for (int m = 0; m < d_h / 16; ++m) {
                using T2 = typename kittens::base_types::packing<T>::packed_type;
                T2 q[4];
                kittens::move<T2>::ldsm4t(q[0], q[1], q[2], q[3],
                                          shared_address(&shared.q[first_row + lane % 8 + lane / 16 * 8][16 * m + lane / 8 % 2 * 8]));
                bf16_2 q_high[4], q_low[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if constexpr (std::is_same_v<T, kittens::bf16>) q_high[i] = q[i];
                    else {
                        const SplitPair x(kittens::base_types::convertor<float2, kittens::half_2>::convert(q[i]));
                        q_high[i] = x.high;
                        q_low[i] = x.low;
                    }
                }
#pragma unroll
                for (int n = 0; n < dw_blocks; ++n) {
                    if (dw_first + 8 * n >= p.subnets) break;
                    if constexpr (!ahead) transposed(high, n, b_high[n]), transposed(low, n, b_low[n]);
                    mma_16x8(dw[m][n], q_high, b_high[n][0], b_high[n][1]);
                    mma_16x8(dw[m][n], q_high, b_low[n][0], b_low[n][1]);
                    if constexpr (!std::is_same_v<T, kittens::bf16>) mma_16x8(dw[m][n], q_low, b_high[n][0], b_high[n][1]);
                }
            }
        }

        if (needs_dq) {
            if (!p.dw && one_chunk) gradients();
            const int64_t start = tile.sequence * p.dense_batch + tile.token() * p.dense_token;
#pragma unroll 1
            for (int column = 0; column < d_h; column += cols) {
                if (column > 0) {
                    __syncwarp();  // the columns before have been read
                    fetch_dq(column);
                }
                if (column > 0 || !p.dw) wait_copied_words();
                for (int first = 0; first < p.subnets; first += chunk) {
                    if (!one_chunk) {
                        __syncthreads();
                        stage_w(first);
                        __syncthreads();
                        load(first);
                        gradients();
                    }
#pragma unroll(d_h == 256 ? 1 : 4)  // more would spill
                    for (int j = 0; j < cols / 8; ++j) {
                        float4 &staged = shared.staged.fragment(j, thread);
                        float dq[4] = {};
                        auto add = [&](float4 v) { dq[0] += v.x, dq[1] += v.y, dq[2] += v.z, dq[3] += v.w; };
                        add(staged);
                        if (first == 0)
                            for (int part = 1; part < p.query_parts; ++part)
                                add(__ldcs(dq_tile + (column / 8 + j) * 128 + part * (tile_rows * d_h / 4)));
#pragma unroll
                        for (int s = 0; s < steps; ++s) {
                            if (first + 16 * s >= p.subnets) break;
                            const uint4 w = shared.w[s][column / 8 + j][lane];
                            mma_16x8(dq, high[s], w.x, w.y);
                            mma_16x8(dq, high[s], w.z, w.w);
                            mma_16x8(dq, low[s], w.x, w.y);
                        }
                        staged = {dq[0], dq[1], dq[2], dq[3]};
                    }
                }
                __syncwarp();
                shared.staged.template write<T>(static_cast<T *>(p.dq) + (start * p.dq_heads + head) * d_h + column,
                                                p.dense_token * p.dq_heads * d_h, first_row, min(tile.rows, first_row + 16), false, lane,
                                                32);
            }
        }
    }
    if (!p.dw) return;
    // the warps' sums, in order; one warp at a time holds the part in shared memory
    auto *part = reinterpret_cast<float *>(&shared);  // [d_h][dw_columns]
    static_assert(sizeof(float) * d_h * dw_columns <= sizeof(Shared));
    for (int adder = 0; adder < 4; ++adder) {
        __syncthreads();
        if (warp != adder) continue;
#pragma unroll
        for (int m = 0; m < d_h / 16; ++m)
#pragma unroll
            for (int n = 0; n < dw_blocks; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float &sum = part[(16 * m + g + i / 2 * 8) * dw_columns + 8 * n + 2 * t + i % 2];
                    sum = adder == 0 ? dw[m][n][i] : sum + dw[m][n][i];
                }
    }
    __syncthreads();
    const int count = min(dw_columns, p.subnets - dw_first);
    float *out = p.dw_parts + (static_cast<int64_t>(blockIdx.x) * p.heads + head) * d_h * p.subnets + dw_first;
    for (int i = thread; i < d_h * count; i += 128) out[i / count * p.subnets + i % count] = part[i / count * dw_columns + i % count];
}

// The parts of dW in order, to W's type.
template <typename T> __global__ void __launch_bounds__(256) flashmhf_gate_sum(const __grid_constant__ RouterParams p, int64_t count) {
    kittens::pdl::wait();
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
        float sum = 0.f;
        for (int part = 0; part < p.dw_part_count; ++part) sum += p.dw_parts[part * count + i];
        store_real<T>(p.dw, i, p.w_is_float, sum);
    }
}

}  // namespace flashmhf
