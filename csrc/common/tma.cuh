// Asynchronous copies: by tensor maps with any strides, multicast, the linear bulk reduction, and to other CTAs of a cluster.
//
// Every function is called by one thread. Coordinates are in elements, innermost first. Shared addresses are 128-byte aligned (1024 for
// 128-byte swizzle). Loads complete on a semaphore that expects their bytes; stores and reductions belong to bulk groups
// (kittens::tma::store_commit_group, store_async_read_wait, store_async_wait).
#pragma once

#include "common/ptx.cuh"
#include "kittens.cuh"

namespace flashmhf::tma {

using kittens::shared_address;

// Makes this thread's ordinary stores to shared memory visible to wgmma and bulk copies; every writing thread calls it before the barrier.
__device__ __forceinline__ void fence_shared_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders this thread's bulk copies to and from global memory behind what ordinary stores have written, and what it has acquired.
__device__ __forceinline__ void fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// After init_semaphore: visible to the cluster and to bulk copies.
__device__ __forceinline__ void fence_semaphore_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void prefetch(const CUtensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// What the L2 does with loaded data. first: it evicts them before other data, for weights that a launch reads from memory once. The weights of
// one layer or two fill the L2; else they evict what kernels have written, which then goes to memory and back. A constant at each call.
enum class Evict { normal, first };
__device__ __forceinline__ uint64_t evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// Operands: 0 the place in shared memory, 1 the map, 2 the semaphore; from 3 on coordinates, the mask of CTAs and the policy.
#define FLASHMHF_COPY(instruction, operands, ...)                                                                      \
    asm volatile("cp.async.bulk.tensor." instruction " [%0], [%1, " operands ";" ::"r"(shared_address(dst)), "l"(map), \
                 "r"(shared_address(&sem)), __VA_ARGS__                                                                \
                 : "memory")
// The same with the policy as `policy`, the operand behind the others, where `evict` says so.
#define FLASHMHF_HINTED_COPY(instruction, operands, policy, ...)                                                                    \
    if (evict == Evict::first) FLASHMHF_COPY(instruction ".L2::cache_hint", operands ", " policy, __VA_ARGS__, "l"(evict_first())); \
    else FLASHMHF_COPY(instruction, operands, __VA_ARGS__)
#define FLASHMHF_TO_SHARED ".shared::cluster.global.tile.mbarrier::complete_tx::bytes"
// Into this CTA.
__device__ __forceinline__ void load_async(void *dst, const CUtensorMap *map, int2 c, kittens::semaphore &sem,
                                           Evict evict = Evict::normal) {
    FLASHMHF_HINTED_COPY("2d" FLASHMHF_TO_SHARED, "{%3, %4}], [%2]", "%5", "r"(c.x), "r"(c.y));
}
__device__ __forceinline__ void load_async(void *dst, const CUtensorMap *map, int3 c, kittens::semaphore &sem,
                                           Evict evict = Evict::normal) {
    FLASHMHF_HINTED_COPY("3d" FLASHMHF_TO_SHARED, "{%3, %4, %5}], [%2]", "%6", "r"(c.x), "r"(c.y), "r"(c.z));
}
__device__ __forceinline__ void load_async(void *dst, const CUtensorMap *map, int4 c, kittens::semaphore &sem) {
    FLASHMHF_COPY("4d" FLASHMHF_TO_SHARED, "{%3, %4, %5, %6}], [%2]", "r"(c.x), "r"(c.y), "r"(c.z), "r"(c.w));
}
// Into the CTAs of cta_mask, same offset in each, data and semaphore alike.
__device__ __forceinline__ void multicast_async(void *dst, const CUtensorMap *map, int3 c, kittens::semaphore &sem, uint16_t cta_mask,
                                                Evict evict = Evict::normal) {
    FLASHMHF_HINTED_COPY("3d" FLASHMHF_TO_SHARED ".multicast::cluster", "{%3, %4, %5}], [%2], %6", "%7", "r"(c.x), "r"(c.y), "r"(c.z),
                         "h"(cta_mask));
}
__device__ __forceinline__ void multicast_async(void *dst, const CUtensorMap *map, int4 c, kittens::semaphore &sem, uint16_t cta_mask) {
    FLASHMHF_COPY("4d" FLASHMHF_TO_SHARED ".multicast::cluster", "{%3, %4, %5, %6}], [%2], %7", "r"(c.x), "r"(c.y), "r"(c.z), "r"(c.w),
                  "h"(cta_mask));
}
#undef FLASHMHF_TO_SHARED
#undef FLASHMHF_HINTED_COPY
#undef FLASHMHF_COPY

__device__ __forceinline__ void store_async(const CUtensorMap *map, const void *src, int4 c) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(shared_address(src)), "r"(c.x), "r"(c.y), "r"(c.z), "r"(c.w)
                 : "memory");
}
// dst[0 .. bytes / 4) += src, fp32, in the L2.
__device__ __forceinline__ void reduce_add_async(float *dst, const void *src, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst), "r"(shared_address(src)),
                 "r"(bytes)
                 : "memory");
}
// A tile to the L2: no more than a hint, right even before griddepcontrol.wait.
__device__ __forceinline__ void prefetch_tile(const CUtensorMap *map, int2 c) {  // evicted first
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile.L2::cache_hint [%0, {%1, %2}], %3;" ::"l"(map), "r"(c.x), "r"(c.y),
                 "l"(evict_first())
                 : "memory");
}
__device__ __forceinline__ void prefetch_tile(const CUtensorMap *map, int3 c, Evict evict) {
    if (evict == Evict::first)
        asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile.L2::cache_hint [%0, {%1, %2, %3}], %4;" ::"l"(map), "r"(c.x),
                     "r"(c.y), "r"(c.z), "l"(evict_first())
                     : "memory");
    else
        asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(c.x), "r"(c.y), "r"(c.z)
                     : "memory");
}

// Arrival on the semaphore of CTA cta of the cluster. Not .release.cluster, which costs a MEMBAR.GPU in the loop: for handing back
// buffers that only wgmma has read, whose reads wgmma.wait_group has already waited for.
__device__ __forceinline__ void arrive_remote(kittens::semaphore &sem, int cta) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(
            shared_address(&sem)),
        "r"(cta)
        : "memory");
}

// Addresses in the shared memory of a CTA of the cluster: of the data, and of the semaphore that counts their bytes.
struct Remote {
    uint32_t data, full;
};
__device__ __forceinline__ uint32_t map_shared(uint32_t address, int cta) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cta));
    return there;
}
// The places in CTA cta that `dst` and `sem` have in this one.
__device__ __forceinline__ Remote remote(const void *dst, const kittens::semaphore &sem, int cta) {
    return {map_shared(shared_address(dst), cta), map_shared(shared_address(&sem), cta)};
}
__device__ __forceinline__ void store_async(Remote to, uint4 x) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to.data),
                 "r"(to.full), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
__device__ __forceinline__ void store_async(Remote to, float2 x) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];" ::"r"(to.data), "r"(to.full),
                 "f"(x.x), "f"(x.y)
                 : "memory");
}
__device__ __forceinline__ void store_async(Remote to, float4 x) { store_async(to, bits_of(x)); }
// To this CTA's shared memory.
__device__ __forceinline__ void store(uint32_t to, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

}  // namespace flashmhf::tma
