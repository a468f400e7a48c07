// Projection of few tokens: out = x W^T + bias, one rounding. Latency rules, not bandwidth: after the wait for the kernel before there is one trip
// to the L2 for every 2,048 k.
//
//   under the kernel before    the rows of W to the L2, which stays coherent if that kernel writes them; with `settled`, to registers at once
//   then                       x to shared memory by asynchronous copies, and W if it is not there: all of a chunk of k in flight together
//   a warp                     16 features of all tokens over its share of the chunk: W in registers as fragments of mma.sync, x in shared memory
//   at last                    the sums of 8 warps, wherever in the cluster, to the CTA that finishes their features, which adds them in order
//
// CTAs of a cluster compute 16 features each together: every one takes a share of k for all of them, so that x is not read whole by each CTA.
#pragma once

#include "kernels/ptx_ext.cuh"
#include "kernels/tma_ext.cuh"
#include "project_params.h"

namespace flashmhf {

// For up to max_tokens tokens; one: all of k in one chunk. Beside a CTA of the forward kernel with one consumer warpgroup an SM has 22,528 registers
// left, 88 a thread.
template <int max_tokens, bool one> struct ProjectPolicy {
    static constexpr int warps = 8, threads = 32 * warps;
    static constexpr int tile = 16, step = 32;               // features of a warp, k of two products
    static constexpr int cluster = max_tokens > 2 ? 4 : 1;   // CTAs; a warp takes the features that one of them finishes,
    static constexpr int slices = warps / cluster;           // and every slices-th step of its CTA
    static constexpr int loads = 8, steps = loads * slices;  // at most, of a warp and of its CTA, in a chunk of k: 64 registers of W
    static constexpr int groups = (max_tokens + 7) / 8;      // of 8 tokens
    static constexpr int chains = 2;                       // sums of a group by turns: fewer products wait for one another
    static constexpr int row_threads = threads / cluster;  // that copy a row of x, 16 bytes each
    static constexpr int registers = one ? 88 : 160;
    static_assert(row_threads * 16 == steps * step * 2);
    static_assert(project_multiple % (tile * cluster) == 0 && project_multiple % step == 0);

    static int chunks(int inner) { return (inner / step + warps * loads - 1) / (warps * loads); }
    static int steps_of(int inner) { return (inner / step + cluster * chunks(inner) - 1) / (cluster * chunks(inner)); }
    // Of a row of x: an odd number of 64 bytes, so that eight threads that read two rows together meet no bank twice.
    __host__ __device__ static int pitch(int steps) { return (steps | 1) * step * 2; }
    static constexpr int part_bytes = warps * groups * 32 * int{sizeof(float4)};
    static int shared_memory(int tokens, int steps) { return part_bytes + tokens * pitch(steps); }
};

// 16 bytes from the L2, of what nobody writes while this kernel runs: with `settled`, another SM may have written them since this L1 was filled.
__device__ __forceinline__ uint4 load_16_bytes(const void *p) {
    uint4 x;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p) : "memory");
    return x;
}
// This thread's arrival, when its copies up to here are complete.
__device__ __forceinline__ void arrive_after_copies(kittens::semaphore &sem) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(tma::shared_address(&sem)) : "memory");
}

__device__ __forceinline__ uint16_t load_2_bytes(const void *p) {
    uint16_t x;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(x) : "l"(p) : "memory");
    return x;
}

template <int max_tokens, bool one, typename T> __global__ __maxnreg__((ProjectPolicy<max_tokens, one>::registers))
void project(const __grid_constant__ ProjectParams p) {
    using P = ProjectPolicy<max_tokens, one>;
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    __shared__ kittens::semaphore x_full, parts_full;
    extern __shared__ __align__(128) uint8_t memory[];
    auto *parts = reinterpret_cast<float4 *>(memory);  // [warp of the cluster by its share of k][group][lane]: the CTA's features
    uint8_t *x = memory + P::part_bytes;               // [token][pitch]: the CTA's k of a chunk
    kittens::pdl::arrive();  // the next kernel waits for this one before it touches what this one reads or writes
    const int warp = __shfl_sync(kittens::MASK_ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int rank = P::cluster > 1 ? kittens::cluster_ctarank() : 0, owner = warp % P::cluster, slice = warp / P::cluster;
    const int pitch = P::pitch(p.steps), column = blockIdx.x * P::tile + g;

    if (threadIdx.x == 0) {
        kittens::init_semaphore(x_full, P::threads);
        kittens::init_semaphore(parts_full, 1);
        tma::fence_semaphore_init();
        if constexpr (P::cluster > 1) kittens::tma::expect_bytes(parts_full, P::part_bytes);
    }

    // Fragments: thread t of a quad holds k = 8t..8t + 7 of a step, of features g (low) and g + 8 (high) and of token g; the two products take them
    // as k = 2t, 2t + 1, 2t + 8, 2t + 9: any order will do that is the same in both operands.
    uint4 low[P::loads], high[P::loads];
    auto first_step = [&](int chunk) { return (chunk * P::cluster + rank) * p.steps; };
    auto steps_here = [&](int chunk) { return min(p.steps, p.inner / P::step - first_step(chunk)); };  // none: 0 or less
    const int row = (static_cast<int>(blockIdx.x) - rank + owner) * P::tile + g;
    const T *w_low = static_cast<const T *>(p.w) + static_cast<int64_t>(row) * p.inner + (first_step(0) + slice) * P::step + 8 * t;
    const T *w_high = w_low + int64_t{8} * p.inner;
    auto load_w = [&](int chunk) {
        const int steps = steps_here(chunk);
        asm volatile("" : "+l"(w_low), "+l"(w_high));  // or ptxas computes every address anew
#pragma unroll
        for (int i = 0; i < P::loads; ++i) {
            if (slice + i * P::slices >= steps) continue;
            low[i] = load_16_bytes(w_low + i * P::slices * P::step);
            high[i] = load_16_bytes(w_high + i * P::slices * P::step);
        }
        w_low += P::cluster * p.steps * P::step, w_high += P::cluster * p.steps * P::step;
    };
    uint16_t bias[2] = {0, 0};  // not converted before they are used: one waits for neither
    auto load_bias = [&]() {
        const T *at = static_cast<const T *>(p.bias) + column;
        if (p.bias) bias[0] = load_2_bytes(at), bias[1] = load_2_bytes(at + 8);
    };

    if (p.settled) load_w(0), load_bias();
    // The rows of W that this CTA finishes, and those of one that may find no room until the kernel before has ended.
    if (threadIdx.x == P::threads - 1) {
        auto prefetch = [&](int cta) {
            const T *rows = static_cast<const T *>(p.w) + static_cast<int64_t>(cta) * P::tile * p.inner;
#pragma unroll
            for (int i = 0; i < 4; ++i) tma::prefetch_linear(rows + int64_t{i * P::tile / 4} * p.inner, P::tile / 4 * sizeof(T) * p.inner);
        };
        if (!p.settled || p.chunks > 1) prefetch(blockIdx.x);
        prefetch((blockIdx.x + gridDim.x / 2) % gridDim.x);
    }
    __syncwarp();
    if constexpr (P::cluster > 1) cluster_sync();
    else __syncthreads();

    const int piece = threadIdx.x % P::row_threads, first_row = threadIdx.x / P::row_threads;
    const T *src = static_cast<const T *>(p.x) + first_row * p.x_stride + first_step(0) * P::step + piece * 8;
    const uint32_t dst = tma::shared_address(x) + first_row * pitch + piece * 16;
    auto fetch_x = [&](int chunk) {
        const T *from = src + chunk * (P::cluster * p.steps * P::step);
        if (piece * 8 < steps_here(chunk) * P::step) {
#pragma unroll
            for (int row = 0; row < max_tokens; row += P::cluster)
                if (first_row + row < p.tokens) copy_16_bytes_async(dst + row * pitch, from + row * p.x_stride);
        }
        arrive_after_copies(x_full);
    };
    kittens::pdl::wait();

    float sum[P::groups][4] = {};
    // Two products of every step of this warp for all tokens; rows of no token repeat the last one's, and nobody stores their sums.
    auto multiply = [&](int steps, auto all) {
        float turns[P::groups][P::chains][4] = {};
        const uint8_t *rows[P::groups];
#pragma unroll
        for (int j = 0; j < P::groups; ++j) rows[j] = x + min(j * 8 + g, p.tokens - 1) * pitch + slice * (P::step * 2) + 16 * t;
#pragma unroll
        for (int i = 0; i < P::loads; ++i) {
            if (!all.value && slice + i * P::slices >= steps) break;
            const uint32_t first[4] = {low[i].x, high[i].x, low[i].y, high[i].y}, second[4] = {low[i].z, high[i].z, low[i].w, high[i].w};
#pragma unroll
            for (int j = 0; j < P::groups; ++j) {
                const uint4 k = *reinterpret_cast<const uint4 *>(rows[j] + i * P::slices * P::step * 2);
                mma_16x8(turns[j][2 * i % P::chains], reinterpret_cast<const T2(&)[4]>(first), k.x, k.y);
                mma_16x8(turns[j][(2 * i + 1) % P::chains], reinterpret_cast<const T2(&)[4]>(second), k.z, k.w);
            }
        }
#pragma unroll
        for (int j = 0; j < P::groups; ++j)
#pragma unroll
            for (int c = 0; c < P::chains; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[j][i] += turns[j][c][i];
    };
    auto send = [&](int group) {
        const auto &s = sum[group];
        float4 *to = &parts[((rank * P::slices + slice) * P::groups + group) * 32 + lane];
        if constexpr (P::cluster > 1) tma::store_remote_async(to, float4{s[0], s[1], s[2], s[3]}, parts_full, owner);
        else *to = float4{s[0], s[1], s[2], s[3]};
    };

    const int chunks = one ? 1 : p.chunks;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        if (chunk > 0) __syncthreads();  // x of the chunk before has been read
        fetch_x(chunk);
        if (chunk > 0 || !p.settled) load_w(chunk);
        if (chunk == 0 && !p.settled) load_bias();
        const int steps = steps_here(chunk);
        kittens::wait(x_full, chunk & 1);
        if (steps == P::steps) multiply(steps, std::true_type{});
        else multiply(steps, std::false_type{});
        if (chunk < chunks - 1) continue;
#pragma unroll
        for (int j = 0; j < P::groups; ++j) send(j);
    }

    if constexpr (P::cluster > 1) kittens::wait(parts_full, 0);
    else __syncthreads();
    if (warp >= P::groups) return;
    const float from[2] = {kittens::base_types::convertor<float, T>::convert(reinterpret_cast<const T &>(bias[0])),
                           kittens::base_types::convertor<float, T>::convert(reinterpret_cast<const T &>(bias[1]))};
    float s[4] = {from[0], from[0], from[1], from[1]};
#pragma unroll
    for (int i = 0; i < P::warps; ++i) {
        const float4 part = parts[(i * P::groups + warp) * 32 + lane];
        s[0] += part.x, s[1] += part.y, s[2] += part.z, s[3] += part.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int token = warp * 8 + 2 * t + i % 2;
        T *out = static_cast<T *>(p.out) + static_cast<int64_t>(token) * p.features + column + i / 2 * 8;
        if (token < p.tokens) *out = kittens::base_types::convertor<T, float>::convert(s[i]);
    }
}

}  // namespace flashmhf
