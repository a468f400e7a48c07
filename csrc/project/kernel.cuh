// Projection of few tokens: out = x W^T + bias, one rounding. Up to 64 tokens latency is the bound, not bandwidth: a CTA has little to
// fetch and requests all of it at once.
//
//   producer warp        before the wait for the kernel before: prefetches its tiles of W to the L2, which stays coherent if that kernel
//                        writes them; with `weights_ready`, loads them into the ring. Then x, and W where it is not in the ring, by TMA
//   consumer warpgroups  64 features each of the CTA's tokens over its range of k: features are the rows of wgmma, tokens its columns
//   end                  each warp sends its sums to the CTA of the cluster that finishes their 16 features, which adds them by rank
#pragma once

#include "common/barriers.h"
#include "common/fragments.cuh"
#include "common/tma.cuh"
#include "common/trace.cuh"
#include "project/policy.h"

namespace flashmhf {

template <typename P, typename T> struct alignas(1024) ProjectShared {
    using W = kittens::st<T, 64, P::step>;
    using X = kittens::st<T, P::max_tokens, P::step>;
    W w[P::slots][P::warpgroups];
    X x[P::slots];
    float4 parts[P::cluster][P::finished][P::max_tokens / 8][32];  // by rank; 8 tokens of 16 of the CTA's features, as a warp holds them
    kittens::semaphore full[P::slots], empty[P::slots], parts_full;
    static_assert(sizeof(w[0]) + sizeof(x[0]) == P::slot_bytes && sizeof(parts) == P::parts_bytes);
    static_assert(!P::two_fit || 2 * (sizeof(w) + sizeof(x) + sizeof(parts) + 2048) <= 228 * 1024);
};

// The sums of a warp for features that its own CTA finishes, 8 tokens at a time.
template <int max_tokens>
__device__ __forceinline__ void keep_own_sums(float4 (&part)[max_tokens / 8][32], const kittens::rt_fl<16, max_tokens> &sum, int tokens,
                                              int lane) {
#pragma unroll
    for (int j = 0; j < max_tokens / 8; ++j)
        if (8 * j < tokens) part[j][lane] = fragment_quad<max_tokens>(sum, j);
}

// s += the sums of all CTAs of the cluster, by rank, for 8 tokens of a strip of features.
template <typename P, typename T>
__device__ __forceinline__ void add_sums(float4 &s, const ProjectShared<P, T> &shared, int strip, int tokens, int lane) {
#pragma unroll
    for (int r = 0; r < P::cluster; ++r) add(s, shared.parts[r][strip][tokens][lane]);
}

template <typename P, typename T>
__global__ __launch_bounds__(P::threads) void flashmhf_project(const __grid_constant__ CUtensorMap map_w,
                                                               const __grid_constant__ CUtensorMap map_x,
                                                               const __grid_constant__ ProjectParams p) {
    using Shared = ProjectShared<P, T>;
    using warpgroup = kittens::warpgroup;
    constexpr int max_tokens = P::max_tokens;
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    kittens::pdl::arrive();  // the next kernel waits for this one before it touches what this one reads or writes
    const int warp = __shfl_sync(kittens::MASK_ALL, threadIdx.x / 32, 0), lane = kittens::laneid(), rank = kittens::cluster_ctarank();
    const int feature = static_cast<int>(blockIdx.x) / P::cluster * P::features, first_token = blockIdx.y * p.block_tokens;
    const int all = p.depth / P::step, begin = all * rank / P::cluster, steps = all * (rank + 1) / P::cluster - begin;

    if (threadIdx.x == 0) {
        for (int i = 0; i < P::slots; ++i) {
            kittens::init_semaphore(shared.full[i], loader_arrival);
            kittens::init_semaphore(shared.empty[i], P::warpgroups * warpgroup_arrivals);  // of the consumers
        }
        kittens::init_semaphore(shared.parts_full, loader_arrival + P::finished);  // of the warps whose sums this CTA finishes
        tma::fence_semaphore_init();
        kittens::tma::expect_bytes(shared.parts_full,
                                   (P::cluster - 1) * P::finished * (p.block_tokens / 8) * sizeof(shared.parts[0][0][0]));
    }
    __syncthreads();
    cluster_sync();

    if (warp == 4 * P::warpgroups) {
        if (lane != 0) return;
        constexpr auto evict = tma::Evict::first;  // the blocks of tokens read a tile of W at the same time
        auto w_at = [&](int i) { return int2{(begin + i) * P::step, feature}; };
        // The rows of a slot behind box_tokens hold anything: they are columns of wgmma whose sums nobody reads.
        const int bytes = sizeof(shared.w[0]) + p.box_tokens * P::step * element_bytes;
        auto expect = [&](int slot) { kittens::tma::expect_bytes(shared.full[slot], bytes); };
        for (int i = 0; i < min(steps, P::early); ++i) {
            if (!p.weights_ready || i >= P::slots) {
                tma::prefetch_tile(&map_w, w_at(i));
            } else {
                expect(i);
                tma::load_async(&shared.w[i], &map_w, w_at(i), shared.full[i], evict);
            }
        }
        kittens::pdl::wait();
        Ring<P::slots> ring;
        for (int i = 0; i < steps; ++i, ring.advance()) {
            auto &full = shared.full[ring.slot];
            if (i >= P::slots) kittens::wait(shared.empty[ring.slot], ring.phase ^ 1);
            if (!p.weights_ready || i >= P::slots) {
                expect(ring.slot);
                tma::load_async(&shared.w[ring.slot], &map_w, w_at(i), full, evict);
            }
            tma::load_async(&shared.x[ring.slot], &map_x, int2{w_at(i).x, first_token}, full);
        }
        return;
    }

    stamp(Stamp::project_entry);
    kittens::pdl::wait();
    stamp(Stamp::project_predecessor_done);
    const int wg = warp / 4;
    kittens::rt_fl<16, max_tokens> sum;
    sum = 0.f;
    Ring<P::slots> ring;
    int before = 0;
    for (int i = 0; i < steps; ++i, ring.advance()) {
        kittens::wait(shared.full[ring.slot], ring.phase);
        stamp(Stamp::project_tile_full, i);
        pin(sum);
        warpgroup::mma_ABt(sum, shared.w[ring.slot][wg], shared.x[ring.slot]);
        warpgroup::mma_async_wait<1>();  // .sync.aligned: the whole warp has done with the slot before when one lane hands it back
        if (i > 0 && lane == 0) kittens::arrive(shared.empty[before]);
        before = ring.slot;
    }
    warpgroup::mma_async_wait<0>();
    pin(sum);
    auto &part = shared.parts[rank][warp % P::finished];
    const int finisher = warp / P::finished;
    if (finisher == rank) {  // an asynchronous store to the CTA itself would take as long as one to another
        keep_own_sums<max_tokens>(part, sum, p.block_tokens, lane);
        __syncwarp();
        if (lane == 0) kittens::arrive(shared.parts_full);
    } else {
#pragma unroll
        for (int j = 0; j < max_tokens / 8; ++j)
            if (8 * j < p.block_tokens)
                tma::store_async(tma::remote(&part[j][lane], shared.parts_full, finisher), fragment_quad<max_tokens>(sum, j));
    }

    // Rows g and g + 8 of the fragments are features, columns 2t and 2t + 1 tokens. Warps that finish one strip of features are neighbours.
    constexpr int warps = 4 * P::warpgroups / P::finished;
    const int strip = warp / warps, column = feature + (rank * P::finished + strip) * 16 + lane / 4;
    float bias[2] = {0.f, 0.f};
    if (p.bias)
        for (int i = 0; i < 2; ++i)
            bias[i] = kittens::base_types::convertor<float, T>::convert(
                load_behind_wait<From::l2>(static_cast<const T *>(p.bias) + column + 8 * i));
    stamp(Stamp::project_sums_sent);
    kittens::wait(shared.parts_full, 0);
    stamp(Stamp::project_sums_full);
    const int last_token = min(first_token + p.block_tokens, p.tokens);
    for (int j = warp % warps; first_token + 8 * j < last_token; j += warps) {
        float4 s = {bias[0], bias[0], bias[1], bias[1]};
        add_sums(s, shared, strip, j, lane);
        const float values[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = first_token + 8 * j + lane % 4 * 2 + i % 2;
            T *out = static_cast<T *>(p.out) + static_cast<int64_t>(token) * p.features + column + i / 2 * 8;
            if (token < last_token) *out = kittens::base_types::convertor<T, float>::convert(values[i]);
        }
    }
}

}  // namespace flashmhf
