// The consumer warpgroups of the FP8 forward kernel: 64 token rows each, products and elementwise part of one chunk after the other.
#pragma once

#include "forward/e4m3/arithmetic.cuh"
#include "forward/e4m3/gate.cuh"
#include "forward/item_stream.cuh"
#include "forward/slice_exchange.cuh"

namespace flashmhf {

// W, read while the sums of the item before leave few registers.
struct FewFromShared : FromShared {
    static constexpr int batch = 2;
};
// With few rows there are registers for three chains of products side by side. One after the other they add 0.4 us to a call of 16.5.
struct WideFromShared : FromShared {
    static constexpr int chains = 3;
};
struct FewFromGlobal : FromGlobal {
    static constexpr int batch = 1;
};

template <int d_h, typename T, bool few_rows>
struct ForwardFp8Consumer : ItemStream<ForwardFp8Shared<d_h, T, few_rows>, ForwardFp8Params, ForwardFp8Policy<d_h, few_rows>::slots> {
    using P = ForwardFp8Policy<d_h, few_rows>;
    using Shared = ForwardFp8Shared<d_h, T, few_rows>;
    using Stream = ItemStream<Shared, ForwardFp8Params, P::slots>;
    using warpgroup = kittens::warpgroup;
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    using Products = uint32_t[d_h / 4];
    using Exchange = SliceExchange<d_h, T, Fp8SliceSums<d_h>, Shared>;
    using Scores = Fp8Scores<P::chunk_inter>;
    using Activated = Fp8Activated<P::chunk_inter>;
    using Activation = typename P::Activation;

    using Stream::shared, Stream::p, Stream::wg, Stream::warp, Stream::lane, Stream::ring, Stream::q_phase, Stream::items;
    using Stream::wait_slot, Stream::release, Stream::first_item, Stream::next_item, Stream::this_item, Stream::last_item,
        Stream::release_q;

    const uint32_t ring_address = tma::shared_address(shared.ring);
    uint32_t q[d_h / 8];  // e4m3
    uint32_t factor[2];   // as in swiglu(), of rows g and g + 8
    float2 out_scale;

    __device__ __forceinline__ const Fp8Scales<d_h> &scales() { return shared.scales[q_phase ^ 1][wg]; }
    __device__ __forceinline__ Fp8GateTile<d_h> &gate_tile() { return shared.gate[wg]; }
    __device__ __forceinline__ static float2 widen(T2 x) { return kittens::base_types::convertor<float2, T2>::convert(x); }
    // The larger magnitudes of two pairs; of a number and NaN the number.
    __device__ __forceinline__ static T2 larger(T2 a, T2 b) { return __hmax2(a, __habs2(b)); }
    // Quantises Q of the current item per row, in two passes. once: Q is read once and stays in registers between them.
    template <bool once> __device__ __forceinline__ void load_q() {
        T2 kept[once ? d_h / 16 : 1][4], pair[2] = {};
        float2 squares[2] = {};
        constexpr int unrolled = once || d_h <= 128 ? d_h / 16 : 2;  // at d_h = 256 all reads at once would spill
#pragma unroll(unrolled)
        for (int k = 0; k < d_h / 16; ++k) {
            T2(&x)[4] = kept[once ? k : 0];
            Stream::read_q(k, x);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 v = widen(x[i]);
                squares[i % 2].x = fmaf(v.x, v.x, squares[i % 2].x);
                squares[i % 2].y = fmaf(v.y, v.y, squares[i % 2].y);
                pair[i % 2] = larger(pair[i % 2], x[i]);
            }
        }
        float unit[2], inverse[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 both = widen(pair[i]);
            float largest = fmaxf(both.x, both.y), sum = squares[i].x + squares[i].y;
            largest = fmaxf(largest, __shfl_xor_sync(kittens::MASK_ALL, largest, 1));
            largest = fmaxf(fmaxf(largest, __shfl_xor_sync(kittens::MASK_ALL, largest, 2)), smallest_query);
            sum += __shfl_xor_sync(kittens::MASK_ALL, sum, 1);
            sum += __shfl_xor_sync(kittens::MASK_ALL, sum, 2);
            const float reciprocal = reciprocal_fast(largest),
                        ratio = rsqrtf(fmaxf(sum * reciprocal * reciprocal, 1.f));                  // of largest and norm
            const float limit = query_norm * __uint_as_float(__float_as_uint(ratio) & 0x7f800000);  // of q8: a power of two
            unit[i] = largest * reciprocal_fast(limit);
            inverse[i] = reciprocal * limit;
        }
#pragma unroll
        for (int k = 0; k < d_h / 16; ++k) {
            T2(&x)[4] = kept[once ? k : 0];
            if constexpr (!once) Stream::read_q(k, x);
            float2 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                v[i] = widen(x[i]);
                v[i].x *= inverse[i % 2], v[i].y *= inverse[i % 2];
            }
            q[2 * k] = fp8::to_fp8(v[0], v[2]);
            q[2 * k + 1] = fp8::to_fp8(v[1], v[3]);
        }
        const float k_scale = scales().k;
        float scale[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            constexpr float part = 1.f / Activation::part;
            const float to_x = fminf(part * unit[i] * k_scale, 60000.f);
            scale[i] = part * unit[i] * unit[i] * k_scale;
            factor[i] = fp8::pack_half(to_x, to_x);
        }
        out_scale = {scale[0], scale[1]};
        fp8::pin(q);
        stamp(Stamp::forward_q_quantised, items - 1);
    }
    // The gate of the current item, where a router computes it, while Q lies in shared memory.
    __device__ __forceinline__ void compute_gate() {
        if (!has_router(p.gate.kind)) return;
        auto from = [&](int k, T2(&fragment)[4]) { Stream::read_q(k, fragment); };
        if (p.gate.router_bytes) {
            kittens::wait(shared.w_full, q_phase ^ 1);
            using Source = std::conditional_t<few_rows && (P::router_bytes > 0), WideFromShared, FewFromShared>;
            RouterRows<d_h, T, 1, Source, Fp8GateTile<d_h>>{p, shared.router(p), gate_tile(), 16 * warp}.normalise(this_item().subnet,
                                                                                                                   from);
            if (lane == 0) kittens::arrive(shared.w_empty);
        } else {
            Fp8GateRows rows{gate_rows<d_h>(p, wg), gate_tile().scale, p.subnets};
            const void *w = router_of<d_h, T>(p, this_item().head);
            RouterRows<d_h, T, 1, FewFromGlobal, Fp8GateRows>{p, w, rows, 16 * warp}.normalise(0, from);
        }
    }

    // [M | N] of a chunk of a slot.
    __device__ __forceinline__ void issue_scores(Scores &mn, int slot, int chunk) {
        const uint64_t ku = fp8::descriptor<P::ku_panel>(ring_address + slot * P::slot_bytes + chunk * P::ku_chunk_bytes);
#pragma unroll
        for (int k = 0; k < d_h; k += 32)
            fp8::multiply(mn, q + k / 8, ku + k / P::ku_panel * (P::ku_panel_bytes / 16) + k % P::ku_panel / 16, k > 0);
        warpgroup::mma_commit_group();
    }
    // products (+)= A V of a chunk of a slot.
    __device__ __forceinline__ void issue_products(Products &products, const Activated &a, int slot, int chunk, int accumulate) {
        const uint64_t v = fp8::descriptor<P::v_panel>(ring_address + slot * P::slot_bytes + P::ku_bytes);
#pragma unroll
        for (int k = 0; k < P::chunk_inter; k += 32)
            fp8::multiply(products, a + k / 8, v + (chunk * P::chunk_inter + k) / 16, k > 0 ? 1 : accumulate);
        warpgroup::mma_commit_group();
    }

    // Stores the sums of an item (output buffer, workspace, or the other slices' CTAs) and hands the buffer of Q to the producer.
    __device__ __forceinline__ void finish(const Item &item, const Fp8Sums<d_h> &sums, float2 scale) {
        // Read before release_q(): the producer overwrites the record once it has the buffer of Q, but not that of slices' only item.
        const int part = item.part;
        const bool stores = holds_token(p, item.sequence, item.token + fragment_row(warpgroup::laneid()));
        OutputTile<d_h> o;  // in each branch anew: registers for all of it are there only where it is used piece by piece
        if (part < 0) {
            sums.get(o, scale);
            stage_output(shared.q[wg], o);
        }
        release_q();
        if (P::consumers > 2 && p.schedule.slices > 1) {
            Exchange exchange{shared, p};
            exchange.prepare(item, wg);
            exchange.run({sums, scale});
        } else if (part >= 0 && stores) {
            sums.get(o, scale);
            store_part<d_h>(o, p, kittens::clusterIdx().x, kittens::clusterIdx().y, part, p.row_ctas > 1 ? kittens::cluster_ctarank() : 0,
                            wg);
        }
    }

    // Two buffers of [M|N]: the product of the next chunk runs under the elementwise part of this one, and A V of the one before.
    Fp8Gate<d_h, T> gate{this->p};
    Scores s0, s1;
    Activated a0, a1;
    Products o;
    Fp8Sums<d_h> sums;
    int accumulate = 0;  // 0: the next product of A V overwrites the sums
    int before = -1;     // the slot that the last product of A V still reads
    bool prepared;       // the gate of the item is
    int scores = 0;      // chunks so far, for the stamps
    Exchange exchange{this->shared, this->p};

    // A chunk of a slot, whose [M|N] is in `now`: issues that of the next chunk into `next`, and A V of this one, which is still on its way
    // behind it. A V of the chunk before, with A in `a_before`, has ended.
    __device__ __forceinline__ void chunk(Scores &now, Scores &next, Activated &a, Activated &a_before, int slot, int index, int next_slot,
                                          int next_index, int adds) {
        fp8::pin(next);
        warpgroup::mma_fence();
        issue_scores(next, next_slot, next_index);  // [M|N](c+1) = Q [K;U](c+1)^T
        swiglu<Activation>(a, now, factor);         // A(c) = silu(M(c)) N(c), while it runs
        fp8::pin(a);
        warpgroup::mma_fence();
        issue_products(o, a, slot, index, adds);  // O += A(c) V(c)
        warpgroup::mma_async_wait<1>();           // for [M|N](c+1); O may still run
        fp8::pin(next), fp8::pin(a_before);
        stamp(Stamp::forward_scores_done, ++scores);
    }
    __device__ __forceinline__ void release_before(int slot) {
        if (before >= 0) release(before);
        before = slot;
    }
    // The tile in the ring's slot, of one chunk in s0 or s1, and [M|N] of the next tile.
    __device__ __forceinline__ void one_chunk(Scores &now, Scores &next, Activated &a, Activated &a_before) {
        const int slot = ring.slot;
        ring.advance();
        wait_slot();
        chunk(now, next, a, a_before, slot, 0, ring.slot, 0, accumulate);
        accumulate = 1;
        release_before(slot);
    }
    // Both chunks of the tile in the ring's slot, then [M|N] of the next tile's first chunk.
    __device__ __forceinline__ void two_chunks() {
        const int slot = ring.slot;
        ring.advance();
        chunk(s0, s1, a0, a1, slot, 0, slot, 1, accumulate);
        accumulate = 1;
        release_before(slot);
        wait_slot();
        chunk(s1, s0, a1, a0, slot, 1, ring.slot, 0, 1);
    }
    __device__ __forceinline__ void prepare_gate(const Item &item) {
        if (prepared) return;
        prepared = true;
        if constexpr (few_rows && P::exchange_ahead) exchange.prepare(item, wg);
        if (p.gate.tiles) kittens::wait(shared.r_full[wg], q_phase ^ 1);
        gate.prepare(item, gate_tile(), scales(), wg, out_scale);
    }
    // `count` tiles, of which none is an item's last.
    __device__ __forceinline__ void run_tiles(int count) {
        if constexpr (P::chunks == 1) {
#pragma unroll 1
            for (int i = count / 2; i > 0; --i) {
                one_chunk(s0, s1, a0, a1);
                one_chunk(s1, s0, a1, a0);
            }
#pragma unroll 1
            for (int i = count % 2; i > 0; --i) {  // a loop, not a condition: ptxas would serialise the products
                one_chunk(s0, s1, a0, a1);
#pragma unroll
                for (int j = 0; j < P::chunk_inter / 2; ++j) s0[j] = s1[j];
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < count; ++i) two_chunks();
        }
    }
    // The current item, whose first tile's first [M|N] is in s0, but for the end of its last products. Returns the slot that they read.
    __device__ __forceinline__ int run_item(uint32_t &factors) {
        gate.begin(this_item());
        fp8::clear(sums.x);
        prepared = false;
        accumulate = 0;
        int left = this_item().end - this_item().begin;
        while (left > 1) {
            const int count = min(min(gate.left, P::promote_tiles), left - 1);
            run_tiles(count);
            left -= count;
            gate.left -= count;
            if (left == 1 && gate.left > 0) break;
            prepare_gate(this_item());
            factors = gate.r;
            warpgroup::mma_async_wait<0>();
            fp8::pin(o);
            sums.add(o, factors);
            accumulate = 0;
            if (gate.left == 0 && gate.advance(gate_tile())) sums.scale(gate.replenish(this_item(), gate_tile(), wg, out_scale));
        }
        prepare_gate(this_item());
        factors = gate.r;
        if (p.gate.tiles) kittens::arrive(r_read_barrier(wg));

        const int slot = ring.slot;
        if constexpr (P::chunks == 1) {
            swiglu<Activation>(a0, s0, factor);
            fp8::pin(a0), fp8::pin(a1);
            warpgroup::mma_fence();
            issue_products(o, a0, slot, 0, accumulate);
        } else {
            ring.advance();
            chunk(s0, s1, a0, a1, slot, 0, slot, 1, accumulate);
            if (before >= 0) release(before);
            swiglu<Activation>(a1, s1, factor);
            fp8::pin(a1);
            warpgroup::mma_fence();
            issue_products(o, a1, slot, 1, 1);
        }
        return slot;
    }
    // Few rows: the CTA's one item, whose sums go to the other slices.
    __device__ __forceinline__ void run_slice() {
        uint32_t factors;
        run_item(factors);
        if constexpr (!P::exchange_ahead) exchange.prepare(this_item(), wg);
        warpgroup::mma_async_wait<0>();
        fp8::pin(o), fp8::pin(a0), fp8::pin(a1);
        sums.add(o, factors);
        stamp(Stamp::forward_sums_done);
        release_q();
        exchange.run({sums, out_scale});
    }
    // All items: the first product of the next one runs under the epilogue of this one.
    __device__ __forceinline__ void run_stream() {
        while (true) {
            uint32_t factors;
            const int slot = run_item(factors);
            const float2 scale = out_scale;
            const bool more = next_item().end > 0;
            if (more) load_q<false>(), wait_slot();
            fp8::clear(s0), fp8::clear(s1);  // no register lives across load_q()
            fp8::pin(s0), fp8::pin(s1);
            warpgroup::mma_fence();
            issue_scores(s0, ring.slot, 0);  // of the next item; after the last one a product nobody uses
            if (more) compute_gate();
            warpgroup::mma_async_wait<1>();
            fp8::pin(o), fp8::pin(a0), fp8::pin(a1);
            release(slot);
            before = -1;
            sums.add(o, factors);
            stamp(Stamp::forward_sums_done, items - 2);
            finish(last_item(), sums, scale);
            stamp(Stamp::forward_item_stored, items - 2);
            warpgroup::mma_async_wait<0>();
            fp8::pin(s0);
            if (this_item().end == 0) break;  // read again: no register holds it until here
        }
    }
    __device__ __forceinline__ void run() {
        if (first_item(P::early_slots).end == 0) return;
        load_q<few_rows>();
        wait_slot();
        fp8::clear(s0), fp8::clear(s1), fp8::clear(o);
        fp8::pin(s0), fp8::pin(s1), fp8::pin(o);
        warpgroup::mma_fence();
        issue_scores(s0, ring.slot, 0);
        compute_gate();
        warpgroup::mma_async_wait<0>();
        fp8::pin(s0);
        stamp(Stamp::forward_scores_done);
        release_q();
        if constexpr (few_rows) run_slice();
        else run_stream();
    }
};

}  // namespace flashmhf
