// The router in the backward, second part: the gradient dP of P = Q W goes into dW and, with the fp32 tiles of dQ, into dq.
#pragma once

#include "backward/gate_rows.cuh"
#include "backward/rows.cuh"
#include "backward/swiglu_grad.cuh"

namespace flashmhf {

// Factors of the router's small products, in bf16 whatever T is: dP has fp32's range. The remainder is below 2^-17.
using RouterPair = SplitPair<kittens::bf16_2>;

// Shared memory of flashmhf_gate_grad: what all warps read, and what each has for its own 16 rows.
template <int d_h, typename T> struct GateGradShared {
    static constexpr int chunk = gate_chunk_columns, cols = gate_staged_columns<d_h>;
    uint4 w[chunk / 16][d_h / 8][32];     // B fragments of W^T: high terms of k and k + 8, low terms of both
    alignas(16) T q[tile_rows][d_h + 8];  // padded: ldmatrix reads eight rows from eight different groups of banks
    StagedTile<cols> staged;
};

// W^T of a chunk of sub-networks from `first` on as B fragments, by all threads of the CTA; zero beyond E.
template <int d_h, typename T>
__device__ __forceinline__ void stage_w(GateGradShared<d_h, T> &shared, const RouterParams &p, int head, int first) {
    auto bits = [](const kittens::bf16_2 &x) { return reinterpret_cast<const uint32_t &>(x); };
    for (int i = threadIdx.x; i < shared.chunk / 16 * (d_h / 8) * 32; i += 128) {
        const int l = i % 32, j = i / 32 % (d_h / 8), s = i / 32 / (d_h / 8), e = first + 16 * s + l % 4 * 2;
        const int64_t at = (static_cast<int64_t>(head) * d_h + 8 * j + l / 4) * p.subnets;
        auto load = [&](int e) { return e < p.subnets ? load_real<T>(p.w, at + e, p.w_is_float) : 0.f; };
        const RouterPair k0({load(e), load(e + 1)}), k8({load(e + 8), load(e + 9)});
        shared.w[s][j][l] = {bits(k0.high), bits(k8.high), bits(k0.low), bits(k8.low)};
    }
}

// dP of a thread's two rows, as A fragments: rows g, g + 8, then the same of columns + 8. 0 where there is no token.
template <int steps> struct RouterGrads {
    kittens::bf16_2 high[steps][4], low[steps][4];
};

// R and dR of rows g and g + 8 of a warp's 16 tokens, a chunk of sub-networks at once.
template <int chunk> struct GateGradRows {
    static constexpr int steps = chunk / 16;
    const RouterParams &p;
    int64_t dr_step;  // from a sub-network of dR to the next
    const float *r_row[2], *dr_row[2];
    float sum[2];  // of the sigmoids, + eps; 0 where there is no token
    float r[steps][2][4], dr[steps][2][4];

    __device__ __forceinline__ GateGradRows(const RouterParams &p, const RouterTile &tile, int index, int head, int first_row)
        : p(p),
          dr_step(p.dr_sums ? static_cast<int64_t>(p.batch * p.row_tiles) * tile_rows : 1) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = min(first_row + 8 * half, tile.rows - 1);
            const int64_t at = tile.dense_row(p, head, row);
            r_row[half] = p.r + at * p.subnets;
            dr_row[half] =
                p.dr_sums ? p.dr_sums + head * p.subnets * dr_step + static_cast<int64_t>(index) * tile_rows + row : p.dr + at * p.subnets;
            sum[half] = first_row + 8 * half < tile.rows ? 1.f / p.scale[at] : 0.f;
        }
    }
    // Sub-networks first + 16 s + 2t + {0, 1, 8, 9}; zero beyond E.
    __device__ __forceinline__ void load(int first) {
        const int t = threadIdx.x % 4;
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
    }
    // sum_e r dR of both rows, over all sub-networks; the last chunk stays loaded.
    __device__ __forceinline__ float2 dot() {
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
        return quad_sum(dot);
    }
    // dP = r (dR - dot) (1 - sigma) of the loaded sub-networks, with r = sigma / sum.
    __device__ __forceinline__ void gradients(float2 dot, RouterGrads<steps> &dp) const {
#pragma unroll
        for (int s = 0; s < steps; ++s)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    auto element = [&](int i) {
                        const float x = r[s][half][i];
                        return sum[half] > 0.f ? (dr[s][half][i] - (half ? dot.y : dot.x)) * x * (1.f - x * sum[half]) : 0.f;
                    };
                    const RouterPair x({element(2 * pair), element(2 * pair + 1)});
                    dp.high[s][2 * pair + half] = x.high;
                    dp.low[s][2 * pair + half] = x.low;
                }
    }
};

// Block n of 8 sub-networks of dP, from step `first` on, as a B operand: rows 0-7, then 8-15, of the warp's tokens.
template <int steps>
__device__ __forceinline__ void transpose_block(const kittens::bf16_2 (&x)[steps][4], int first, int n, uint32_t (&b)[2]) {
    const int s = n / 2 + first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < steps; ++i)
            if (i == s) word = reinterpret_cast<const uint32_t &>(x[i][n % 2 * 2 + half]);
        b[half] = transpose_8x8(word);
    }
}

// dW += Q^T dP of a warp's 16 tokens, which are rows first_row.. of shared.q, for the sub-networks from blockIdx.z * 8 * blocks on. Where
// all sub-networks are one chunk, dp holds all of them, else those that this CTA accumulates.
template <int d_h, typename T, int steps, int blocks>
__device__ __forceinline__ void add_weight_grad(float (&dw)[d_h / 16][blocks][4], const GateGradShared<d_h, T> &shared,
                                                const RouterParams &p, const RouterGrads<steps> &dp, int first_row) {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    constexpr bool exact = std::is_same_v<T, kittens::bf16>;  // Q is its own high term
    constexpr bool ahead = d_h <= 128;                        // once for all rows of dW, where that leaves registers
    const int lane = threadIdx.x % 32, first = blockIdx.z * 8 * blocks;
    const int first_step = blocks / 2 < steps && p.subnets <= 16 * steps ? static_cast<int>(blockIdx.z) * (blocks / 2) : 0;
    uint32_t high[blocks][2], low[blocks][2];
    auto transpose = [&](int n) { transpose_block(dp.high, first_step, n, high[n]), transpose_block(dp.low, first_step, n, low[n]); };
    if constexpr (ahead) {
#pragma unroll
        for (int n = 0; n < blocks; ++n) transpose(n);
    }
#pragma unroll
    for (int m = 0; m < d_h / 16; ++m) {
        T2 q[4];
        kittens::move<T2>::ldsm4t(q[0], q[1], q[2], q[3],
                                  shared_address(&shared.q[first_row + lane % 8 + lane / 16 * 8][16 * m + lane / 8 % 2 * 8]));
        kittens::bf16_2 q_high[4], q_low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (exact) q_high[i] = q[i];
            else {
                const RouterPair x(kittens::base_types::convertor<float2, kittens::half_2>::convert(q[i]));
                q_high[i] = x.high;
                q_low[i] = x.low;
            }
        }
#pragma unroll
        for (int n = 0; n < blocks; ++n) {
            if (first + 8 * n >= p.subnets) break;
            if constexpr (!ahead) transpose(n);
            mma_16x8(dw[m][n], q_high, high[n][0], high[n][1]);
            mma_16x8(dw[m][n], q_high, low[n][0], low[n][1]);
            if constexpr (!exact) mma_16x8(dw[m][n], q_low, high[n][0], high[n][1]);
        }
    }
}

// dQ += dP W^T of the staged columns for the chunk of sub-networks from `first` on; with the first chunk also the other parts of dQ.
template <int d_h, typename T, int steps>
__device__ __forceinline__ void add_query_grad(GateGradShared<d_h, T> &shared, const RouterParams &p, const RouterGrads<steps> &dp,
                                               int column, int first, const float4 *parts) {
    const int thread = threadIdx.x;
#pragma unroll(d_h > 128 ? 1 : 4)  // more would spill
    for (int j = 0; j < shared.cols / 8; ++j) {
        float4 &staged = shared.staged.fragment(j, thread);
        float dq[4] = {};
        auto add = [&](float4 v) { dq[0] += v.x, dq[1] += v.y, dq[2] += v.z, dq[3] += v.w; };
        add(staged);
        if (first == 0)
            for (int part = 1; part < p.query_parts; ++part) add(__ldcs(parts + (column / 8 + j) * 128 + part * (tile_rows * d_h / 4)));
#pragma unroll
        for (int s = 0; s < steps; ++s) {
            if (first + 16 * s >= p.subnets) break;
            const uint4 w = shared.w[s][column / 8 + j][thread % 32];
            mma_16x8(dq, dp.high[s], w.x, w.y);
            mma_16x8(dq, dp.high[s], w.z, w.w);
            mma_16x8(dq, dp.low[s], w.x, w.y);
        }
        staged = {dq[0], dq[1], dq[2], dq[3]};
    }
}

// The four warps' sums, in order, to this CTA's part of dW. One warp at a time holds the part in shared memory.
template <int d_h, typename Shared, int blocks>
__device__ __forceinline__ void store_weight_grad(Shared &shared, const float (&dw)[d_h / 16][blocks][4], float *out, int row_stride,
                                                  int count) {
    constexpr int columns = 8 * blocks;
    const int thread = threadIdx.x, g = thread % 32 / 4, t = thread % 4;
    auto *part = reinterpret_cast<float *>(&shared);  // [d_h][columns]
    static_assert(sizeof(float) * d_h * columns <= sizeof(Shared));
    for (int adder = 0; adder < 4; ++adder) {
        __syncthreads();
        if (thread / 32 != adder) continue;
#pragma unroll
        for (int m = 0; m < d_h / 16; ++m)
#pragma unroll
            for (int n = 0; n < blocks; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float &sum = part[(16 * m + g + i / 2 * 8) * columns + 8 * n + 2 * t + i % 2];
                    sum = adder == 0 ? dw[m][n][i] : sum + dw[m][n][i];
                }
    }
    __syncthreads();
    for (int i = thread; i < d_h * count; i += 128) out[i / count * row_stride + i % count] = part[i / count * columns + i % count];
}

// dP = r (dR - sum_f dR_f r_f) (1 - sigma); dq = dQ + dP W^T; this CTA's part of dW = Q^T dP. A CTA takes every gridDim.x-th tile of a
// head. A warp takes 16 tokens of each tile and works alone until the parts of dW are summed. blockIdx.z: which sub-networks of dW; the
// CTAs of blockIdx.z = 0 write dq. Products are mma.sync with dP in registers: as computed, dP is the A operand of dP W^T; transposed 8 x 8
// by movmatrix, it is the B operand of Q^T dP.
template <int d_h, typename T>
__global__ void __launch_bounds__(row_tile_threads, 2) flashmhf_gate_grad(const __grid_constant__ RouterParams p) {
    using Shared = GateGradShared<d_h, T>;
    constexpr int chunk = Shared::chunk, steps = chunk / 16, cols = Shared::cols;
    constexpr int dw_columns = gate_dw_columns<d_h>, dw_blocks = dw_columns / 8;
    constexpr bool early = d_h <= 128;  // dQ arrives with R and dR, where that leaves registers
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);
    kittens::pdl::wait();
    const int head = blockIdx.y, thread = threadIdx.x, lane = thread % 32, first_row = thread / 32 * 16;
    const int dw_first = blockIdx.z * dw_columns, tiles = p.batch * p.row_tiles;
    const bool needs_dq = p.dq && blockIdx.z == 0, one_chunk = p.subnets <= chunk;
    if (needs_dq && one_chunk) {
        stage_w(shared, p, head, 0);
        __syncthreads();
    }

    float dw[d_h / 16][dw_blocks][4] = {};
#pragma unroll 1
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        const RouterTile tile(p, index);
        const float4 *dq_tile = reinterpret_cast<const float4 *>(p.query_tiles) +
                                (static_cast<int64_t>(head) * tiles + index) * p.query_parts * (tile_rows * d_h / 4) + thread;
        auto fetch_dq = [&](int column) {
#pragma unroll
            for (int j = 0; j < cols / 8; ++j) copy_16_bytes_async(&shared.staged.fragment(j, thread), dq_tile + (column / 8 + j) * 128);
        };
        __syncwarp();  // the previous tile's Q and staged rows have been read
        if (early && needs_dq) fetch_dq(0);
        if (p.dw) {
            for (int i = lane; i < 16 * (d_h / 8); i += 32) {
                const int r = first_row + i / (d_h / 8), c = i % (d_h / 8) * 8;
                copy_16_bytes_async(&shared.q[r][c], static_cast<const T *>(p.q.data) + tile.q_offset(p, head, min(r, tile.rows - 1)) + c);
            }
        }
        GateGradRows<chunk> rows(p, tile, index, head, first_row + lane / 4);
        const float2 dot = rows.dot();
        RouterGrads<steps> dp;

        if (!early && needs_dq) fetch_dq(0);
        if (p.dw) {
            if (!one_chunk) rows.load(dw_first);
            rows.gradients(dot, dp);
            wait_copied_words();
            __syncwarp();
            add_weight_grad(dw, shared, p, dp, first_row);
        }

        if (needs_dq) {
            if (!p.dw && one_chunk) rows.gradients(dot, dp);
            const int64_t start = tile.sequence * p.dense.batch + tile.token() * p.dense.token;
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
                        stage_w(shared, p, head, first);
                        __syncthreads();
                        rows.load(first);
                        rows.gradients(dot, dp);
                    }
                    add_query_grad(shared, p, dp, column, first, dq_tile);
                }
                __syncwarp();
                shared.staged.template write<T>(static_cast<T *>(p.dq) + (start * p.dq_heads + head) * d_h + column,
                                                p.dense.token * p.dq_heads * d_h, first_row, min(tile.rows, first_row + 16), lane, 32);
            }
        }
    }
    if (!p.dw) return;
    float *part = p.dw_parts + (static_cast<int64_t>(blockIdx.x) * p.heads + head) * d_h * p.subnets + dw_first;
    store_weight_grad<d_h>(shared, dw, part, p.subnets, min(dw_columns, p.subnets - dw_first));
}

// The parts of dW in order, to W's type.
template <typename T>
__global__ void __launch_bounds__(element_threads) flashmhf_gate_sum(const __grid_constant__ RouterParams p, int64_t count) {
    kittens::pdl::wait();
    for (int64_t i = blockIdx.x * int64_t{element_threads} + threadIdx.x; i < count; i += gridDim.x * int64_t{element_threads}) {
        float sum = 0.f;
        for (int part = 0; part < p.dw_part_count; ++part) sum += p.dw_parts[part * count + i];
        store_real<T>(p.dw, i, p.w_is_float, sum);
    }
}

}  // namespace flashmhf
