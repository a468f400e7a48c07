// Constants, thread indices, the shared-memory allocator and cluster indices.
#pragma once

namespace kittens {

constexpr int BASE_TILE_DIM = 16;
template <typename T> constexpr int TILE_ROW_DIM = BASE_TILE_DIM;
template <typename T> constexpr int TILE_COL_DIM = BASE_TILE_DIM;
constexpr int WARP_THREADS = 32;
constexpr int WARPGROUP_THREADS = 128;
constexpr int WARPGROUP_WARPS = 4;
constexpr int MAX_SHARED_MEMORY = 227 * 1024;
static constexpr uint32_t MASK_ALL = 0xFFFFFFFF;

__device__ __forceinline__ int warpid() { return threadIdx.x >> 5; }
__device__ __forceinline__ int warpgroupid() { return threadIdx.x >> 7; }
__device__ __forceinline__ int laneid() { return threadIdx.x & 31; }

// Hands out consecutive, aligned pieces of the dynamic shared memory that starts at ptr.
template <int default_alignment = 1024> struct shared_allocator {
    int *ptr;

  private:
    template <typename A, size_t... dims> struct array_of {
        using type = A;
    };
    template <typename A, size_t first, size_t... rest> struct array_of<A, first, rest...> {
        using type = typename array_of<A, rest...>::type[first];
    };
    template <int alignment, typename A> __device__ inline A &take() {
        uintptr_t p = reinterpret_cast<uintptr_t>(ptr);
        if constexpr (alignment > 0) p = (p + alignment - 1) / alignment * alignment;
        ptr = reinterpret_cast<int *>(p + sizeof(A));
        return *reinterpret_cast<A *>(p);
    }

  public:
    __device__ shared_allocator(int *_ptr) : ptr(_ptr) {}
    template <typename A, size_t... dims> __device__ inline typename array_of<A, dims...>::type &allocate() {
        return take<default_alignment, typename array_of<A, dims...>::type>();
    }
    template <int alignment, typename A, size_t... dims> __device__ inline typename array_of<A, dims...>::type &allocate() {
        return take<alignment, typename array_of<A, dims...>::type>();
    }
};
using tma_allocator = shared_allocator<1024>;
using tma_swizzle_allocator = tma_allocator;

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
