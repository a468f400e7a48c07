// A CTA of the inter-stationary kernels: its shared memory and barriers, what it works on, and the order in which CTAs add to a sum.
// Semaphores are named by the event that they tell of.
//
//   semaphore         arrives                                                    waits
//   weights_full      the loader's expect_bytes; its copies of K, U, V           S
//   q_full, g_full    the loader's expect_bytes; its copies. q_full: also the    S, W
//                     gate warp, when the tile's gate is in shared memory
//   q_empty, g_empty  the warps of the tile's last readers, of every CTA that    the loader; q_empty: also the gate warp
//                     it is sent to
//   grads_full        the warps of S; one semaphore for each reading role        the dR warp and W, or one or two W
//   grads_empty       the warps of W; the dR warp                                S
//   staged_full       the warps of the S warpgroup that staged dQ                the dQ warp
//   staged_empty      the dQ warp, when it has read the slice                    the other S warpgroup; one semaphore for each
#pragma once

#include "backward/params.h"
#include "backward/policy.h"
#include "common/barriers.h"
#include "common/tma.cuh"

namespace flashmhf {

template <int d_h, int outputs, typename T> struct alignas(1024) InterShared {
    using P = InterPolicy<d_h, outputs>;
    template <int rows> using tile = kittens::st<T, rows, d_h, true, swizzle_bytes_of(d_h)>;  // as the tensor maps say
    template <int cols> using inter_tile = kittens::st<T, tile_rows, cols, true, 128>;        // 64 tokens
    using KU = tile<2 * tile_inter>;                                                          // K over U
    using Rows = tile<tile_rows>;
    using V = tile<tile_inter>;
    using Grads = inter_tile<2 * tile_inter>;  // dM beside dN
    using Gated = inter_tile<tile_inter>;      // P

    KU ku;
    V v[P::needs_v];
    Rows q[P::q_stages], grad_out[P::g_stages];
    Grads grads[P::keys ? P::grad_buffers : 0];
    Gated gated[P::values ? P::grad_buffers : 0];
    float staged[P::query ? tile_rows * d_h : 0];  // dQ in fragment order
    float r[P::q_stages][tile_rows];
    float4 dr[P::query ? P::grad_buffers : 0][tile_rows];  // a row's sums over the columns of four threads
    kittens::semaphore weights_full, q_full[P::q_stages], q_empty[P::q_stages], g_full[P::g_stages], g_empty[P::g_stages],
        grads_full[P::grad_buffers][P::most_readers], grads_empty[P::grad_buffers], staged_full[P::staged_slices],
        staged_empty[P::fused_s_warpgroups][P::staged_slices];
};

template <typename P> struct InterArrivals {
    static constexpr int q_full = loader_arrival + thread_arrival, weights_full = loader_arrival, g_full = loader_arrival;
    static constexpr int q_readers = P::keys ? P::w_warpgroups : 1, g_readers = 1;  // warpgroups that read a tile last
    __device__ __forceinline__ static int q_empty(int ctas) { return ctas * (warpgroup_arrivals * q_readers); }
    __device__ __forceinline__ static int g_empty(int ctas) { return ctas * (warpgroup_arrivals * g_readers); }
    static constexpr int grads_full = warpgroup_arrivals;
    static constexpr int grads_empty = warpgroup_arrivals * P::w_warpgroups + (P::query ? thread_arrival : 0);
    static constexpr int staged_full = warpgroup_arrivals, staged_empty = thread_arrival;
};

// Named barriers; 0 is __syncthreads.
enum InterBarrier : int {
    // Numbers 1, 2: a W warpgroup's staging is free for its next tile. The number after them: all W warpgroups have consumed their last
    // tile, so the rings become staging. All W warpgroups arrive and wait.
    w_staging_barrier = 1,
    // The other S warpgroup has issued its products of the next tile: that one arrives, this one arrives and waits. One for each.
    products_issued_barrier = 4,
};

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
