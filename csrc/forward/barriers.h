// Semaphores (mbarriers) and named barriers of the forward kernel: the event that each one is named by, who arrives and who waits.
//
//   semaphore         arrives                                                    waits
//   slot_full         the weight loader's expect_bytes; its copies               consumers, before a slot's products
//   slot_empty        a thread of each consumer warpgroup, of every CTA that     the weight loader, before it refills the slot
//                     a tile is sent to; also once at the start
//   q_full            the row loader's expect_bytes, its copies of Q and R;      consumers, before an item
//                     its warp, when the item's gate is in shared memory
//   w_full            the row loader's expect_bytes; its copy of W               consumers, before they compute the gate
//   w_empty           a lane of each consumer warp, when it has the gate         the row loader, before it fetches the next W; the adding
//                                                                                warp, before pieces overwrite W
//   slice_sums_full   a lane of each consumer warp, which expects its rows'      consumers, before they add the slices' sums
//                     sums; the bytes that the other CTAs of the cluster send
//   part_stored       a lane of each consumer warp, behind its stores. Each      the adding warp, before it signals the part to the device
//                     completes once a launch: consumers cannot get ahead
//   piece_full        the adding warp's expect_bytes; its copy. Where clusters   the adding warp; consumers, before they add the parts
//                     gather: the first, when the parts are complete
#pragma once

#include "common/barriers.h"
#include "common/ring.h"
#include "forward/policy.h"
#include "kittens.cuh"

namespace flashmhf {

struct ForwardArrivals {
    static constexpr int slot_full = loader_arrival, w_full = loader_arrival, piece_full = loader_arrival;
    static constexpr int q_full = loader_arrival + thread_arrival;
    __device__ __forceinline__ static int slot_empty(int consumers, int row_ctas) { return consumers * row_ctas; }
    __device__ __forceinline__ static int slice_sums_full(int consumers) { return warpgroup_arrivals * consumers; }
    __device__ __forceinline__ static int w_empty(int consumers) { return warpgroup_arrivals * consumers; }
    __device__ __forceinline__ static int part_stored(int consumers) { return warpgroup_arrivals * consumers; }
};

// Named barriers; 0 is __syncthreads.
// Q of a consumer warpgroup has been read, and its output may lie in the same buffer: the warpgroup arrives, the warp that loads its Q
// arrives and waits. (A warp that waits for a semaphore polls; one that waits at a named barrier sleeps.)
__device__ __forceinline__ auto q_read_barrier(int warpgroup) { return kittens::barrier<warpgroup_warps + 1>(1 + warpgroup); }
// The warpgroup before this one has issued its products: that one arrives, this one arrives and waits.
__device__ __forceinline__ auto issue_order_barrier(int warpgroup) { return kittens::barrier<2 * warpgroup_warps>(3 + warpgroup); }

}  // namespace flashmhf
