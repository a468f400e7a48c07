// The forward kernel: out[t, h] = sum_e r[t, h, e] sum_j silu(q.k_ej) (q.u_ej) v_ej, accumulated in fp32.
//
//   producer warpgroup     warp 0: K, U, V tiles into the ring     1, 2: Q, R or W of the next item  3: sums of the parts of split items
//   consumer warpgroup     64 token rows; tile i of the item's inter range:
//                            issue  [M|N] = Q [K;U]^T  of tile i     (both in flight from here on)
//                            issue  O += A V           of tile i - 1
//                            wait for [M|N];  A = r silu(M) N        (while O += A V still runs)
//                            wait for O;      round A                (operand of the next round)
//
// Both consumer warpgroups read every tile, and the products of one run during the elementwise part of the other. CTAs of a cluster either
// take neighbouring rows and multicast the tiles, or divide an item's inter range and add their sums.
#pragma once

#include <cstddef>

#include "forward/add_parts.cuh"
#include "forward/consumer.cuh"
#include "forward/producer.cuh"

namespace flashmhf {

// An instance for each way to divide items: the loops of one are faster without the branches of another.
template <int d_h, typename T, Division division>
__global__ void __launch_bounds__(ForwardPolicy<d_h>::threads, 1)
    flashmhf_forward(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                     const __grid_constant__ CUtensorMap map_u, const __grid_constant__ CUtensorMap map_v,
                     const __grid_constant__ CUtensorMap map_out, const __grid_constant__ CUtensorMap map_r,
                     const __grid_constant__ ForwardParams p) {
    using P = ForwardPolicy<d_h>;
    using Shared = ForwardShared<d_h, T>;
    static_assert(offsetof(Shared, pieces) + P::piece_slots * P::piece_bytes <= P::shared_memory);
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int warpgroup = __shfl_sync(kittens::MASK_ALL, kittens::warpgroupid(), 0);

    if (threadIdx.x == 0) {
        for (const CUtensorMap *map : {&map_q, &map_k, &map_u, &map_v, &map_out}) tma::prefetch(map);
        if (p.gate_tiles) tma::prefetch(&map_r);
    }
    if (threadIdx.x == 32) {  // one branch for all semaphores, beside the warp that prefetches the maps
        auto &sem = shared.semaphores;
        for (int i = 0; i < P::slots; ++i) {
            kittens::init_semaphore(sem.slot_full[i], ForwardArrivals::slot_full);
            kittens::init_semaphore(sem.slot_empty[i], ForwardArrivals::slot_empty(p.consumers, p.row_ctas));
        }
        for (int i = 0; i < P::consumers; ++i) kittens::init_semaphore(sem.q_full[i], ForwardArrivals::q_full);
        kittens::init_semaphore(sem.w_full, ForwardArrivals::w_full);
        kittens::init_semaphore(sem.w_empty, ForwardArrivals::w_empty(p.consumers));
        kittens::init_semaphore(sem.slice_sums_full, ForwardArrivals::slice_sums_full(p.consumers));
        for (auto &stored : sem.part_stored) kittens::init_semaphore(stored, ForwardArrivals::part_stored(p.consumers));
        for (int i = 0; i < P::piece_slots; ++i) kittens::init_semaphore(sem.piece_full[i], ForwardArrivals::piece_full);
        tma::fence_semaphore_init();
    }
    __syncthreads();

    if (warpgroup == p.consumers) {
        kittens::warpgroup::decrease_registers<P::producer_registers>();
        const int warp = kittens::warpgroup::warpid();
        if (warp == 0) {
            const WeightMaps weights{&map_k, &map_u, &map_v};
            if (division != Division::slices && kittens::laneid() == 0) prefetch_weights<d_h, division>(weights, p);
            __syncwarp();
            begin(p);
            if (kittens::laneid() == 0) {  // where multicast is always, both are one instance
                if (division != Division::slices && (p.row_ctas > 1 || P::always_multicast))
                    load_weights<d_h, T, true, division>(shared, weights, p);
                else load_weights<d_h, T, P::always_multicast, division>(shared, weights, p);
            }
        } else if (warp <= p.consumers) {
            load_rows_of_items<d_h, T, division>(shared, &map_q, &map_r, &map_out, p, warp - 1);
        } else {
            begin(p);
            if constexpr (division == Division::gathers) {
                if (warp == p.consumers + 1) signal_parts<d_h, T>(shared, p);
            } else if constexpr (division == Division::waves && P::may_add_parts)
                if (p.schedule.adds_parts && warp == p.consumers + 1) add_parts<d_h, T>(shared, p);
        }
        __syncwarp();
        // Pairs: no CTA leaves while the other can still signal it. Slices: the consumers' half stands in the exchange of their sums.
        if (p.cluster_size > 1) cluster_sync();
    } else {
        begin(p);
        kittens::warpgroup::increase_registers<P::consumer_registers>();
        ForwardConsumer<d_h, T, division>{{shared, p, __shfl_sync(kittens::MASK_ALL, kittens::warpgroupid(), 0)}}.run();
        __syncwarp();
        if (p.row_ctas > 1) cluster_sync();
    }
}

}  // namespace flashmhf
