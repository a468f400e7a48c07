// Instructions that the tile headers do not wrap: approximate functions, one mma.sync and a transposing move, small copies, pins that keep
// the compiler from moving register accesses across asynchronous products, and barriers of CTAs and clusters.
#pragma once

#include "kittens.cuh"
#include "ops/extensions.cuh"

namespace flashmhf {

using kittens::shared_address;

__device__ __forceinline__ uint4 bits_of(float4 x) {
    return {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)};
}
__device__ __forceinline__ float exp2_fast(float x) {  // relative error 2^-22, inf for x > 128
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal_fast(float x) {  // relative error 2^-23, 0 for inf
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float tanh_fast(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float sigmoid_fast(float x) { return reciprocal_fast(1.f + exp2_fast(-1.442695041f * x)); }

template <typename RT> __device__ __forceinline__ void pin(RT &tile) {
#pragma unroll
    for (int i = 0; i < RT::height; ++i)
#pragma unroll
        for (int j = 0; j < RT::width; ++j)
#pragma unroll
            for (int k = 0; k < RT::packed_per_tile; ++k) {
                auto &pair = tile.tiles[i][j].data[k];
                if constexpr (std::is_same_v<typename RT::T, float>) asm volatile("" : "+f"(pair.x), "+f"(pair.y)::"memory");
                else asm volatile("" : "+r"(reinterpret_cast<uint32_t &>(pair))::"memory");
            }
}
template <int n> __device__ __forceinline__ void pin(uint32_t (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// d[16x8] += a[16x16] b[16x8], a as in a row-layout base tile, b as two registers of the B fragment.
__device__ __forceinline__ void mma_16x8(float (&d)[4], const kittens::bf16_2 (&a)[4], uint32_t b0, uint32_t b1) {
    const auto *r = reinterpret_cast<const uint32_t *>(a);
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_16x8(float (&d)[4], const kittens::half_2 (&a)[4], uint32_t b0, uint32_t b1) {
    const auto *r = reinterpret_cast<const uint32_t *>(a);
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(b0), "r"(b1));
}

// An 8 x 8 matrix of 16-bit elements that the warp holds, a pair a lane.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// 16 bytes to global memory at once. Left to the compiler, such a store may become four.
__device__ __forceinline__ void store_16_bytes(void *to, const uint32_t (&x)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// From global to shared memory without a register in between; visible to this thread after wait_copied_words(). 16 bytes; or one word or 0.
__device__ __forceinline__ void copy_16_bytes_async(void *dst, const void *src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(dst)), "l"(src) : "memory");
}
__device__ __forceinline__ void copy_word_async(float *dst, const float *src, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(dst)), "l"(src), "r"(valid ? 4 : 0) : "memory");
}
__device__ __forceinline__ void wait_copied_words() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Prefetches the line that holds x to the L2. A hint: right even before griddepcontrol.wait.
__device__ __forceinline__ void prefetch_line(const void *x) { asm volatile("prefetch.global.L2 [%0];" ::"l"(x) : "memory"); }

// An element behind pdl::wait(), and kept behind it: __ldg of 16 bits is asm that the compiler may move above the wait. Through the
// read-only cache; or from the L2, what a kernel may have written after it has signalled (rule 11 of csrc/README.md).
enum class From { read_only, l2 };
template <From from = From::read_only, typename X> __device__ __forceinline__ X load_behind_wait(const X *x) {
    if constexpr (sizeof(X) == 4) {
        static_assert(from == From::read_only);
        return __ldg(x);  // volatile
    } else {
        uint16_t bits;
        if constexpr (from == From::l2) asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(bits) : "l"(x) : "memory");
        else asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(bits) : "l"(x));
        return reinterpret_cast<const X &>(bits);
    }
}
// An element of a tensor that is fp32 or of the element type T, whichever a launch says.
template <typename T> __device__ __forceinline__ float load_real(const void *x, int64_t at, bool is_float) {
    return is_float ? load_behind_wait(static_cast<const float *>(x) + at)
                    : kittens::base_types::convertor<float, T>::convert(load_behind_wait(static_cast<const T *>(x) + at));
}
template <typename T> __device__ __forceinline__ void store_real(void *x, int64_t at, bool is_float, float value) {
    if (is_float) static_cast<float *>(x)[at] = value;
    else static_cast<T *>(x)[at] = kittens::base_types::convertor<T, float>::convert(value);
}

// A flag of 32 or 64 bits in global memory: what came before the store, here and in threads that this one has synchronised with, is there
// after the load.
template <typename Flag> __device__ __forceinline__ void store_release(Flag *flag, Flag x) {
    if constexpr (sizeof(Flag) == 4) asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(x) : "memory");
    else asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(x) : "memory");
}
template <typename Flag> __device__ __forceinline__ Flag load_acquire(const Flag *flag) {
    Flag x;
    if constexpr (sizeof(Flag) == 4) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(flag) : "memory");
    else asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(flag) : "memory");
    return x;
}

// For a thread with time to spare: kittens::wait polls, which takes issue slots and energy from the warps that share the scheduler.
__device__ __forceinline__ void wait_sleeping(kittens::semaphore &sem, int parity) {
    while (!kittens::try_wait(sem, parity)) __nanosleep(64);
}
// All threads of the cluster, warps converged; a launch without clusters has clusters of one CTA. Orders no memory accesses: for the
// start, after fence_semaphore_init, and for buffers whose readers have finished.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

}  // namespace flashmhf
