// Semaphores (mbarriers) and named barriers of the forward kernel: the event that each one is named by, who arrives and who waits.
//
//   semaphore         arrives                                                    waits
//   slot_full         the weight loader's expect_bytes; its copies               consumers, before a slot's products
//   slot_empty        a thread of each consumer warpgroup, of every CTA that     the weight loader, before it refills the slot
//                     a tile is sent to; also once at the start
//   q_full            the row loader's expect_bytes, its copies of Q (and, in    consumers, before an item
//                     16 bits, R); its warp, when what it writes itself is
//                     in shared memory: the gate, or the scales of FP8
//   w_full            the row loader's expect_bytes; its copy of W               consumers, before they compute the gate
//   w_empty           a lane of each consumer warp, when it has the gate         the row loader, before it fetches the next W
//   slice_sums_full   a lane of each consumer warp, which expects its rows'      consumers, before they add the slices' sums
//                     sums; the bytes that the other CTAs of the cluster send
// In 16 bits:
//   parts.stored      a lane of each consumer warp, behind its stores. Each      the signalling warp, before it tells the device of the part
//                     completes once a launch: consumers cannot get ahead
//   parts.gathered    a lane of the signalling warp, when all parts are there    consumers, before they add the parts
// In FP8:
//   r_full            the row loader's expect_bytes; its copy of R               consumers, before they promote sums for the first time
#pragma once

#include "common/barriers.h"
#include "forward/params.h"
#include "kittens.cuh"

namespace flashmhf {

struct ForwardArrivals {
    static constexpr int slot_full = loader_arrival, w_full = loader_arrival, r_full = loader_arrival;
    static constexpr int part_gathered = thread_arrival;
    static constexpr int q_full = loader_arrival + thread_arrival;
    __device__ __forceinline__ static int slot_empty(int consumers, int row_ctas) { return consumers * row_ctas; }
    __device__ __forceinline__ static int slice_sums_full(int consumers) { return warpgroup_arrivals * consumers; }
    __device__ __forceinline__ static int w_empty(int consumers) { return warpgroup_arrivals * consumers; }
    __device__ __forceinline__ static int part_stored(int consumers) { return warpgroup_arrivals * consumers; }
};

// Those that every format has, but for w_full and w_empty.
template <int slots, int consumers> struct ForwardSemaphores {
    kittens::semaphore slot_full[slots], slot_empty[slots], q_full[consumers], slice_sums_full;
};
// Those that every format has, by one thread.
template <typename Shared> __device__ __forceinline__ void init_semaphores(Shared &shared, const ForwardParams &p) {
    using P = typename Shared::P;
    auto &sem = shared.semaphores;
    for (int i = 0; i < P::slots; ++i) {
        kittens::init_semaphore(sem.slot_full[i], ForwardArrivals::slot_full);
        kittens::init_semaphore(sem.slot_empty[i], ForwardArrivals::slot_empty(p.consumers, p.row_ctas));
    }
    for (int i = 0; i < P::consumers; ++i) kittens::init_semaphore(sem.q_full[i], ForwardArrivals::q_full);
    kittens::init_semaphore(shared.w_full, ForwardArrivals::w_full);
    kittens::init_semaphore(shared.w_empty, ForwardArrivals::w_empty(p.consumers));
    kittens::init_semaphore(sem.slice_sums_full, ForwardArrivals::slice_sums_full(p.consumers));
}

// Named barriers; 0 is __syncthreads. FP8 has up to four consumer warpgroups, 16 bits two.
// Q of a consumer warpgroup has been read, and its output may lie in the same buffer: the warpgroup arrives, the warp that loads its Q
// arrives and waits. (A warp that waits for a semaphore polls; one that waits at a named barrier sleeps.)
__device__ __forceinline__ auto q_read_barrier(int warpgroup) { return kittens::barrier<warpgroup_warps + 1>(1 + warpgroup); }
// In 16 bits: the warpgroup before this one has issued its products: that one arrives, this one arrives and waits.
__device__ __forceinline__ auto issue_order_barrier(int warpgroup) { return kittens::barrier<2 * warpgroup_warps>(3 + warpgroup); }
// In FP8: R of an item has been read for the last time: the warpgroup arrives, the warp that loads its R arrives and waits.
__device__ __forceinline__ auto r_read_barrier(int warpgroup) { return kittens::barrier<warpgroup_warps + 1>(5 + warpgroup); }

}  // namespace flashmhf
