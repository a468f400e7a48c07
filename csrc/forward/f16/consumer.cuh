// The consumer warpgroups of the forward kernel in 16 bits: 64 token rows each, products and elementwise part of one tile after the other.
#pragma once

#include "common/activation.cuh"
#include "forward/f16/add_parts.cuh"
#include "forward/f16/gate.cuh"
#include "forward/item_stream.cuh"
#include "forward/slice_exchange.cuh"

namespace flashmhf {

using ScoreTile = kittens::rt_fl<16, 2 * tile_inter>;
template <typename T> using ActivationTile = kittens::rt<T, 16, tile_inter>;

// A = r act(M) N, from the product [M | N] = Q [K;U]^T of one tile, in place over M: rows g and g + 8 of the warp's fragment (pairs 0, 2 and 1, 3 of a base tile) have weights r.x and r.y. Where Q came
// divided by q_part, N did, too, and r must be so much larger.
template <typename Activation, int q_part> __device__ __forceinline__ void swiglu(ScoreTile &mn, float2 r) {
    constexpr int width = tile_inter / 16;
    constexpr float to_x = float{q_part} / Activation::part;
    auto &tile = mn.tiles[0];
#pragma unroll
    for (int j = 0; j < width; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float2 &m = tile[j].data[k];
            const float2 n = tile[j + width].data[k];
            const float gate = k % 2 ? r.y : r.x;
            m.x = Activation::forward(to_x * m.x) * (n.x * gate);
            m.y = Activation::forward(to_x * m.y) * (n.y * gate);
        }
}

// To the 16-bit operand of the second product: accumulator and operand fragments have the same order.
template <typename T> __device__ __forceinline__ void pack(ActivationTile<T> &a, const ScoreTile &mn) {
#pragma unroll
    for (int j = 0; j < tile_inter / 16; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k)
            a.tiles[0][j].data[k] = kittens::base_types::convertor<typename ActivationTile<T>::T2, float2>::convert(mn.tiles[0][j].data[k]);
}

// Sums of a slice in fp32 (forward/slice_exchange.cuh). A thread's piece is quad j of its fragment.
template <int d_h> struct FloatSliceSums {
    static constexpr int columns = ForwardPolicy<d_h>::piece_columns;
    static constexpr bool scaled = false;
    const OutputTile<d_h> &o;
    __device__ __forceinline__ uint4 piece(int j) const { return bits_of(fragment_quad<d_h>(o, j)); }
    __device__ __forceinline__ static void add(float4 (&sum)[1], uint4 x, float2) {
        flashmhf::add(sum[0], {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)});
    }
};

struct NoExchange {  // where nothing is divided into slices
    __device__ __forceinline__ NoExchange(auto &...) {}
};

template <int d_h, typename T, Division division>
struct ForwardConsumer : ItemStream<ForwardShared<d_h, T>, ForwardParams, ForwardPolicy<d_h>::slots> {
    using P = ForwardPolicy<d_h>;
    using Shared = ForwardShared<d_h, T>;
    using Stream = ItemStream<Shared, ForwardParams, P::slots>;
    using warpgroup = kittens::warpgroup;
    using T2 = typename kittens::base_types::packing<T>::packed_type;

    static constexpr bool gathers = division == Division::gathers, slices = division == Division::slices;
    using Exchange = std::conditional_t<slices, SliceExchange<d_h, T, FloatSliceSums<d_h>, Shared>, NoExchange>;
    static constexpr bool adds_behind_waves = division == Division::waves && P::may_add_parts;
    using Activation = typename P::Activation;
    // What Q is divided by in registers, which is exact in bf16, and saves a multiplication for each element of M.
    static constexpr int q_part = P::q_in_registers && std::is_same_v<T, kittens::bf16> ? Activation::part : 1;

    using Stream::shared, Stream::p, Stream::wg, Stream::warp, Stream::lane, Stream::reader_of, Stream::ring, Stream::q_phase,
        Stream::tiles, Stream::items;
    using Stream::wait_slot, Stream::release, Stream::release_ring, Stream::first_item, Stream::next_item, Stream::this_item,
        Stream::last_item, Stream::release_q;

    __device__ __forceinline__ GateTile<d_h> &gate_buffer() { return shared.gate[P::gate_buffers == 2 ? q_phase ^ 1 : 0][wg]; }
    template <typename Query> __device__ __forceinline__ void begin_gate(GateRows<d_h, T, q_part> &gate, Query &&query) {
        if (P::gate_early && p.gate.router_bytes) kittens::wait(shared.w_full, q_phase ^ 1);
        gate.begin(this_item(), gate_buffer(), shared.router(p), query);
        if (P::gate_early && p.gate.router_bytes && lane == 0) kittens::arrive(shared.w_empty);
    }
    // Once an item the warpgroups issue their products one after the other. Side by side they would reach their elementwise parts together
    // and leave the tensor cores idle. From there they run freely: an order in every tile passes each delay on to the others. Items no
    // longer than the ring are left out: a warpgroup could arrive for the next item's order before the other one has passed this item's.
    __device__ __forceinline__ bool issues_in_order(const Item &item) { return item.end - item.begin > P::slots; }
    __device__ __forceinline__ void wait_to_issue(const Item &item) {
        if (wg > 0 && issues_in_order(item)) kittens::arrive_and_wait(issue_order_barrier(wg));
    }
    __device__ __forceinline__ void let_next_issue(const Item &item) {
        if (wg + 1 < p.consumers && issues_in_order(item)) kittens::arrive(issue_order_barrier(wg + 1));
    }
    // Stores the sums of an item (output buffer, workspace, or the other slices' CTAs) and hands the buffer of Q to the producer.
    __device__ __forceinline__ void finish(const Item &item, const OutputTile<d_h> &o, Exchange &exchange) {
        // Read before release_q(): the producer overwrites the record once it has the buffer of Q.
        const Item tile = item;
        const bool stores = holds_token(p, tile.sequence, tile.token + p.token_of(fragment_row(warpgroup::laneid())));
        if (tile.part < 0) stage_output(shared.q[wg], o);
        release_q();
        if constexpr (slices) {
            exchange.run({o});
        } else if (tile.part >= 0) {
            if (stores)
                store_part<d_h>(o, p, kittens::clusterIdx().x, kittens::clusterIdx().y, tile.part,
                                p.row_ctas > 1 ? kittens::cluster_ctarank() : 0, wg);
            if (P::may_add_parts) {
                __syncwarp();
                if (lane == 0) kittens::arrive(shared.parts.stored[tile.part]);
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

    // No row of this warpgroup holds a token, in any item. With blocks side by side that may be so, too, but passing those items makes
    // T = 257 to 576 slower by 7 to 12 % (experiments/README.md).
    __device__ __forceinline__ bool is_idle() { return p.blocks == 1 && !holds_token(p, this_item().sequence, this_item().token); }
    // Does for all items what the others wait for, without the products: they take power, and the tensor cores of the other warpgroup.
    __device__ __forceinline__ void pass_items() {
        release_q();
        while (true) {
            if (p.gate.router_bytes) {
                kittens::wait(shared.w_full, q_phase ^ 1);
                if (lane == 0) kittens::arrive(shared.w_empty);
            }
            for (int left = this_item().end - this_item().begin; left > 0; --left, ring.advance())
                if (reader_of >= 0) {
                    wait_sleeping(shared.semaphores.slot_full[ring.slot], ring.phase);
                    release(ring.slot);
                }
            __syncwarp();
            const bool more = next_item().end > 0;
            wait_to_issue(this_item());
            let_next_issue(this_item());
            const int part = last_item().part;
            release_q();
            if (P::may_add_parts && part >= 0 && lane == 0) kittens::arrive(shared.parts.stored[part]);
            if (!more) return;
        }
    }

    // Q in registers: one stream of tiles through all items.
    __device__ __forceinline__ void run_streamed() {
        GateRows<d_h, T, q_part> gate{p};
        kittens::rt<T, 16, d_h> q;
        ActivationTile<T> a;
        ScoreTile mn;
        OutputTile<d_h> o;
        Exchange exchange{shared, p};
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
            if constexpr (q_part > 1) kittens::warp::mul(q, q, __float2bfloat16(1.f / q_part));
        };
        if (first_item(P::slots).end == 0) return;
        if constexpr (gathers)
            if (is_idle()) return pass_items();
        load_q();
        if constexpr (slices) {  // one item: its gate is computed while the first tile comes
            begin_gate(gate, query);
            release_q();
        }
        wait_slot();
        mn = 0.f;
        warpgroup::mm_ABt(mn, q, shared.ku(ring.slot));
        warpgroup::mma_async_wait<0>();
        pin(mn);
        if constexpr (!slices) release_q();
        while (true) {
            if constexpr (!slices) begin_gate(gate, query);
            warpgroup::mma_async_wait<0>();
            pin(mn);
            // here: [M|N] of the item's first tile
            stamp(Stamp::forward_scores_done, tiles - 1);
            o = 0.f;
            swiglu<Activation, q_part>(mn, gate.r);
            gate.advance(gate_buffer());
            pack<T>(a, mn);
            release(ring.slot);
            ring.advance();
            gate.replenish(this_item(), gate_buffer(), query);
            wait_slot();
            for (int left = this_item().end - this_item().begin - 1; left > 0; --left) {  // here: A(i), and in the slot [K;U](i+1) and V(i)
                pin(a), pin(o);
                // Issue [M|N](i+1) = Q [K;U](i+1)^T, and behind it O += A(i) V(i)
                warpgroup::mm_ABt(mn, q, shared.ku(ring.slot));
                accumulate(o, a, shared.v(ring.slot));
                // Wait for [M|N](i+1) alone; A(i+1) = r act(M) N in place while O += A(i) V(i) runs
                warpgroup::mma_async_wait<1>();
                pin(mn);
                stamp(Stamp::forward_scores_done, tiles - 1);
                swiglu<Activation, q_part>(mn, gate.r);
                gate.advance(gate_buffer());
                pin(mn);
                const int slot = ring.slot;
                ring.advance();
                wait_slot();
                // Wait for O; then nothing reads A(i) or the slot: hand it back and round A(i+1)
                warpgroup::mma_async_wait<0>();
                pin(mn), pin(o), pin(a);
                release(slot);
                pack<T>(a, mn);
                gate.replenish(this_item(), gate_buffer(), query);
            }
            // The next item's Q, then the last product of this item and the first of the next
            const bool more = next_item().end > 0;
            if (more) load_q();
            wait_to_issue(this_item());
            pin(a), pin(o), pin(q);
            warpgroup::mma_AB(o, a, shared.v(ring.slot));
            warpgroup::mm_ABt(mn, q, shared.ku(ring.slot));  // the next item's first tile; after the last item a product nobody uses
            let_next_issue(this_item());
            if constexpr (slices)
                if (p.slices.late_successor && threadIdx.x == 0) kittens::pdl::arrive();
            if constexpr (slices) exchange.prepare(last_item(), wg);
            warpgroup::mma_async_wait<1>();
            pin(o);
            stamp(Stamp::forward_sums_done, items - 2);
            if (gathers && last_item().part == gathered_item) break;  // the last one
            finish(last_item(), o, exchange);
            stamp(Stamp::forward_item_stored, items - 2);
            if (!more) break;
            if (adds_behind_waves && this_item().part == gathered_item) {  // all its parts are in memory
                o = 0.f;
                next_item();
                break;
            }
        }
        warpgroup::mma_async_wait<0>();
        pin(mn);
        if constexpr (gathers || adds_behind_waves)
            if (last_item().part == gathered_item) {
                gather_parts<d_h, T>(shared, o, wg);
                stage_output(shared.q[wg], o);
                release_q();
                stamp(Stamp::forward_item_stored, items - 2);
            }
    }

    // Q in shared memory: [K;U] comes as two halves of d_h, and an item ends before the next begins.
    __device__ __forceinline__ void run_item_by_item() {
        GateRows<d_h, T, q_part> gate{p};
        ActivationTile<T> a;
        ScoreTile mn;
        OutputTile<d_h> o;
        Exchange exchange{shared, p};
        using Half = kittens::st<T, tile_rows, d_h / 2, true, P::swizzle_bytes>;
        auto *q = reinterpret_cast<Half *>(&shared.q[wg]);
        auto query = [&](int k, T2(&fragment)[4]) { Stream::read_q(k, fragment); };
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
            wait_to_issue(this_item());
            issue_ku();
            let_next_issue(this_item());
            begin_gate(gate, query);
            warpgroup::mma_async_wait<0>();
            pin(mn);
            stamp(Stamp::forward_scores_done, tiles - 1);
            release_next(), release_next();
            o = 0.f;
            swiglu<Activation, q_part>(mn, gate.r);
            gate.advance(gate_buffer());
            pack<T>(a, mn);
            gate.replenish(this_item(), gate_buffer(), query);
            for (int left = this_item().end - this_item().begin - 1; left > 0; --left) {
                pin(a), pin(o);
                issue_ku();
                issue_v();
                warpgroup::mma_async_wait<1>();
                pin(mn);
                stamp(Stamp::forward_scores_done, tiles - 1);
                release_next(), release_next();
                swiglu<Activation, q_part>(mn, gate.r);
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
            stamp(Stamp::forward_sums_done, items - 1);
            release_next();
            finish(this_item(), o, exchange);
            stamp(Stamp::forward_item_stored, items - 1);
        }
    }
};

}  // namespace flashmhf
