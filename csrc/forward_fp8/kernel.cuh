// The forward kernel in FP8 (e4m3): out[t, h] = sum_e r[t, h, e] sum_j silu(q.k_ej) (q.u_ej) v_ej.
//
//   producer warpgroup     warp 0: K, U, V tiles into the ring     1, 2, 3: Q, scales, R or W of the next item; the output of the last one
//   consumer warpgroup     64 token rows; for each chunk of inter rows of the item's range:
//                            issue  [M|N] = Q [K;U]^T  of the next chunk
//                            A = silu(M) N of this one             (while the product runs)
//                            issue  O += A V
//                            wait for [M|N] of the next chunk and O += A V of the chunk before
//                          at the end of a sub-network: sums += r O
//
// CTAs of a cluster either take neighbouring rows and multicast the tiles, or divide an item's inter range and add their sums.
#pragma once

#include <cstddef>

#include "forward_fp8/consumer.cuh"
#include "forward_fp8/producer.cuh"

namespace flashmhf {

// An instance for CTAs that divide an item of one or two row tiles, and one for the rest.
template <int d_h, typename T, bool few_rows>
__global__ void __launch_bounds__(ForwardFp8Policy<d_h, few_rows>::threads, 1)
    flashmhf_forward_fp8(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                         const __grid_constant__ CUtensorMap map_u, const __grid_constant__ CUtensorMap map_v,
                         const __grid_constant__ CUtensorMap map_out, const __grid_constant__ CUtensorMap map_r,
                         const __grid_constant__ ForwardFp8Params p) {
    using P = ForwardFp8Policy<d_h, few_rows>;
    using Shared = ForwardFp8Shared<d_h, T, few_rows>;
    static_assert(offsetof(Shared, router) + P::router_bytes <= P::shared_memory);
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int warpgroup = __shfl_sync(kittens::MASK_ALL, kittens::warpgroupid(), 0);

    if (threadIdx.x == 0) {
        for (const CUtensorMap *map : {&map_q, &map_k, &map_u, &map_v, &map_out}) tma::prefetch(map);
        if (p.gate_tiles) tma::prefetch(&map_r);
    }
    if (threadIdx.x == 32) {  // one branch for all semaphores, beside the warp that prefetches the maps
        using Arrivals = ForwardFp8Arrivals;
        auto &sem = shared.semaphores;
        for (int i = 0; i < P::slots; ++i) {
            kittens::init_semaphore(sem.slot_full[i], Arrivals::slot_full);
            kittens::init_semaphore(sem.slot_empty[i], Arrivals::slot_empty(p.consumers, p.row_ctas));
        }
        for (int i = 0; i < P::consumers; ++i) {
            kittens::init_semaphore(sem.q_full[i], Arrivals::q_full);
            kittens::init_semaphore(sem.r_full[i], Arrivals::r_full);
        }
        kittens::init_semaphore(sem.w_full, Arrivals::w_full);
        kittens::init_semaphore(sem.w_empty, Arrivals::w_empty(p.consumers));
        kittens::init_semaphore(sem.slice_sums_full, Arrivals::slice_sums_full(p.consumers));
        tma::fence_semaphore_init();
    }
    __syncthreads();

    if (warpgroup == p.consumers) {
        kittens::warpgroup::decrease_registers<P::producer_registers>();
        const int warp = kittens::warpgroup::warpid();
        if (warp == 0) {
            const WeightMaps weights{&map_k, &map_u, &map_v};
            if (P::prefetched_tiles > 0 && kittens::laneid() == 0) prefetch_weights_fp8<P, d_h>(weights, p);
            __syncwarp();
            begin(p);
            if (kittens::laneid() == 0) {
                if (!few_rows && p.row_ctas > 1) load_weights_fp8<d_h, T, few_rows, true>(shared, weights, p);
                else load_weights_fp8<d_h, T, few_rows, false>(shared, weights, p);
            }
        } else if (warp <= p.consumers) {
            const int last = warp == 3 ? p.consumers : warp;  // the last warp has the rows of two of four warpgroups
            load_rows_fp8<d_h, T, few_rows>(shared, &map_q, &map_r, &map_out, p, warp - 1, last);
        } else {
            begin(p);
        }
        __syncwarp();
        // Pairs: no CTA leaves while the other can still signal it. Slices: the consumers' half stands in the exchange of their sums.
        if (p.cluster_size > 1) cluster_sync();
    } else {
        begin(p);
        kittens::warpgroup::increase_registers<P::consumer_registers>();
        ForwardFp8Consumer<d_h, T, few_rows>{{shared, p, __shfl_sync(kittens::MASK_ALL, kittens::warpgroupid(), 0)}}.run();
        __syncwarp();
        if (p.row_ctas > 1) cluster_sync();
    }
}

}  // namespace flashmhf
