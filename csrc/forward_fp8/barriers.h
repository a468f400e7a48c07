// Semaphores (mbarriers) and named barriers of the FP8 forward kernel: the event that each one is named by, who arrives and who waits.
//
//   semaphore         arrives                                                    waits
//   slot_full         the weight loader's expect_bytes; its copies               consumers, before a slot's products
//   slot_empty        a thread of each consumer warpgroup, of every CTA that     the weight loader, before it refills the slot
//                     a tile is sent to; also once at the start
//   q_full            the row loader's expect_bytes, its copy of Q; its warp,    consumers, before an item
//                     when the item's scales are in shared memory
//   r_full            the row loader's expect_bytes; its copy of R               consumers, before they promote sums for the first time
//   w_full            the row loader's expect_bytes; its copy of W               consumers, before they compute the gate
//   w_empty           a lane of each consumer warp, when it has the gate         the row loader, before it fetches the next W
//   slice_sums_full   a lane of each consumer warp, which expects its rows'      consumers, before they add the slices' sums
//                     sums; the bytes that the CTAs of the cluster send
#pragma once

#include "common/barriers.h"
#include "common/ring.h"
#include "kittens.cuh"

namespace flashmhf {

struct ForwardFp8Arrivals {
    static constexpr int slot_full = loader_arrival, r_full = loader_arrival, w_full = loader_arrival;
    static constexpr int q_full = loader_arrival + thread_arrival;
    __device__ __forceinline__ static int slot_empty(int consumers, int row_ctas) { return consumers * row_ctas; }
    __device__ __forceinline__ static int slice_sums_full(int consumers) { return warpgroup_arrivals * consumers; }
    __device__ __forceinline__ static int w_empty(int consumers) { return warpgroup_arrivals * consumers; }
};

// Named barriers; 0 is __syncthreads, 1 to 4 are q_read_barrier of a warpgroup in forward/barriers.h.
// R of an item has been read for the last time: the warpgroup arrives, the warp that loads its R arrives and waits.
__device__ __forceinline__ auto r_read_barrier(int warpgroup) { return kittens::barrier<warpgroup_warps + 1>(5 + warpgroup); }

}  // namespace flashmhf
