// Inter-stationary backward. A CTA owns 64 inter rows of one sub-network (K, U, V stay in shared memory) and walks over tokens in tiles
// of 64. Its warpgroups have roles, drawn in README.md:
//
//   loader  warp 0 streams Q and dO tiles (TMA, a ring each). Warp 1 adds staged dQ tiles into global memory (bulk reduce-add). Warp 2
//   brings
//           the gate R of a tile to shared memory. Warp 3 adds dR into global memory.
//   S       [M|N] = Q [K;U]^T and dA = dO V^T, the elementwise part, P and [dM|dN] as 16-bit tiles to shared memory. The fused kernel has
//   two
//           S warpgroups, which take alternate tiles, and then compute dQ = [dM|dN] [K;U] with [dM|dN] from registers, fp32 to staging.
//   W       dK += dM^T Q, dU += dN^T Q, dV += P^T dO in registers.
//
// A warp is held at wgmma issue until the tensor pipe has taken all but its last few instructions, so overlap comes from other warpgroups.
// While an S group does its elementwise part, the pipe works for the other S group and for W. A kernel with one S group hands tile i to W
// only after it has issued its own products of tile i + 1.
//
// Ordered accumulation (deterministic sums): the CTAs of a head add to a tile in the order of their items.
//
// Power sets the clock, so moving fewer bytes is faster. The CTAs of a pair (cluster of two, fused kernel only) own neighbouring inter rows
// of one head and walk over the same tokens; one fetches the Q tiles for both, the other the dO tiles.
#pragma once

#include "backward/params.h"
#include "backward/plan.h"
#include "backward/policy.h"
#include "backward/rows.cuh"
#include "backward/swiglu_grad.cuh"
#include "common/barriers.h"
#include "common/fragments.cuh"
#include "common/real.cuh"
#include "common/ring.h"
#include "common/tma.cuh"
#include "common/token_tile.cuh"

namespace flashmhf {

struct BackwardMaps {
    CUtensorMap q, grad_out;  // [batch][length][H][d_h], boxes of 64 tokens; rows behind the last token read as zeros
    CUtensorMap k, u, v;      // [H * E][d_e][d_h]; rows from d_e on read as zeros
};

template <int d_h, int outputs, typename T> struct alignas(1024) InterShared {
    using P = InterPolicy<d_h, outputs>;
    template <int rows, int cols> using tile = kittens::st<T, rows, cols, true, cols * sizeof(T) % 128 == 0 ? 128 : 64>;
    using KU = tile<2 * tile_inter, d_h>;  // K over U
    using Rows = tile<tile_rows, d_h>;
    using V = tile<tile_inter, d_h>;
    using Grads = tile<tile_rows, 2 * tile_inter>;  // dM beside dN, 64 tokens each
    using Gated = tile<tile_rows, tile_inter>;      // P

    KU ku;
    V v[P::needs_v];
    Rows q[P::q_stages], grad_out[P::g_stages];
    Grads grads[P::keys ? 2 : 0];
    Gated gated[P::values ? 2 : 0];
    float staged[P::query ? tile_rows * d_h : 0];  // dQ in fragment order
    float r[P::q_stages][tile_rows];
    float4 dr[P::query ? 2 : 0][tile_rows];  // a row's sums over the columns of four threads
    // Semaphore          arrives                                                 waits
    // weights_full       the loader's expect_bytes; its copies of K, U, V        S
    // q_full, g_full     the loader's expect_bytes; its copies. q_full: also     S, W
    //                    the R warp, when the tile's gate is in shared memory
    // q_empty, g_empty   the warps of the tile's last readers, of every CTA      the loader; q_empty: also the R warp
    //                    that it is sent to
    // grads_full         the warps of S; one semaphore for each reading role     the dR warp and W, or one or two W
    // grads_empty        the warps of W; the dR warp                             S
    // staged_full        the warps of the S group that staged dQ                 the dQ warp
    // staged_empty       the dQ warp, when it has read the slice                 the other S group; one semaphore for each group
    kittens::semaphore weights_full, q_full[P::q_stages], q_empty[P::q_stages], g_full[P::g_stages], g_empty[P::g_stages], grads_full[2][2],
        grads_empty[2], staged_full[P::staged_slices], staged_empty[2][P::staged_slices];

    static constexpr int q_full_arrivals = loader_arrival + thread_arrival, g_full_arrivals = loader_arrival;
    static constexpr int q_readers = P::keys ? P::accumulator_groups : 1, g_readers = 1;  // warpgroups that read a tile last
    static constexpr int grads_full_arrivals = warpgroup_arrivals;
    static constexpr int grads_empty_arrivals = warpgroup_arrivals * P::accumulator_groups + (P::query ? thread_arrival : 0);
    static constexpr int staged_full_arrivals = warpgroup_arrivals, staged_empty_arrivals = thread_arrival;
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
        const int group = item / p.subnet_tiles;
        row = (item - group * p.subnet_tiles) * tile_inter;
        head = group / p.subnets;
        subnet = group - head * p.subnets;
    }
    // A slot of a ring is free once every CTA that its tile was sent to has read it.
    __device__ __forceinline__ void release(kittens::semaphore &slot_empty) const {
        kittens::arrive(slot_empty);
        if (pair) tma::arrive_remote(slot_empty, rank ^ 1);
    }
};

// Ordered accumulation: a CTA adds to a sum only once the CTA before it in the order of the items has added its part. That CTA's block
// number is lower, so the first block that has not finished never waits for one that has not started, whatever else runs on the device.
// (Blocks start in the order of their numbers: how the hardware does it, not a promise of the programming model.) By one thread.
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

// Named barriers; 0 is __syncthreads.
enum InterBarrier : int {
    // Numbers 1, 2: a W group's staging is free for its next tile. The number after them: all W groups have consumed their last tile, so
    // the
    // rings become staging. All W groups arrive and wait.
    w_staging_barrier = 1,
    // The other S group has issued its products of the next tile: that group arrives, this one arrives and waits. One for each group.
    products_issued_barrier = 4,
};

// acc += a^T b, the columns of b spread over the accumulators; behind the caller's mma_fence.
template <int halves, typename Acc, typename A, typename B>
__device__ __forceinline__ void add_product(Acc (&acc)[halves], const A &a, B &b) {
#pragma unroll
    for (int c = 0; c < halves; ++c) {
        auto &columns = b.template subtile<Acc::cols>(c);
        kittens::warpgroup::mma_AtB<Acc, A, std::remove_reference_t<decltype(columns)>, 0, 1>(acc[c], a, columns);
    }
}

// W role: accumulates weight gradients over all tiles. Where the role has two warpgroups, w_group 0 takes dK and 1 takes dU.
template <typename Shared>
__device__ __forceinline__ void accumulate_weight_grads(Shared &shared, const BackwardParams &p, const InterWork &work, int reader,
                                                        int w_group) {
    using namespace kittens;
    using P = typename Shared::P;
    using T = typename Shared::Rows::T;
    using Acc = rt_fl<16, P::w_columns>;
    constexpr int d_h = Shared::Rows::cols, halves = d_h / P::w_columns;
    constexpr bool keys = P::keys, ups = P::keys && P::accumulator_groups == 1, values = P::values;
    Acc dk[halves], du[halves], dv[halves];
#pragma unroll
    for (int c = 0; c < halves; ++c) {
        warp::zero(dk[c]);
        warp::zero(du[c]);
        warp::zero(dv[c]);
    }
    Ring<P::q_stages> q;
    Ring<P::g_stages> g;
    Ring<2> buffer;
    const bool leader = kittens::laneid() == 0;
#pragma unroll 1
    for (int it = work.begin; it < work.end; ++it) {
        if constexpr (keys) wait(shared.q_full[q.slot], q.phase);
        if constexpr (values) wait(shared.g_full[g.slot], g.phase);
        wait(shared.grads_full[buffer.slot][reader], buffer.phase);
        warpgroup::mma_fence();
        if constexpr (keys) add_product(dk, shared.grads[buffer.slot].template subtile<tile_inter>(w_group), shared.q[q.slot]);
        if constexpr (ups) add_product(du, shared.grads[buffer.slot].template subtile<tile_inter>(1), shared.q[q.slot]);
        if constexpr (values) add_product(dv, shared.gated[buffer.slot], shared.grad_out[g.slot]);
        if constexpr (keys) {
            warpgroup::mma_async_wait<values * halves>();
            if (leader) work.release(shared.q_empty[q.slot]);
        }
        warpgroup::mma_async_wait<0>();
        if (leader) {
            if constexpr (values) work.release(shared.g_empty[g.slot]);
            arrive(shared.grads_empty[buffer.slot]);
        }
        q.advance();
        g.advance();
        buffer.advance();
    }
    warpgroup::mma_async_wait<0>();
    // Every tile has been consumed: the rings become staging, once all W groups are here.
    if constexpr (P::accumulator_groups > 1)
        kittens::arrive_and_wait(kittens::barrier<warpgroup_warps * P::accumulator_groups>(w_staging_barrier + P::accumulator_groups));
    constexpr int size = tile_inter * d_h, staged = tile_inter * P::w_columns;
    static_assert(P::accumulator_groups * staged * sizeof(float) <= sizeof(shared.q) + sizeof(shared.grad_out));
    float *staging = reinterpret_cast<float *>(&shared.q[0]) + w_group * staged;
    auto finish = [&](Acc(&acc)[halves], void *out, int which) {
#pragma unroll
        for (int c = 0; c < halves; ++c) {
            pin(acc[c]);
            if (work.split) {
                float *slot =
                    p.weight_parts + ((static_cast<int64_t>(work.item - p.whole) * p.parts + work.part) * 3 + which) * size + c * staged;
                each_fragment(acc[c],
                              [&](int j, float4 v) { __stcg(reinterpret_cast<float4 *>(slot) + 128 * j + warpgroup::laneid(), v); });
            } else {
                const int64_t first_row = static_cast<int64_t>(work.head * p.subnets + work.subnet) * p.subnet_dim + work.row;
                char *at = static_cast<char *>(out) + (first_row * d_h + c * P::w_columns) * (p.accumulate ? sizeof(float) : sizeof(T));
                store_rows<T>(acc[c], staging, at, d_h, p.subnet_dim - work.row, p.accumulate, w_staging_barrier + w_group);
            }
        }
    };
    if constexpr (keys) finish(dk, w_group ? p.du : p.dk, w_group);
    if constexpr (ups) finish(du, p.du, 1);
    if constexpr (values) finish(dv, p.dv, 2);
}

// What S leaves for the other roles: P and [dM|dN] of a tile as 16-bit tiles.
template <typename T, typename Shared> struct GradTiles {
    using P = typename Shared::P;
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    static constexpr int readers = P::query + P::accumulator_groups;  // roles that read them: dR 0, if any, then W

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
            for (int reader = 0; reader < readers; ++reader) kittens::arrive(shared.grads_full[slot][reader]);
    }
};

// a and c of all of M, while `pending` later products are in the tensor cores. The pins and a branch, which is the caller's next wait, keep
// the compiler from moving the special functions behind those products.
template <int pending, typename MN, typename Slope> __device__ __forceinline__ void start_slopes(MN &mn, Slope &slope) {
    kittens::warpgroup::mma_async_wait<pending>();
    pin(mn);
#pragma unroll
    for (int j = 0; j < Slope::width; ++j) silu_and_slope(mn.tiles[0][j], slope.tiles[0][j]);
    pin(mn);
    pin(slope);
}

// S role of the kernels for weight gradients alone. One warpgroup: it hands a tile over only after it has issued its products of the next
// one.
template <typename T, typename Shared> __device__ __forceinline__ void scores(Shared &shared, const InterWork &work) {
    using namespace kittens;
    using P = typename Shared::P;
    const GradTiles<T, Shared> tiles{shared};
    const int row = fragment_row(warpgroup::laneid());
    const uint32_t place = tiles.lane_place();
    const bool leader = kittens::laneid() == 0;
    Ring<P::q_stages> q;
    Ring<P::g_stages> g;
    Ring<2> buffer;

    wait(shared.weights_full, 0);
    wait(shared.q_full[0], 0);
#pragma unroll 1
    for (int it = work.begin; it < work.end; ++it) {
        rt_fl<16, 2 * tile_inter> mn;
        rt_fl<16, tile_inter> da, slope;
        warpgroup::mm_ABt(mn, shared.q[q.slot], shared.ku);
        if constexpr (P::keys) {
            wait(shared.g_full[g.slot], g.phase);
            warpgroup::mm_ABt(da, shared.grad_out[g.slot], shared.v[0]);
        }
        if (it > work.begin) tiles.hand_over(buffer.slot ^ 1);
        const float2 r = {shared.r[q.slot][row], shared.r[q.slot][row + 8]};
        start_slopes<P::keys>(mn, slope);
        if (it >= work.begin + 2) wait(shared.grads_empty[buffer.slot], buffer.phase ^ 1);  // the buffers start empty
        warpgroup::mma_async_wait<0>();
        pin(mn);
        if constexpr (P::keys) pin(da);
        if (!P::keys || !P::values) {  // S is the last reader of one of the operands
            __syncwarp();
            if (leader) work.release(P::keys ? shared.g_empty[g.slot] : shared.q_empty[q.slot]);
        }
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

// S role of the fused kernel. Two warpgroups, which take alternate tiles. dQ of a tile enters the tensor cores behind the other group's
// products of the next tile; while these and W's products run, the other group does its elementwise part. Otherwise both fall into step.
template <typename T, typename Shared>
__device__ __forceinline__ void scores_and_query_grads(Shared &shared, const InterWork &work, int group) {
    using namespace kittens;
    using P = typename Shared::P;
    static_assert(P::s_groups == 2 && P::q_stages == P::g_stages);
    constexpr int d_h = Shared::Rows::cols, blocks = tile_inter / 16;
    constexpr int slices = P::staged_slices, columns = d_h / slices;
    const GradTiles<T, Shared> tiles{shared};
    const bool leader = kittens::laneid() == 0;
    Ring<P::q_stages> ring;
    if (group == 1) ring.advance();
    uint32_t phase = 0;  // of this group's tiles

    wait(shared.weights_full, 0);
#pragma unroll 1
    for (int left = work.end - work.begin - group; left > 0; left -= P::s_groups) {
        // Values derived from these are computed in every round: kept from one round to the next they would not fit the registers.
        int slot = group, row = fragment_row(warpgroup::laneid());
        uint32_t place = tiles.lane_place();
        asm volatile("" : "+r"(slot), "+r"(row), "+r"(place));

        rt_fl<16, 2 * tile_inter> mn;
        rt_fl<16, tile_inter> da, slope;
        wait(shared.q_full[ring.slot], ring.phase);
        warpgroup::mm_ABt(mn, shared.q[ring.slot], shared.ku);
        wait(shared.g_full[ring.slot], ring.phase);
        warpgroup::mm_ABt(da, shared.grad_out[ring.slot], shared.v[0]);
        if (group == 1 || left < work.end - work.begin)
            arrive(barrier<warpgroup_warps * P::s_groups>(products_issued_barrier + (group ^ 1)));
        const float2 r = {shared.r[ring.slot][row], shared.r[ring.slot][row + 8]};
        if constexpr (P::early_slopes) start_slopes<1>(mn, slope);
        wait(shared.grads_empty[slot], phase ^ 1);
        warpgroup::mma_async_wait<0>();
        pin(mn);
        pin(da);
#pragma unroll
        for (int n = 0; n < P::s_groups; ++n) ring.advance();
        rt<T, 16, 2 * tile_inter> grads;
        float2 dr = {0.f, 0.f};
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
            // Complete long ago. The branch keeps the compiler from starting all blocks at once, for which registers do not suffice.
            if (j == 1) wait(shared.weights_full, 0);
            GradBlock<T> block;
            if constexpr (!P::early_slopes) silu_and_slope(mn.tiles[0][j], slope.tiles[0][j]);
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
        tiles.hand_over(slot);
        if (left > 1) arrive_and_wait(barrier<warpgroup_warps * P::s_groups>(products_issued_barrier + group));
        rt_fl<16, columns> dq[slices];
#pragma unroll
        for (int c = 0; c < slices; ++c) warpgroup::mm_AB(dq[c], grads, shared.ku.template subtile<columns>(c));
        const uint32_t staged = tma::shared_address(shared.staged) + 16 * warpgroup::laneid();
#pragma unroll
        for (int c = 0; c < slices; ++c) {
            if (c + 1 < slices) warpgroup::mma_async_wait<1>();
            else warpgroup::mma_async_wait<0>();
            pin(dq[c]);
            wait(shared.staged_empty[slot][c], phase ^ (slot == 0));  // of the tile before, which the other group has staged
            each_fragment(dq[c], [&](int j, float4 v) { move<float4>::sts(staged + 2048 * (j + c * columns / 8), v); });
            tma::fence_shared_writes();
            __syncwarp();
            if (leader) arrive(shared.staged_full[c]);
        }
        phase ^= 1;
    }
}

template <int d_h, int outputs, typename T>
__global__ void __launch_bounds__(InterPolicy<d_h, outputs>::threads, 1)
    flashmhf_backward_inter(const __grid_constant__ BackwardMaps maps, const __grid_constant__ BackwardParams p) {
    using namespace kittens;
    using P = InterPolicy<d_h, outputs>;
    using Shared = InterShared<d_h, outputs, T>;
    static_assert(sizeof(Shared) <= shared_memory_limit);
    extern __shared__ __align__(1024) uint8_t shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);

    // The shuffle tells the compiler that both are uniform over the warp.
    const int role = __shfl_sync(MASK_ALL, warpgroupid(), 0), warp_in_role = __shfl_sync(MASK_ALL, warpid() & 3, 0);
    const int lane = kittens::laneid();
    const bool leader = lane == 0;
    const InterWork work(p, P::pairs);

    constexpr int readers = GradTiles<T, Shared>::readers;
    kittens::pdl::arrive();
    if (threadIdx.x == 32)
        for (const CUtensorMap *map : {&maps.k, &maps.u, &maps.q, &maps.v, &maps.grad_out}) tma::prefetch(map);
    if (threadIdx.x == 0) {
        const int ctas = 1 + work.pair;
        init_semaphore(shared.weights_full, loader_arrival);
        for (int s = 0; s < P::q_stages; ++s) {
            init_semaphore(shared.q_full[s], Shared::q_full_arrivals);
            init_semaphore(shared.q_empty[s], ctas * (warpgroup_arrivals * Shared::q_readers));
        }
        for (int s = 0; s < P::g_stages; ++s) {
            init_semaphore(shared.g_full[s], Shared::g_full_arrivals);
            init_semaphore(shared.g_empty[s], ctas * (warpgroup_arrivals * Shared::g_readers));
        }
        for (int b = 0; b < 2; ++b) {
            for (int reader = 0; reader < readers; ++reader) init_semaphore(shared.grads_full[b][reader], Shared::grads_full_arrivals);
            init_semaphore(shared.grads_empty[b], Shared::grads_empty_arrivals);
        }
        for (int slice = 0; slice < P::staged_slices; ++slice) {
            init_semaphore(shared.staged_full[slice], Shared::staged_full_arrivals);
            for (int group = 0; group < 2; ++group) init_semaphore(shared.staged_empty[group][slice], Shared::staged_empty_arrivals);
        }
        tma::fence_semaphore_init();
        tma::fence_shared_writes();
    }
    if constexpr (P::pairs) cluster_sync();
    else __syncthreads();

    // Each role ends here, in its own branch: a CTA must not end while its neighbour may still send it tiles or arrivals.
    auto finish = [] {
        if constexpr (P::pairs) {
            __syncwarp();
            cluster_sync();
        }
    };

    if (role == 0) {
        warpgroup::decrease_registers<P::loader_registers>();
        if (warp_in_role == 0 && leader) {
            const int subnet = work.head * p.subnets + work.subnet;
            kittens::tma::expect_bytes(shared.weights_full, sizeof(shared.ku) + sizeof(shared.v));
#pragma unroll
            for (int c = 0; c < d_h; c += P::panel_cols) {
                const int3 at = {c, work.row, subnet};
                tma::load_async(&shared.ku.data[c * 2 * tile_inter], &maps.k, at, shared.weights_full);
                tma::load_async(&shared.ku.data[c * 2 * tile_inter + tile_inter * P::panel_cols], &maps.u, at, shared.weights_full);
                if constexpr (P::needs_v) tma::load_async(&shared.v[0].data[c * tile_inter], &maps.v, at, shared.weights_full);
            }
            TokenTile tokens(work.begin, p.row_tiles);
            Ring<P::q_stages> q;
            Ring<P::g_stages> g;
            // 64 tokens, for both CTAs of a pair
            auto fetch = [&](typename Shared::Rows &tile, const CUtensorMap &map, kittens::semaphore &full) {
#pragma unroll
                for (int c = 0; c < d_h; c += P::panel_cols) {
                    const int4 at = {c, work.head, tokens.token(), tokens.sequence};
                    if (work.pair) tma::multicast_async(&tile.data[c * tile_rows], &map, at, full, 0b11);
                    else tma::load_async(&tile.data[c * tile_rows], &map, at, full);
                }
            };
#pragma unroll 1
            for (int it = work.begin; it < work.end; ++it) {
                wait(shared.q_empty[q.slot], q.phase ^ 1);
                kittens::tma::expect_bytes(shared.q_full[q.slot], sizeof(typename Shared::Rows));
                if (work.rank == 0) fetch(shared.q[q.slot], maps.q, shared.q_full[q.slot]);
                wait(shared.g_empty[g.slot], g.phase ^ 1);
                kittens::tma::expect_bytes(shared.g_full[g.slot], sizeof(typename Shared::Rows));
                if (work.rank == work.pair) fetch(shared.grad_out[g.slot], maps.grad_out, shared.g_full[g.slot]);
                tokens.advance();
                q.advance();
                g.advance();
            }
        } else if (P::query && warp_in_role == 1 && leader) {
            uint32_t tile = work.head * p.batch * p.row_tiles + work.begin;
            float *sums = p.query_sums + static_cast<int64_t>(tile) * tile_rows * d_h;
            const OrderedAdds order{p.query_added, static_cast<uint32_t>(work.subnet * p.subnet_tiles + work.row / tile_inter)};
            uint32_t phase = 0;
#pragma unroll 1
            for (int it = work.begin; it < work.end; ++it, ++tile) {
                order.wait_for_predecessor(tile);
#pragma unroll
                for (int slice = 0; slice < P::staged_slices; ++slice) {
                    wait(shared.staged_full[slice], phase);
                    if (order.added) tma::fence_global();
                    constexpr int size = P::query ? tile_rows * d_h / P::staged_slices : 0;
                    tma::reduce_add_async(sums + slice * size, shared.staged + slice * size, size * sizeof(float));
                    kittens::tma::store_commit_group();
                }
                // to the S group that stages the next tile
                if constexpr (P::staged_slices == 2) {
                    kittens::tma::store_async_read_wait<1>();
                    arrive(shared.staged_empty[phase ^ 1][0]);
                }
                kittens::tma::store_async_read_wait<0>();
                arrive(shared.staged_empty[phase ^ 1][P::staged_slices - 1]);
                if (order.added) kittens::tma::store_async_wait<0>();
                order.signal_successor(tile);
                sums += tile_rows * d_h;
                phase ^= 1;
            }
            kittens::tma::store_async_wait<0>();  // store_async_read_wait says that staging was read, not that the sum has arrived
        } else if (warp_in_role == 2) {
            // One running address: this role has few registers.
            const int size = p.r_is_float ? 4 : 2;
            TokenTile tokens(work.begin, p.row_tiles);
            const char *at = static_cast<const char *>(p.r) + size * (tokens.sequence * p.r_batch + (tokens.token() + lane) * p.r_token +
                                                                      work.head * p.r_head + work.subnet);
            Ring<P::q_stages> q;
#pragma unroll 1
            for (int it = work.begin; it < work.end; ++it) {
                float r[2] = {1.f, 1.f};
                if (p.r) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const char *row = at + size * 32 * half * p.r_token;
                        // load_real() written out: a call of it makes ptxas schedule the whole kernel differently.
                        if (tokens.token() + lane + 32 * half < p.length)
                            r[half] = p.r_is_float ? __ldg(reinterpret_cast<const float *>(row))
                                                   : base_types::convertor<float, T>::convert(__ldg(reinterpret_cast<const T *>(row)));
                    }
                }
                wait(shared.q_empty[q.slot], q.phase ^ 1);
                shared.r[q.slot][lane] = r[0];
                shared.r[q.slot][lane + 32] = r[1];
                __syncwarp();
                if (leader) arrive(shared.q_full[q.slot]);
                tokens.advance();
                at += size * tile_rows * p.r_token;
                if (tokens.tile == 0) at += size * (p.r_batch - static_cast<int64_t>(p.row_tiles) * tile_rows * p.r_token);
                q.advance();
            }
        } else if (P::query && warp_in_role == 3) {
            uint32_t tile = (work.head * p.subnets + work.subnet) * p.batch * p.row_tiles + work.begin;
            const OrderedAdds order{p.dr_added, static_cast<uint32_t>(work.row / tile_inter)};
            Ring<2> buffer;
#pragma unroll 1
            for (int it = work.begin; it < work.end; ++it, ++tile) {
                wait(shared.grads_full[buffer.slot][0], buffer.phase);
                float dr[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float4 v = shared.dr[P::query ? buffer.slot : 0][lane + 32 * half];
                    dr[half] = (v.x + v.y) + (v.z + v.w);
                }
                __syncwarp();
                if (leader) {
                    arrive(shared.grads_empty[buffer.slot]);
                    order.wait_for_predecessor(tile);
                }
                __syncwarp();
                if (p.dr_sums)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        atomicAdd(p.dr_sums + static_cast<int64_t>(tile) * tile_rows + lane + 32 * half, dr[half]);
                __syncwarp();
                if (leader) order.signal_successor(tile);
                buffer.advance();
            }
        }
        finish();
    } else if (role <= P::s_groups) {
        if constexpr (P::s_registers > P::launch_registers) warpgroup::increase_registers<P::s_registers>();
        if constexpr (P::query) scores_and_query_grads<T>(shared, work, role - 1);
        else scores<T>(shared, work);
        finish();
    } else {
        warpgroup::increase_registers<P::w_registers>();
        const int w_group = P::accumulator_groups == 1 ? 0 : role - (P::warpgroups - P::accumulator_groups);
        accumulate_weight_grads(shared, p, work, P::query + w_group, w_group);
        // Behind the token-stationary kernel this kernel starts early, since it needs no result of it. It must not end before it.
        kittens::pdl::wait();
        finish();
    }
}

}  // namespace flashmhf
