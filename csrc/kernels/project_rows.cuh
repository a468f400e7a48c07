// Projection of few tokens: out = x W^T + bias, one rounding. A CTA finishes 16 features of all tokens; bound by the time to bring W from the L2.
//
//   under the kernel before    the 16 rows of W to the L2, which stays coherent if that kernel writes them; no other data is touched
//   a warp                     steps of 32 k: W and x from global memory straight to the fragments of mma.sync, `stages` steps in flight
//   then                       sums over the warps through shared memory, over the cluster through remote shared memory, each in order
//
// CTAs of a cluster compute 16 features each together: every one takes a share of k for all of them, so that x is not read whole by each CTA.
#pragma once

#include "kernels/ptx_ext.cuh"
#include "kernels/tma_ext.cuh"
#include "project_params.h"

namespace flashmhf {

// For up to max_tokens tokens. Beside a CTA of the forward kernel with one consumer warpgroup an SM has 22,528 registers left, 88 a thread, and
// at d_h = 128 some 14,000 bytes of shared memory: up to 16 tokens that is enough for a CTA, so that either kernel starts under the other's tail.
template <int max_tokens> struct ProjectPolicy {
    static constexpr int warps = 8, threads = 32 * warps;
    static constexpr int tile = 16, step = 32;  // features of an operand, k of two products
    static constexpr int cluster = max_tokens > 8 ? 4 : 1, features = tile * cluster;

    // What a warp computes: `tiles` of the cluster's features, `groups` of 8 tokens, every units-th step of k.
    static constexpr int feature_parts = cluster > 1 ? 2 : 1, token_parts = max_tokens > 32 ? 2 : 1;
    static constexpr int tiles = cluster / feature_parts, groups = max_tokens / 8 / token_parts;
    static constexpr int slices = warps / (feature_parts * token_parts), units = cluster * slices;
    static constexpr int stages = 64 / (4 * (2 * tiles + groups));  // 64 registers of operands
    static constexpr int pitch = features + 4;                      // of sums: their stores meet no bank twice
    static constexpr int registers = max_tokens > 16 ? 128 : 88;
    static_assert(stages >= 2 && groups * token_parts * 8 == max_tokens && project_multiple % features == 0 && project_multiple % step == 0);
    static_assert(cluster == 1 || groups % 2 == 0);
};

template <int max_tokens> struct ProjectShared {
    using P = ProjectPolicy<max_tokens>;
    float sums[P::slices][P::token_parts][8][P::pitch];                                     // of a group of tokens, by warp
    float4 shares[P::cluster][P::cluster > 1 ? P::groups * P::token_parts / 2 : 1][64];  // of the CTA's 16 features, by sender
    kittens::semaphore shares_full;
};

// 16 bytes, of what nobody writes while this kernel runs past its wait.
__device__ __forceinline__ uint4 load_16_bytes(const void *p) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p) : "memory");
    return x;
}

// d[16 features x 8 tokens] += w x^T over 32 k. Thread t of a quad holds k = 8t..8t + 7 of features g (low) and g + 8 (high) and of token g;
// the products take them as k = 2t, 2t + 1, 2t + 8, 2t + 9: any order will do that is the same in both operands.
template <typename T2> __device__ __forceinline__ void multiply_step(float (&d)[4], const uint4 &low, const uint4 &high, const uint4 &x) {
    const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
    mma_16x8(d, reinterpret_cast<const T2(&)[4]>(first), x.x, x.y);
    mma_16x8(d, reinterpret_cast<const T2(&)[4]>(second), x.z, x.w);
}

// Two neighbouring features: where their sums over the last of the parts begin, and of a token, rounded, to the output.
template <typename T> __device__ __forceinline__ float2 load_bias(const ProjectParams &p, int feature) {
    if (!p.bias) return {0.f, 0.f};
    using to = kittens::base_types::convertor<float, T>;
    const T *bias = static_cast<const T *>(p.bias) + feature;
    return {to::convert(bias[0]), to::convert(bias[1])};
}
template <typename T> __device__ __forceinline__ void store_features(const ProjectParams &p, int token, int feature, float2 sum) {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    if (token >= p.tokens) return;
    T *dst = static_cast<T *>(p.out) + static_cast<int64_t>(token) * p.features + feature;
    *reinterpret_cast<T2 *>(dst) = kittens::base_types::convertor<T2, float2>::convert(sum);
}

template <int max_tokens, typename T> __global__ __maxnreg__(ProjectPolicy<max_tokens>::registers)
void project(const __grid_constant__ ProjectParams p) {
    using P = ProjectPolicy<max_tokens>;
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    __shared__ ProjectShared<max_tokens> shared;
    kittens::pdl::arrive();  // the next kernel waits for this one to end before it touches data
    const int warp = __shfl_sync(kittens::MASK_ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int rank = P::cluster > 1 ? kittens::cluster_ctarank() : 0;

    if (threadIdx.x == P::threads - 1) {
        const auto *rows = static_cast<const T *>(p.w) + static_cast<int64_t>(blockIdx.x) * P::tile * p.inner;
#pragma unroll
        for (int i = 0; i < 4; ++i) tma::prefetch_linear(rows + int64_t{i * P::tile / 4} * p.inner, P::tile / 4 * sizeof(T) * p.inner);
    }
    if constexpr (P::cluster > 1) {
        if (threadIdx.x == 0) {
            kittens::init_semaphore(shared.shares_full, 1);
            tma::fence_semaphore_init();
            kittens::tma::expect_bytes(shared.shares_full, sizeof(shared.shares));
        }
        __syncwarp();
        cluster_sync();
    }
    kittens::pdl::wait();

    const int feature_part = warp % P::feature_parts, token_part = warp / P::feature_parts % P::token_parts;
    const int slice = warp / (P::feature_parts * P::token_parts), unit = rank * P::slices + slice;
    const int g = lane / 4, t = lane % 4, token = token_part * P::groups * 8 + g;
    const int feature = (static_cast<int>(blockIdx.x) - rank) * P::tile + feature_part * P::tiles * P::tile + g;  // of the thread's first row of W
    const T *w = static_cast<const T *>(p.w) + static_cast<int64_t>(feature) * p.inner + unit * P::step + 8 * t;
    const T *x = static_cast<const T *>(p.x) + token * p.x_stride + unit * P::step + 8 * t;
    const int steps = (p.inner / P::step - unit + P::units - 1) / P::units;

    uint4 low[P::stages][P::tiles], high[P::stages][P::tiles], rows[P::stages][P::groups];
    float sum[P::tiles][P::groups][4] = {};
    auto load = [&](int stage, int i) {
        const int64_t k = int64_t{i} * (P::units * P::step);
#pragma unroll
        for (int m = 0; m < P::tiles; ++m) {
            low[stage][m] = load_16_bytes(w + int64_t{m * P::tile} * p.inner + k);
            high[stage][m] = load_16_bytes(w + int64_t{m * P::tile + 8} * p.inner + k);
        }
#pragma unroll
        for (int j = 0; j < P::groups; ++j) rows[stage][j] = token + 8 * j < p.tokens ? load_16_bytes(x + 8 * j * p.x_stride + k) : uint4{0, 0, 0, 0};
    };
#pragma unroll
    for (int stage = 0; stage < P::stages; ++stage)
        if (stage < steps) load(stage, stage);
    const int owner = threadIdx.x / 64, place = threadIdx.x % 64, row = place / 8, pair = 2 * (place % 8), column = blockIdx.x * P::tile + pair;
    const float2 bias = load_bias<T>(p, column);
    for (int first = 0; first < steps; first += P::stages) {
#pragma unroll
        for (int stage = 0; stage < P::stages; ++stage) {
            const int i = first + stage;
            if (i >= steps) break;
#pragma unroll
            for (int j = 0; j < P::groups; ++j)
#pragma unroll
                for (int m = 0; m < P::tiles; ++m) multiply_step<T2>(sum[m][j], low[stage][m], high[stage][m], rows[stage][j]);
            if (i + P::stages < steps) load(stage, i + P::stages);
        }
    }

    // Sums over the slices of k of this CTA: thread i gets two features (of CTA i / 64 of the cluster) of a token of each group.
    float2 total[P::groups * P::token_parts];
#pragma unroll
    for (int j = 0; j < P::groups; ++j) {
        if (j > 0) __syncthreads();
        auto &mine = shared.sums[slice][token_part];
#pragma unroll
        for (int m = 0; m < P::tiles; ++m) {
            const int column = (feature_part * P::tiles + m) * P::tile + g;
            mine[2 * t][column] = sum[m][j][0], mine[2 * t + 1][column] = sum[m][j][1];
            mine[2 * t][column + 8] = sum[m][j][2], mine[2 * t + 1][column + 8] = sum[m][j][3];
        }
        __syncthreads();
        if (owner >= P::cluster) continue;
#pragma unroll
        for (int part = 0; part < P::token_parts; ++part) {
            float2 s = P::cluster == 1 ? bias : float2{0.f, 0.f};
#pragma unroll
            for (int i = 0; i < P::slices; ++i) {
                const float2 v = *reinterpret_cast<const float2 *>(&shared.sums[i][part][row][owner * P::tile + pair]);
                s.x += v.x, s.y += v.y;
            }
            total[part * P::groups + j] = s;
        }
    }
    if constexpr (P::cluster == 1) {
        if (owner == 0) store_features<T>(p, row, column, total[0]);
    } else {
        constexpr int halves = P::groups * P::token_parts / 2;  // two groups travel together
#pragma unroll
        for (int h = 0; h < halves; ++h)
            tma::store_remote_async(&shared.shares[rank][h][place], float4{total[2 * h].x, total[2 * h].y, total[2 * h + 1].x, total[2 * h + 1].y},
                                    shared.shares_full, owner);
        kittens::wait(shared.shares_full, 0);
        for (int h = owner; h < halves; h += P::cluster) {
            float4 s = {bias.x, bias.y, bias.x, bias.y};
#pragma unroll
            for (int c = 0; c < P::cluster; ++c) {
                const float4 v = shared.shares[c][h][place];
                s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
            }
            store_features<T>(p, 16 * h + row, column, float2{s.x, s.y});
            store_features<T>(p, 16 * h + 8 + row, column, float2{s.z, s.w});
        }
    }
}

}  // namespace flashmhf
