// The forward kernel: out[t, h] = sum_e r[t, h, e] sum_j silu(q.k_ej) (q.u_ej) v_ej.
//
//   producer warpgroup     warp 0: K, U, V tiles into the ring     1, 2, 3: Q, R or W of the next item, outputs; flags of parts
//   consumer warpgroup     64 token rows; tile i of the item's inter range:
//                            issue  [M|N] = Q [K;U]^T  of tile i     (both in flight from here on)
//                            issue  O += A V           of tile i - 1
//                            wait for [M|N];  A = r silu(M) N        (while O += A V still runs)
//                            wait for O;      round A                (operand of the next round)
//                          in FP8 by chunks of a tile, and with r applied to the sums of a sub-network
//
// All consumer warpgroups read every tile, and the products of one run during the elementwise part of the others. CTAs of a cluster either
// take neighbouring rows and multicast the tiles, or divide an item's inter range and add their sums.
//
// A Format (f16/format.cuh, e4m3/format.cuh) has the types of parameters and shared memory, the consumer, and what the producer's warps do.
#pragma once

#include "forward/items.cuh"

namespace flashmhf {

template <typename Format, Division division>
__global__ void __launch_bounds__(Format::Policy::threads, 1)
    flashmhf_forward(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                     const __grid_constant__ CUtensorMap map_u, const __grid_constant__ CUtensorMap map_v,
                     const __grid_constant__ CUtensorMap map_out, const __grid_constant__ CUtensorMap map_r,
                     const __grid_constant__ typename Format::Params p) {
    using P = typename Format::Policy;
    using Shared = typename Format::Shared;
    const ForwardMaps maps{&map_q, &map_k, &map_u, &map_v, &map_out, &map_r};
    stamp(Stamp::forward_entry);
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int warpgroup = __shfl_sync(kittens::MASK_ALL, kittens::warpgroupid(), 0);

    if (threadIdx.x == 0) {
        for (const CUtensorMap *map : {maps.q, maps.k, maps.u, maps.v, maps.out}) tma::prefetch(map);
        if (p.gate.tiles) tma::prefetch(maps.r);
    }
    if (threadIdx.x == 32) {  // one branch for all semaphores, beside the warp that prefetches the maps
        shared.init_semaphores(p);
        tma::fence_semaphore_init();
    }
    __syncthreads();

    if (warpgroup == p.consumers) {
        kittens::warpgroup::decrease_registers<P::producer_registers>();
        const int warp = kittens::warpgroup::warpid();
        if (warp == 0) {
            Format::template prefetch<division>(maps, p);
            __syncwarp();
            wait_for_cluster_and_predecessor(p);
            if (kittens::laneid() == 0) Format::template stream<division>(shared, maps, p);
        } else {
            Format::template other_warps<division>(shared, maps, p, warp);
        }
        __syncwarp();
        // Pairs: no CTA leaves while the other can still signal it. Slices: the consumers' half stands in the exchange of their sums.
        if (p.cluster_size > 1) cluster_sync();
    } else {
        wait_for_cluster_and_predecessor(p);
        kittens::warpgroup::increase_registers<P::consumer_registers>();
        typename Format::template Consumer<division>{{shared, p, __shfl_sync(kittens::MASK_ALL, kittens::warpgroupid(), 0)}}.run();
        __syncwarp();
        if (p.row_ctas > 1) cluster_sync();
    }
}

}  // namespace flashmhf
