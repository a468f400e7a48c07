// The forward kernel: out[t, h] = sum_e r[t, h, e] sum_j silu(q.k_ej) (q.u_ej) v_ej, accumulated in fp32.
//
//   producer warpgroup     warp 0: K, U, V tiles into the ring     warp 1: Q of the next item
//   consumer warpgroup     64 token rows; tile i of the item's inner range:
//                            issue  [M|N] = Q [K;U]^T  of tile i     (16-64 wgmma in flight from here on)
//                            issue  O += A V           of tile i - 1
//                            wait for [M|N];  A = r silu(M) N        (while O += A V still runs)
//                            wait for O;      round A                (operand of the next round)
//
// The two consumer warpgroups share every tile and fill each other's gaps. CTAs of a cluster take neighbouring rows and multicast the tiles.
#pragma once

#include "kernels/gate_rows.cuh"
#include "kernels/load_tiles.cuh"
#include "kernels/store_tiles.cuh"
#include "kernels/swiglu_tile.cuh"

namespace flashmhf {

template <int d_h, typename T> struct ForwardConsumer {
    using P = ForwardPolicy<d_h>;
    using Shared = ForwardShared<d_h, T>;
    using warpgroup = kittens::warpgroup;
    using T2 = typename kittens::base_types::packing<T>::packed_type;

    Shared &shared;
    const ForwardParams &p;
    const CUtensorMap *out;
    const int cluster, rank, wg = kittens::warpgroupid(), warp = warpgroup::warpid(), lane = kittens::laneid();
    Ring<P::slots> ring;
    uint32_t q_phase = 0;

    __device__ __forceinline__ void wait_slot() { kittens::wait(shared.semaphores.slot_full[ring.slot], ring.phase); }
    // One thread of the warpgroup for every CTA of the cluster. wgmma.wait_group has covered the reads of the slot.
    __device__ __forceinline__ void release(int slot) {
        if (lane == 0 && warp < p.cluster_size) tma::arrive_remote(shared.semaphores.slot_empty[slot], warp);
    }
    __device__ __forceinline__ void wait_q() {
        kittens::wait(shared.semaphores.q_full[wg], q_phase);
        q_phase ^= 1;
    }
    __device__ __forceinline__ void release_q() {
        __syncwarp();
        if (lane == 0) kittens::arrive(shared.semaphores.q_empty[wg]);
    }
    // The finished output of an item, or its part of a split item.
    __device__ __forceinline__ void finish(const Work &work, const RowTile &tile, const OutputTile<d_h> &o) {
        if (work.end - work.begin == p.schedule.inter_tiles) {
            store_output(shared.output(wg), o, out, tile, output_barrier(wg));
        } else {
            const int64_t rows = tile.rows(p);
            store_part<d_h>(o, p.partials + part_offset(p, d_h, cluster, work.part, rank, wg), rows < tile_rows ? static_cast<int>(rows) : tile_rows);
        }
    }
    __device__ __forceinline__ void run() {
        if constexpr (P::q_in_registers) run_streamed();
        else run_item_by_item();
        if (warpgroup::laneid() == 0) kittens::tma::store_async_wait<0>();
    }

    // Q in registers: one stream of tiles through all items.
    __device__ __forceinline__ void run_streamed() {
        WorkCursor cursor(p.schedule, cluster);
        Work work, next;
        if (!cursor.next(work)) return;
        GateRows<d_h, T> gate(p, shared.gate[wg][warp]);
        kittens::rt<T, 16, d_h> q;
        ActivationTile<T> a;
        ScoreTile mn;
        OutputTile<d_h> o;
        auto query = [&](int k, T2(&fragment)[4]) {
#pragma unroll
            for (int i = 0; i < d_h / 16; ++i)
                if (i == k) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) fragment[j] = q.tiles[0][i].data[j];
                }
        };

        RowTile tile(p, work.item, rank, wg);
        wait_q();
        warpgroup::load(q, shared.q[wg]);
        wait_slot();
        mn = 0.f;
        warpgroup::mm_ABt(mn, q, shared.ku(ring.slot));
        gate.begin(tile, work, query);
        warpgroup::mma_async_wait<0>();
        pin(mn);
        release_q();
        while (true) {
            // here: [M|N] of the item's first tile
            o = 0.f;
            swiglu(mn, gate.r);
            pack<T>(a, mn);
            release(ring.slot);
            ring.advance();
            gate.advance(query);
            wait_slot();
            for (int i = work.begin + 1; i < work.end; ++i) {
                pin(a), pin(o);
                warpgroup::mm_ABt(mn, q, shared.ku(ring.slot));
                warpgroup::mma_AB(o, a, shared.v(ring.slot));
                warpgroup::mma_async_wait<1>();
                pin(mn);
                swiglu(mn, gate.r);
                pin(mn);
                const int slot = ring.slot;
                ring.advance();
                wait_slot();  // between the elementwise part and the next wait also as a block boundary: ptxas sinks the former otherwise
                warpgroup::mma_async_wait<0>();
                pin(mn), pin(o), pin(a);
                release(slot);
                pack<T>(a, mn);
                gate.advance(query);
            }
            const bool more = cursor.next(next);
            if (more) {
                wait_q();
                warpgroup::load(q, shared.q[wg]);
            }
            pin(a), pin(o), pin(q);
            warpgroup::mma_AB(o, a, shared.v(ring.slot));
            warpgroup::mm_ABt(mn, q, shared.ku(ring.slot));  // the next item's first tile; after the last item a product nobody uses
            warpgroup::mma_async_wait<1>();
            pin(o);
            finish(work, tile, o);
            work = next;
            tile = RowTile(p, work.item, rank, wg);
            if (more) gate.begin(tile, work, query);
            warpgroup::mma_async_wait<0>();
            pin(mn);
            if (!more) break;
            release_q();
        }
    }

    // Q in shared memory: [K;U] comes as two halves of d_h, and an item ends before the next begins.
    __device__ __forceinline__ void run_item_by_item() {
        WorkCursor cursor(p.schedule, cluster);
        Work work;
        GateRows<d_h, T> gate(p, shared.gate[wg][warp]);
        ActivationTile<T> a;
        ScoreTile mn;
        OutputTile<d_h> o;
        using Half = kittens::st<T, tile_rows, d_h / 2, true, P::swizzle_bytes>;
        auto *q = reinterpret_cast<Half *>(&shared.q[wg]);
        auto query = [&](int k, T2(&fragment)[4]) {
            const uint32_t base = tma::shared_address(shared.q[wg].data);
            const uint32_t at = Shared::Q::idx(base, int2{16 * warp + lane % 16, 16 * k + lane / 16 * 8});
            kittens::move<T2>::ldsm4(fragment[0], fragment[1], fragment[2], fragment[3], at);
        };
        int slots[2];  // of [K;U]
        auto issue_ku = [&]() {
            wait_slot();
            warpgroup::mm_ABt(mn, q[0], shared.ku(ring.slot));
            slots[0] = ring.slot;
            ring.advance();
            wait_slot();
            warpgroup::mma_ABt(mn, q[1], shared.ku(ring.slot));
            slots[1] = ring.slot;
            ring.advance();
        };
        mn = 0.f;
        while (cursor.next(work)) {
            const RowTile tile(p, work.item, rank, wg);
            wait_q();
            issue_ku();
            gate.begin(tile, work, query);
            warpgroup::mma_async_wait<0>();
            pin(mn);
            release(slots[0]), release(slots[1]);
            o = 0.f;
            swiglu(mn, gate.r);
            pack<T>(a, mn);
            gate.advance(query);
            for (int i = work.begin + 1; i < work.end; ++i) {
                pin(a), pin(o);
                issue_ku();
                wait_slot();
                warpgroup::mma_AB(o, a, shared.v(ring.slot));
                warpgroup::mma_async_wait<1>();
                pin(mn);
                release(slots[0]), release(slots[1]);
                swiglu(mn, gate.r);
                pin(mn);
                warpgroup::mma_async_wait<0>();
                pin(mn), pin(o), pin(a);
                release(ring.slot);
                ring.advance();
                pack<T>(a, mn);
                gate.advance(query);
            }
            pin(a), pin(o);
            wait_slot();
            warpgroup::mma_AB(o, a, shared.v(ring.slot));
            warpgroup::mma_async_wait<0>();
            pin(o);
            release(ring.slot);
            ring.advance();
            finish(work, tile, o);
            if (warpgroup::laneid() == 0) kittens::tma::store_async_read_wait<0>();
            warpgroup::sync(output_barrier(wg));
            if (warpgroup::laneid() == 0) kittens::arrive(shared.semaphores.q_empty[wg]);
        }
    }
};

template <int d_h, typename T> __global__ __launch_bounds__(forward_threads, 1)
void forward(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_u,
             const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_out, const __grid_constant__ ForwardParams p) {
    using P = ForwardPolicy<d_h>;
    using Shared = ForwardShared<d_h, T>;
    static_assert(sizeof(typename Shared::Semaphores) <= barrier_bytes && sizeof(Shared) <= shared_memory_limit);
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int warpgroup = __shfl_sync(kittens::MASK_ALL, kittens::warpgroupid(), 0);
    const int rank = kittens::cluster_ctarank(), cluster = blockIdx.x / p.cluster_size;

    if (kittens::warpid() == 0) {
        auto &sem = shared.semaphores;
        for (int i = 0; i < P::slots; ++i) {
            kittens::warp::init_semaphore(sem.slot_full[i], slot_full_arrivals);
            kittens::warp::init_semaphore(sem.slot_empty[i], slot_empty_arrivals * p.cluster_size);
        }
        for (int i = 0; i < consumers; ++i) {
            kittens::warp::init_semaphore(sem.q_full[i], q_full_arrivals);
            kittens::warp::init_semaphore(sem.q_empty[i], P::q_in_registers ? q_empty_arrivals : q_empty_arrivals_staged);
        }
        tma::fence_semaphore_init();
    }
    __syncthreads();
    cluster_sync();
    launch_dependents();  // the combine kernel, if any; it waits for this one to finish

    if (warpgroup == consumers) {
        kittens::warpgroup::decrease_registers<producer_registers>();
        const int warp = kittens::warpgroup::warpid();
        if (kittens::laneid() == 0) {
            if (warp == 0) load_weights<d_h, T>(shared, WeightMaps{&map_k, &map_u, &map_v}, p, cluster, rank);
            if (warp == 1) load_queries<d_h, T>(shared, &map_q, p, cluster, rank);
        }
        __syncwarp();
        cluster_sync();  // no CTA leaves while another can still signal it
    } else {
        kittens::warpgroup::increase_registers<consumer_registers>();
        ForwardConsumer<d_h, T>{shared, p, &map_out, cluster, rank}.run();
        __syncwarp();
        cluster_sync();
    }
}

}  // namespace flashmhf
