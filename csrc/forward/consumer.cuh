// The forward kernel: out[t, h] = sum_e r[t, h, e] sum_j silu(q.k_ej) (q.u_ej) v_ej, accumulated in fp32.
//
//   producer warpgroup     warp 0: K, U, V tiles into the ring     1, 2: Q, R or W of the next item  3: sums of the parts of split items
//   consumer warpgroup     64 token rows; tile i of the item's inner range:
//                            issue  [M|N] = Q [K;U]^T  of tile i     (both in flight from here on)
//                            issue  O += A V           of tile i - 1
//                            wait for [M|N];  A = r silu(M) N        (while O += A V still runs)
//                            wait for O;      round A                (operand of the next round)
//
// The consumer warpgroups share every tile and fill each other's gaps. CTAs of a cluster take neighbouring rows and multicast the tiles, or
// share an item's inner range and add their sums.
#pragma once

#include <cstddef>
#include "forward/add_parts.cuh"

#include "forward/epilogue.cuh"
#include "forward/gate.cuh"
#include "forward/producer.cuh"
#include "forward/swiglu_tile.cuh"

namespace flashmhf {

template <int d_h, typename T> struct ForwardConsumer {
    using P = ForwardPolicy<d_h>;
    using Shared = ForwardShared<d_h, T>;
    using warpgroup = kittens::warpgroup;
    using T2 = typename kittens::base_types::packing<T>::packed_type;

    // Halving Q in registers is exact in bf16, and saves a multiplication for each element of M.
    static constexpr bool halved = P::q_in_registers && std::is_same_v<T, kittens::bf16>;

    Shared &shared;
    const ForwardParams &p;
    const int wg, warp = warpgroup::warpid(), lane = kittens::laneid();
    // The CTA that this thread tells of a slot that its warpgroup has read; none: -1.
    const int reader_of = lane != 0 || warp >= p.row_ctas ? -1 : p.row_ctas > 1 ? warp : kittens::cluster_ctarank();
    Ring<P::slots> ring;
    uint32_t q_phase = 0;

    __device__ __forceinline__ void wait_slot() { kittens::wait(shared.semaphores.slot_full[ring.slot], ring.phase); }
    // One thread of the warpgroup for every CTA that gets the tile. wgmma.wait_group has covered the reads of the slot.
    __device__ __forceinline__ void release(int slot) {
        if (reader_of >= 0) tma::arrive_remote(shared.semaphores.slot_empty[slot], reader_of);
    }
    // At the start the ring is the consumers'. All tiles at once would come before the first Q: the slots behind the first are handed over
    // when it is there. With few tokens the memory is the bound, and must not wait.
    __device__ __forceinline__ void release_ring(int from, int to) {
#pragma unroll 1
        for (int slot = from; slot < to; ++slot) release(slot);
    }
    __device__ __forceinline__ const Item &first_item() {
        const int early = p.schedule.sharers > 1 ? P::slots : 1;
        release_ring(0, early);
        const Item &item = next_item();
        release_ring(early, P::slots);
        return item;
    }
    // Waits for the next item, its Q and what comes with it, and makes it the current one.
    __device__ __forceinline__ const Item &next_item() {
        kittens::wait(shared.semaphores.q_full[wg], q_phase);
        q_phase ^= 1;
        return this_item();
    }
    __device__ __forceinline__ const Item &this_item() { return shared.items[q_phase ^ 1][wg]; }
    __device__ __forceinline__ const Item &last_item() { return shared.items[q_phase][wg]; }
    __device__ __forceinline__ GateTile<d_h> &gate_buffer() { return shared.gate[P::gate_buffers == 2 ? q_phase ^ 1 : 0][wg]; }
    template <typename Query> __device__ __forceinline__ void begin_gate(GateRows<d_h, T, halved> &gate, Query &&query) {
        if (P::gate_early && p.router_bytes) kittens::wait(shared.semaphores.w_full, q_phase ^ 1);
        gate.begin(this_item(), gate_buffer(), shared.router(p), query);
        if (P::gate_early && p.router_bytes && lane == 0) kittens::arrive(shared.semaphores.w_empty);
    }
    // Q has been read; the buffer is empty, or holds an output for the producer to store.
    __device__ __forceinline__ void release_q() { kittens::arrive(q_empty_barrier(wg)); }
    // Once an item the warpgroups issue their products one after the other: side by side they would reach their elementwise parts, and
    // leave the tensor cores idle, together. From there they run freely: taking turns in every tile passes each delay on to the others.
    // Items no longer than the ring are left out: a warpgroup could arrive for the next turn before the other has taken this one.
    __device__ __forceinline__ bool takes_turns(const Item &item) { return item.end - item.begin > P::slots; }
    __device__ __forceinline__ void await_turn(const Item &item) {
        if (wg > 0 && takes_turns(item)) kittens::arrive_and_wait(turn_barrier(wg));
    }
    __device__ __forceinline__ void pass_turn(const Item &item) {
        if (wg + 1 < p.consumers && takes_turns(item)) kittens::arrive(turn_barrier(wg + 1));
    }
    // Leaves the sums of an item where they belong, and the buffer of Q to the producer.
    __device__ __forceinline__ void finish(const Item &item, const OutputTile<d_h> &o) {
        // Read while the record is this item's: with the buffer of Q the producer gets it, too.
        const int part = item.part;
        const bool stores = holds_token(p, item.sequence, item.token + fragment_row(warpgroup::laneid()));
        if (part < 0) stage_output(shared.q[wg], o);
        release_q();
        if (P::may_share && p.schedule.sharers > 1) {
            cluster_sync();  // every ring has been read for the last time
            send_shares<d_h>(shared.shares(), shared.semaphores.shares_full, o, p, wg);
            kittens::wait(shared.semaphores.shares_full, 0);
            add_shares<d_h, T>(shared.shares(), p, wg);
        } else if (part >= 0) {
            if (stores) store_part<d_h>(o, p, kittens::clusterIdx().x, part, p.row_ctas > 1 ? kittens::cluster_ctarank() : 0, wg);
            if (P::may_add_parts) {
                __syncwarp();
                if (lane == 0) kittens::arrive(shared.semaphores.part_stored[part]);
            }
        }
    }
    __device__ __forceinline__ void run() {
        if constexpr (P::q_in_registers) run_streamed();
        else run_item_by_item();
    }

    // O += A V behind a first product, whose wgmma fence serves both.
    __device__ __forceinline__ static void accumulate(OutputTile<d_h> &o, const ActivationTile<T> &a, const typename Shared::V &v) {
        warpgroup::mma_AB<OutputTile<d_h>, ActivationTile<T>, typename Shared::V, 0>(o, a, v);
    }

    // Q in registers: one stream of tiles through all items.
    __device__ __forceinline__ void run_streamed() {
        GateRows<d_h, T, halved> gate{p};
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

        auto load_q = [&]() {
            warpgroup::load(q, shared.q[wg]);
            if constexpr (halved) kittens::warp::mul(q, q, __float2bfloat16(0.5f));
        };
        if (first_item().end == 0) return;
        load_q();
        wait_slot();
        mn = 0.f;
        warpgroup::mm_ABt(mn, q, shared.ku(ring.slot));
        warpgroup::mma_async_wait<0>();
        pin(mn);
        release_q();
        while (true) {
            begin_gate(gate, query);
            warpgroup::mma_async_wait<0>();
            pin(mn);
            // here: [M|N] of the item's first tile
            o = 0.f;
            swiglu<halved>(mn, gate.r);
            gate.advance(gate_buffer());
            pack<T>(a, mn);
            release(ring.slot);
            ring.advance();
            gate.replenish(this_item(), gate_buffer(), query);
            wait_slot();
            for (int left = this_item().end - this_item().begin - 1; left > 0; --left) {
                pin(a), pin(o);
                warpgroup::mm_ABt(mn, q, shared.ku(ring.slot));
                accumulate(o, a, shared.v(ring.slot));
                warpgroup::mma_async_wait<1>();
                pin(mn);
                swiglu<halved>(mn, gate.r);
                gate.advance(gate_buffer());
                pin(mn);
                const int slot = ring.slot;
                ring.advance();
                wait_slot();
                warpgroup::mma_async_wait<0>();
                pin(mn), pin(o), pin(a);
                release(slot);
                pack<T>(a, mn);
                gate.replenish(this_item(), gate_buffer(), query);
            }
            const bool more = next_item().end > 0;
            if (more) load_q();
            await_turn(this_item());
            pin(a), pin(o), pin(q);
            warpgroup::mma_AB(o, a, shared.v(ring.slot));
            warpgroup::mm_ABt(mn, q, shared.ku(ring.slot));  // the next item's first tile; after the last item a product nobody uses
            pass_turn(this_item());
            warpgroup::mma_async_wait<1>();
            pin(o);
            finish(last_item(), o);
            if (!more) break;
        }
        warpgroup::mma_async_wait<0>();
        pin(mn);
    }

    // Q in shared memory: [K;U] comes as two halves of d_h, and an item ends before the next begins.
    __device__ __forceinline__ void run_item_by_item() {
        GateRows<d_h, T, halved> gate{p};
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
        Ring<P::slots> done;  // slots are released in the order of their use
        auto release_next = [&]() {
            release(done.slot);
            done.advance();
        };
        auto issue_ku = [&]() {
            wait_slot();
            warpgroup::mm_ABt(mn, q[0], shared.ku(ring.slot));
            ring.advance();
            wait_slot();
            warpgroup::mma_ABt(mn, q[1], shared.ku(ring.slot));
            ring.advance();
        };
        auto issue_v = [&]() {
            wait_slot();
            warpgroup::mma_AB(o, a, shared.v(ring.slot));
            ring.advance();
        };
        mn = 0.f;
        release_ring(0, P::slots);
        while (true) {
            if (next_item().end == 0) return;
            await_turn(this_item());
            issue_ku();
            pass_turn(this_item());
            begin_gate(gate, query);
            warpgroup::mma_async_wait<0>();
            pin(mn);
            release_next(), release_next();
            o = 0.f;
            swiglu<halved>(mn, gate.r);
            gate.advance(gate_buffer());
            pack<T>(a, mn);
            gate.replenish(this_item(), gate_buffer(), query);
            for (int left = this_item().end - this_item().begin - 1; left > 0; --left) {
                pin(a), pin(o);
                issue_ku();
                issue_v();
                warpgroup::mma_async_wait<1>();
                pin(mn);
                release_next(), release_next();
                swiglu<halved>(mn, gate.r);
                gate.advance(gate_buffer());
                pin(mn);
                if (left > 1) wait_slot();
                warpgroup::mma_async_wait<0>();
                pin(mn), pin(o), pin(a);
                release_next();
                pack<T>(a, mn);
                gate.replenish(this_item(), gate_buffer(), query);
            }
            pin(a), pin(o);
            issue_v();
            warpgroup::mma_async_wait<0>();
            pin(o);
            release_next();
            finish(this_item(), o);
        }
    }
};

template <int d_h, typename T>
__global__ __launch_bounds__(ForwardPolicy<d_h>::threads,
                             1) void forward(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
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
    if (kittens::warpid() == 0) {
        auto &sem = shared.semaphores;
        for (int i = 0; i < P::slots; ++i) {
            kittens::warp::init_semaphore(sem.slot_full[i], full_arrivals);
            kittens::warp::init_semaphore(sem.slot_empty[i], p.consumers * p.row_ctas);
        }
        for (int i = 0; i < P::consumers; ++i) kittens::warp::init_semaphore(sem.q_full[i], q_full_arrivals);
        kittens::warp::init_semaphore(sem.w_full, full_arrivals);
        kittens::warp::init_semaphore(sem.w_empty, 4 * p.consumers);
        kittens::warp::init_semaphore(sem.shares_full, full_arrivals);
        for (auto &stored : sem.part_stored) kittens::warp::init_semaphore(stored, 4 * p.consumers);
        for (int i = 0; i < P::piece_slots; ++i) kittens::warp::init_semaphore(sem.piece_full[i], full_arrivals);
        tma::fence_semaphore_init();
        if (p.schedule.sharers > 1 && kittens::laneid() == 0)
            kittens::tma::expect_bytes(sem.shares_full, Pieces::of<d_h>(p).bytes(kittens::cluster_ctarank()));
    }
    __syncthreads();

    if (warpgroup == p.consumers) {
        kittens::warpgroup::decrease_registers<P::producer_registers>();
        const int warp = kittens::warpgroup::warpid();
        if (warp == 0) {
            const WeightMaps weights{&map_k, &map_u, &map_v};
            if (p.schedule.sharers == 1 && kittens::laneid() == 0) prefetch_weights<d_h>(weights, p);
            __syncwarp();
            begin(p);
            if (kittens::laneid() == 0) {  // where multicast is always, both are one instance
                if (p.row_ctas > 1 || P::always_multicast) load_weights<d_h, T, true>(shared, weights, p);
                else load_weights<d_h, T, P::always_multicast>(shared, weights, p);
            }
        } else if (warp <= p.consumers) {
            load_rows_of_items<d_h, T>(shared, &map_q, &map_r, &map_out, p, warp - 1);
        } else {
            begin(p);
            if constexpr (P::may_add_parts)
                if (p.schedule.adds_parts && warp == p.consumers + 1) add_parts<d_h, T>(shared, p);
        }
        __syncwarp();
        if (p.cluster_size > 1) cluster_sync();  // pairs: no CTA leaves while the other can still signal it; sharers: see finish()
    } else {
        begin(p);
        kittens::warpgroup::increase_registers<P::consumer_registers>();
        ForwardConsumer<d_h, T>{shared, p, __shfl_sync(kittens::MASK_ALL, kittens::warpgroupid(), 0)}.run();
        __syncwarp();
        if (p.row_ctas > 1) cluster_sync();
    }
}

}  // namespace flashmhf
