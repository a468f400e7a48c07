// Element types, their packed pairs and the conversions between them; constants, and indices of threads and clusters.
#pragma once

namespace kittens {

using bf16 = __nv_bfloat16;
using half = __half;
using bf16_2 = __nv_bfloat162;
using half_2 = __half2;

constexpr int BASE_TILE_DIM = 16;
constexpr int WARP_THREADS = 32;
static constexpr uint32_t MASK_ALL = 0xFFFFFFFF;

__device__ __forceinline__ int warpid() { return threadIdx.x >> 5; }
__device__ __forceinline__ int warpgroupid() { return threadIdx.x >> 7; }
__device__ __forceinline__ int laneid() { return threadIdx.x & 31; }

__device__ static inline int3 clusterIdx() {
    int3 c;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(c.x));
    asm volatile("mov.u32 %0, %%clusterid.y;" : "=r"(c.y));
    asm volatile("mov.u32 %0, %%clusterid.z;" : "=r"(c.z));
    return c;
}
__device__ static inline int cluster_ctarank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ static inline int cluster_nctarank() {
    int ranks;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(ranks));
    return ranks;
}

namespace base_types {

// packing<T>::packed_type: the pair of T that a register tile stores.
template <typename T> struct packing;
template <typename Pair> struct packing_of {
    using packed_type = Pair;
    template <typename T> __device__ static inline constexpr Pair pack(const T &x) { return Pair{x, x}; }
};
template <> struct packing<float> : packing_of<float2> {};
template <> struct packing<bf16> : packing_of<bf16_2> {};
template <> struct packing<half> : packing_of<half_2> {};

// convertor<T, U>::convert(u): U to T, rounding to nearest even.
template <typename T, typename U> struct convertor;
template <typename T> struct convertor<T, T> {
    __device__ static inline T convert(const T &u) { return u; }
};
#define KITTENS_CONVERTOR(TO, FROM, INTRINSIC)                                      \
    template <> struct convertor<TO, FROM> {                                        \
        __device__ static inline TO convert(const FROM &u) { return INTRINSIC(u); } \
    };
KITTENS_CONVERTOR(float, bf16, __bfloat162float)
KITTENS_CONVERTOR(bf16, float, __float2bfloat16_rn)
KITTENS_CONVERTOR(float, half, __half2float)
KITTENS_CONVERTOR(half, float, __float2half_rn)
KITTENS_CONVERTOR(float2, bf16_2, __bfloat1622float2)
KITTENS_CONVERTOR(bf16_2, float2, __float22bfloat162_rn)
KITTENS_CONVERTOR(float2, half_2, __half22float2)
KITTENS_CONVERTOR(half_2, float2, __float22half2_rn)
#undef KITTENS_CONVERTOR

}  // namespace base_types
}  // namespace kittens
