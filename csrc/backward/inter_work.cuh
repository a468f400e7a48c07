// What a CTA of the inter-stationary kernels works on, and the order in which CTAs add to a sum.
#pragma once

#include "backward/params.h"
#include "common/tma.cuh"

namespace flashmhf {

// Where a CTA works: its range of the tokens of an item, and the item's place.
struct InterWork : TokenRange {
    int head, subnet, row;  // subnet of the head; first inter row within the sub-network
    int rank;               // in the pair
    bool pair;              // a cluster of two
    __device__ __forceinline__ InterWork(const BackwardParams &p, bool pairs)
        : TokenRange(token_range(blockIdx.x, p.heads * p.subnets * p.subnet_tiles, p.whole, p.parts, p.batch * p.row_tiles)),
          rank(pairs ? kittens::cluster_ctarank() : 0),
          pair(pairs && kittens::cluster_nctarank() == 2) {
        const int subnet_of_all = item / p.subnet_tiles;
        row = (item - subnet_of_all * p.subnet_tiles) * tile_inter;
        head = subnet_of_all / p.subnets;
        subnet = subnet_of_all - head * p.subnets;
    }
    // A slot of a ring is free once every CTA that its tile was sent to has read it.
    __device__ __forceinline__ void release(kittens::semaphore &slot_empty) const {
        kittens::arrive(slot_empty);
        if (pair) tma::arrive_remote(slot_empty, rank ^ 1);
    }
};

// Ordered accumulation: a CTA adds to a sum only once the CTA before it in the order of the items has added its part. That CTA's block
// number is lower, so the first block that has not finished never waits for one that has not started, whatever else runs on the device.
// (Rule 9 of csrc/README.md.) By one thread.
struct OrderedAdds {
    uint32_t *added;  // CTAs that have added to a tile, in their order; null: any order
    uint32_t before;  // CTAs before this one
    __device__ __forceinline__ void wait_for_predecessor(uint32_t tile) const {
        if (added)
            while (load_acquire(added + tile) != before) __nanosleep(32);
    }
    // Releases what this thread has seen complete.
    __device__ __forceinline__ void signal_successor(uint32_t tile) const {
        if (added) store_release(added + tile, before + 1);
    }
};

}  // namespace flashmhf
