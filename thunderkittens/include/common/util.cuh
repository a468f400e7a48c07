// Constants, thread indices and cluster indices.
#pragma once

namespace kittens {

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

}  // namespace kittens
