// S role of the inter-stationary kernels: [M|N] = Q [K;U]^T and dA = dO V^T, the elementwise part, and dQ in the fused kernel.
#pragma once

#include "backward/inter_cta.cuh"
#include "backward/rows.cuh"
#include "backward/swiglu_grad.cuh"
#include "common/trace.cuh"

namespace flashmhf {

// What S leaves for the other roles: P and [dM|dN] of a tile as 16-bit tiles.
template <typename T, typename Shared> struct GradTiles {
    using P = typename Shared::P;
    using T2 = typename kittens::base_types::packing<T>::packed_type;

    Shared &shared;
    // This lane's row of a tile of 128-byte rows, for stmatrix and ldmatrix; columns 16j.. lie at place ^ 32j.
    __device__ __forceinline__ static uint32_t lane_place() {
        return Shared::Gated::idx(0u, int2{kittens::warpgroup::warpid() * 16 + kittens::laneid() % 16, kittens::laneid() / 16 * 8});
    }
    __device__ __forceinline__ uint32_t gated(int slot, uint32_t place, int j) const {
        return tma::shared_address(shared.gated[P::values ? slot : 0].data) + (place ^ (32 * j));
    }
    __device__ __forceinline__ uint32_t dm(int slot, uint32_t place, int j) const {
        return tma::shared_address(shared.grads[P::keys ? slot : 0].data) + (place ^ (32 * j));
    }
    __device__ __forceinline__ uint32_t dn(int slot, uint32_t place, int j) const {
        return dm(slot, place, j) + sizeof(typename Shared::Gated);
    }

    __device__ __forceinline__ void store(GradBlock<T> &block, int slot, uint32_t place, int j) const {
        using move = kittens::move<T2>;
        if constexpr (P::values) move::stsm4(gated(slot, place, j), block.p[0], block.p[1], block.p[2], block.p[3]);
        if constexpr (P::keys) {
            move::stsm4(dm(slot, place, j), block.dm[0], block.dm[1], block.dm[2], block.dm[3]);
            move::stsm4(dn(slot, place, j), block.dn[0], block.dn[1], block.dn[2], block.dn[3]);
        }
    }
    __device__ __forceinline__ void hand_over(int slot) const {
        tma::fence_shared_writes();
        __syncwarp();
        if (kittens::laneid() == 0)
#pragma unroll
            for (int reader = 0; reader < P::grad_readers; ++reader) kittens::arrive(shared.grads_full[slot][reader]);
    }
};

// a and c of all of M, while `pending` later products are in the tensor cores. The pins and a branch, which is the caller's next wait, keep
// the compiler from moving the special functions behind those products.
template <typename Activation, int pending, typename MN, typename Slope>
__device__ __forceinline__ void start_slopes(MN &mn, Slope &slope) {
    kittens::warpgroup::mma_async_wait<pending>();
    pin(mn);
#pragma unroll
    for (int j = 0; j < Slope::width; ++j) activate<Activation>(mn.tiles[0][j], slope.tiles[0][j]);
    pin(mn);
    pin(slope);
}

// S role of the kernels for weight gradients alone. One warpgroup: it hands a tile over only after it has issued its products of the next.
template <typename T, typename Shared> __device__ __forceinline__ void scores(Shared &shared, const InterWork &work) {
    using namespace kittens;
    using P = typename Shared::P;
    const GradTiles<T, Shared> tiles{shared};
    const int row = fragment_row(warpgroup::laneid());
    const uint32_t place = tiles.lane_place();
    const bool leader = kittens::laneid() == 0;
    Ring<P::q_stages> q;
    Ring<P::g_stages> g;
    Ring<P::grad_buffers> buffer;

    wait(shared.weights_full, 0);
    wait(shared.q_full[0], 0);
#pragma unroll 1
    for (int it = work.begin; it < work.end; ++it) {
        rt_fl<16, 2 * tile_inter> mn;
        rt_fl<16, tile_inter> da, slope;
        // issue [M|N] = Q [K;U]^T, dA = dO V^T of tile i
        warpgroup::mm_ABt(mn, shared.q[q.slot], shared.ku);
        if constexpr (P::keys) {
            wait(shared.g_full[g.slot], g.phase);
            warpgroup::mm_ABt(da, shared.grad_out[g.slot], shared.v[0]);
        }
        // give W P, [dM|dN] of tile i - 1, behind these products
        if (it > work.begin) tiles.hand_over(buffer.slot ^ 1);
        // wait for [M|N];  a = act(M), c = act'(M)  (while dA still runs)
        const float2 r = {shared.r[q.slot][row], shared.r[q.slot][row + 8]};
        start_slopes<typename P::Activation, P::keys>(mn, slope);
        if (it >= work.begin + 2) wait(shared.grads_empty[buffer.slot], buffer.phase ^ 1);  // the buffers start empty
        // wait for dA
        warpgroup::mma_async_wait<0>();
        pin(mn);
        if constexpr (P::keys) pin(da);
        if (!P::keys || !P::values) {  // S is the last reader of one of the operands
            __syncwarp();
            if (leader) work.release(P::keys ? shared.g_empty[g.slot] : shared.q_empty[q.slot]);
        }
        // P = r a N;  dN = r dA a;  dM = r dA N c
        float2 dr = {0.f, 0.f};
        q.advance();
        g.advance();
#pragma unroll
        for (int j = 0; j < tile_inter / 16; ++j) {
            // the next Q: before the last stores, whose queue would delay the answer
            if (j == 2 && it + 1 < work.end) wait(shared.q_full[q.slot], q.phase);
            GradBlock<T> block;
            const auto &n = mn.tiles[0][j + tile_inter / 16];
            swiglu_grad(block, mn.tiles[0][j], slope.tiles[0][j], n, P::keys ? da.tiles[0][j] : n, r, dr);
            tiles.store(block, buffer.slot, place, j);
        }
        buffer.advance();
    }
    if (work.begin < work.end) tiles.hand_over(buffer.slot ^ 1);
}

// S role of the fused kernel. Two warpgroups, which take alternate tiles. dQ of a tile enters the tensor cores behind the products that
// the other warpgroup has issued for the next tile; while these and W's products run, the other one does its elementwise part. Otherwise
// both fall into step.
template <typename T, typename Shared>
__device__ __forceinline__ void scores_and_query_grads(Shared &shared, const InterWork &work, int index) {
    using namespace kittens;
    using P = typename Shared::P;
    static_assert(P::s_warpgroups == 2 && P::grad_buffers == P::s_warpgroups, "each has a buffer of its own");
    static_assert(P::q_stages == P::g_stages);
    constexpr int d_h = Shared::Rows::cols, blocks = tile_inter / 16;
    constexpr int slices = P::staged_slices, columns = d_h / slices;
    const GradTiles<T, Shared> tiles{shared};
    const bool leader = kittens::laneid() == 0;
    Ring<P::q_stages> ring;
    if (index == 1) ring.advance();
    uint32_t phase = 0;  // of this warpgroup's tiles

    wait(shared.weights_full, 0);
#pragma unroll 1
    for (int left = work.end - work.begin - index; left > 0; left -= P::s_warpgroups) {
        // Values derived from these are computed in every round: kept from one round to the next they would not fit the registers.
        int slot = index, row = fragment_row(warpgroup::laneid());
        uint32_t place = tiles.lane_place();
        asm volatile("" : "+r"(slot), "+r"(row), "+r"(place));

        rt_fl<16, 2 * tile_inter> mn;
        rt_fl<16, tile_inter> da, slope;
        // issue [M|N] = Q [K;U]^T, dA = dO V^T of tile i
        wait(shared.q_full[ring.slot], ring.phase);
        warpgroup::mm_ABt(mn, shared.q[ring.slot], shared.ku);
        wait(shared.g_full[ring.slot], ring.phase);
        warpgroup::mm_ABt(da, shared.grad_out[ring.slot], shared.v[0]);
        const int round = (work.end - work.begin - left) / P::s_warpgroups;  // for the stamps
        stamp(Stamp::s_products_issued, round);
        // let the other warpgroup issue dQ of tile i - 1
        if (index == 1 || left < work.end - work.begin)
            arrive(barrier<warpgroup_warps * P::s_warpgroups>(products_issued_barrier + (index ^ 1)));
        const float2 r = {shared.r[ring.slot][row], shared.r[ring.slot][row + 8]};
        // wait for [M|N];  a = act(M), c = act'(M)  (while dA still runs)
        if constexpr (P::early_slopes) start_slopes<typename P::Activation, 1>(mn, slope);
        // wait for dA, and for W to have read tile i - 2
        wait(shared.grads_empty[slot], phase ^ 1);
        warpgroup::mma_async_wait<0>();
        stamp(Stamp::s_products_done, round);
        pin(mn);
        pin(da);
#pragma unroll
        for (int n = 0; n < P::s_warpgroups; ++n) ring.advance();
        // P = r a N;  dN = r dA a;  dM = r dA N c;  dR = sum dA a N
        rt<T, 16, 2 * tile_inter> grads;
        float2 dr = {0.f, 0.f};
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
            // Complete long ago. The branch keeps the compiler from starting all blocks at once, for which registers do not suffice.
            if (j == 1) wait(shared.weights_full, 0);
            GradBlock<T> block;
            if constexpr (!P::early_slopes) activate<typename P::Activation>(mn.tiles[0][j], slope.tiles[0][j]);
            swiglu_grad(block, mn.tiles[0][j], slope.tiles[0][j], mn.tiles[0][j + blocks], da.tiles[0][j], r, dr);
            tiles.store(block, slot, place, j);
            if (j >= P::reloaded_blocks)
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    grads.tiles[0][j].data[k] = block.dm[k];
                    grads.tiles[0][j + blocks].data[k] = block.dn[k];
                }
        }
        auto *sums = reinterpret_cast<float *>(&shared.dr[slot][row]) + kittens::laneid() % 4;
        sums[0] = dr.x;
        sums[8 * 4] = dr.y;
        __syncwarp();
#pragma unroll
        for (int j = 0; j < P::reloaded_blocks; ++j) {
            using move = kittens::move<typename GradTiles<T, Shared>::T2>;
            auto &dm = grads.tiles[0][j].data, &dn = grads.tiles[0][j + blocks].data;
            move::ldsm4(dm[0], dm[1], dm[2], dm[3], tiles.dm(slot, place, j));
            move::ldsm4(dn[0], dn[1], dn[2], dn[3], tiles.dn(slot, place, j));
        }
        // give W P, [dM|dN] of tile i; wait until the other warpgroup has issued [M|N], dA of tile i + 1
        tiles.hand_over(slot);
        stamp(Stamp::s_handed_over, round);
        if (left > 1) arrive_and_wait(barrier<warpgroup_warps * P::s_warpgroups>(products_issued_barrier + index));
        // issue dQ = [dM|dN] [K;U]
        rt_fl<16, columns> dq[slices];
#pragma unroll
        for (int c = 0; c < slices; ++c) warpgroup::mm_AB(dq[c], grads, shared.ku.template subtile<columns>(c));
        stamp(Stamp::s_dq_issued, round);
        // wait for a slice of dQ, stage it, let the dQ warp add it to the sums
        const uint32_t staged = tma::shared_address(shared.staged) + 16 * warpgroup::laneid();
#pragma unroll
        for (int c = 0; c < slices; ++c) {
            if (c + 1 < slices) warpgroup::mma_async_wait<1>();
            else warpgroup::mma_async_wait<0>();
            pin(dq[c]);
            wait(shared.staged_empty[slot][c], phase ^ (slot == 0));  // of the tile before, which the other warpgroup has staged
            each_fragment(dq[c], [&](int j, float4 v) { tma::store(staged + 2048 * (j + c * columns / 8), bits_of(v)); });
            tma::fence_shared_writes();
            __syncwarp();
            if (leader) arrive(shared.staged_full[c]);
        }
        stamp(Stamp::s_dq_staged, round);
        phase ^= 1;
    }
}

}  // namespace flashmhf
