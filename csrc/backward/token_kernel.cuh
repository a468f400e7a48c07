// Token-stationary backward for dQ and dR: a CTA owns two tiles of 64 tokens of one head and streams K, U, V. No atomics, no fp32 sums in
// global memory: the result depends on the shape alone.
//
// Two consumer warpgroups, 64 tokens each. Software pipeline: dQ += [dM|dN] [K;U] of tile i and the products [M|N], dA of tile i + 1 are
// in flight together; the two warpgroups fill each other's elementwise parts.
#pragma once

#include <climits>

#include "backward/params.h"
#include "backward/rows.cuh"
#include "backward/swiglu_grad.cuh"
#include "common/barriers.h"
#include "common/tma.cuh"

namespace flashmhf {

// Shared memory and barriers of a CTA.
//
//   semaphore    arrives                              waits
//   rows_full    the loader's expect_bytes; copies    consumers, once
//   stage_full   the loader's expect_bytes; copies    consumers, before the products of a stage
//   stage_empty  the consumers' warps                 the loader, before it refills the stage
template <int d_h, typename T> struct alignas(1024) TokenShared {
    using P = TokenPolicy<d_h>;
    template <int rows> using tile = kittens::st<T, rows, d_h, true, swizzle_bytes_of(d_h)>;
    using Rows = tile<tile_rows>;
    struct Stage {
        tile<2 * P::inter> ku;
        tile<P::inter> v;
    };
    struct {
        Rows q, grad_out;  // in the end the staging of dQ
    } rows[P::consumers];
    Stage stages[P::stages];
    kittens::semaphore rows_full, stage_full[P::stages], stage_empty[P::stages];
};

// Named barriers; 0 is __syncthreads.
enum TokenBarrier : int {
    // A consumer's staging of dQ is free, or full: its own warps. One for each consumer.
    output_barrier = 1,
    // The other consumer has issued its products: that one arrives, this one arrives and waits. One for each consumer.
    products_issued_by_other = output_barrier + token_consumers,
};

// The tokens of rows g and g + 8 of a thread's fragment. Computed at each use: the volatile read keeps the compiler from holding them in
// registers through the main loop.
struct RowPair {
    int sequence, token, tokens;
    __device__ __forceinline__ RowPair(const BackwardParams &p, int tile) {
        int thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        const TokenTile tokens_of(tile, p.row_tiles);
        sequence = tokens_of.sequence;
        token = tokens_of.token() + thread % 128 / 32 * 16 + thread % 32 / 4;
        tokens = sequence < p.batch ? static_cast<int>(min(p.length, int64_t{INT_MAX})) : 0;
    }
    __device__ __forceinline__ bool valid(int half) const { return token + 8 * half < tokens; }
};

// What a CTA works on: two tiles of a head's tokens, and a range of sub-networks in tiles of P::inter rows.
template <typename P> struct TokenWork {
    int tiles, head, first_subnet, last_subnet, per_subnet, count;  // tiles: of all tokens; count: of inter rows
    __device__ __forceinline__ TokenWork(const BackwardParams &p)
        : tiles(p.batch * p.row_tiles),
          head(blockIdx.y),
          first_subnet(p.subnets * blockIdx.z / p.token_parts),
          last_subnet(p.subnets * (blockIdx.z + 1) / p.token_parts),
          per_subnet(ceil_div(p.subnet_dim, P::inter)),
          count((last_subnet - first_subnet) * per_subnet) {}
    __device__ __forceinline__ static int tile(int consumer) { return blockIdx.x * P::consumers + consumer; }
};

// One thread: Q and dO once, then K, U and V of every tile.
template <typename Shared>
__device__ __forceinline__ void load_stages(Shared &shared, const BackwardMaps &maps, const BackwardParams &p,
                                            const TokenWork<typename Shared::P> &work) {
    using P = typename Shared::P;
    constexpr int d_h = Shared::Rows::cols;
    kittens::tma::expect_bytes(shared.rows_full, sizeof(shared.rows));
    for (int w = 0; w < P::consumers; ++w) {
        const TokenTile tokens(work.tile(w), p.row_tiles);  // behind the last tile: tokens out of bounds, zeros
#pragma unroll
        for (int c = 0; c < d_h; c += P::panel_cols) {
            const int4 at = {c, work.head, tokens.token(), tokens.sequence};
            tma::load_async(&shared.rows[w].q.data[c * tile_rows], &maps.q, at, shared.rows_full);
            tma::load_async(&shared.rows[w].grad_out.data[c * tile_rows], &maps.grad_out, at, shared.rows_full);
        }
    }
    Ring<P::stages> ring;
    const int first_weights = work.head / p.group * p.subnets;
    int subnet = work.first_subnet, row = 0;
#pragma unroll 1
    for (int it = 0; it < work.count; ++it) {
        kittens::wait(shared.stage_empty[ring.slot], ring.phase ^ 1);
        kittens::tma::expect_bytes(shared.stage_full[ring.slot], sizeof(typename Shared::Stage));
        auto &stage = shared.stages[ring.slot];
#pragma unroll
        for (int c = 0; c < d_h; c += P::panel_cols) {
            const int3 at = {c, row, first_weights + subnet};
            tma::load_async(&stage.ku.data[c * 2 * P::inter], &maps.k, at, shared.stage_full[ring.slot]);
            tma::load_async(&stage.ku.data[c * 2 * P::inter + P::inter * P::panel_cols], &maps.u, at, shared.stage_full[ring.slot]);
            tma::load_async(&stage.v.data[c * P::inter], &maps.v, at, shared.stage_full[ring.slot]);
        }
        row += P::inter;
        if (row >= p.subnet_dim) {
            row = 0;
            ++subnet;
        }
        ring.advance();
    }
}

// The gate of a consumer's tokens, and their dR.
template <typename T> struct TokenGate {
    const BackwardParams &p;
    int head, tile;

    __device__ __forceinline__ float2 load(int subnet) const {
        const RowPair rows(p, tile);
        auto one = [&](int half) {
            if (!p.r.data || !rows.valid(half)) return 1.f;
            const int64_t at =
                rows.sequence * p.r.batch_stride + (rows.token + 8 * half) * p.r.token_stride + head * p.r.head_stride + subnet;
            return load_real<T>(p.r.data, at, p.r_is_float);
        };
        return float2{one(0), one(1)};
    }
    __device__ __forceinline__ void store_grad(float2 dr, int subnet) const {
        dr = quad_sum(dr);
        if (!p.dr || kittens::laneid() % 4) return;
        const RowPair rows(p, tile);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (!rows.valid(half)) continue;
            const int64_t at = (p.dense.index(rows.sequence, rows.token + 8 * half) * p.dr_heads + head) * p.subnets + subnet;
            store_real<T>(p.dr, at, p.r_is_float, half ? dr.y : dr.x);
        }
    }
};

// A consumer warpgroup.
template <typename T, typename Shared> struct QueryGrads {
    using P = typename Shared::P;
    using warpgroup = kittens::warpgroup;
    static constexpr int d_h = Shared::Rows::cols, blocks = P::inter / 16;

    Shared &shared;
    const BackwardParams &p;
    const TokenWork<P> &work;
    int w, tile;  // of the consumers; of the tokens
    kittens::rt_fl<16, d_h> dq;
    kittens::rt_fl<16, 2 * P::inter> mn;
    kittens::rt_fl<16, P::inter> da, slope;
    kittens::rt<T, 16, 2 * P::inter> grads;

    // The warpgroups issue their products in alternation: the products of one are in the tensor cores during the elementwise part of the
    // other.
    __device__ __forceinline__ void wait_to_issue() const {
        kittens::arrive_and_wait(kittens::barrier<warpgroup_warps * P::consumers>(products_issued_by_other + w));
    }
    __device__ __forceinline__ void let_other_issue() const {
        kittens::arrive(kittens::barrier<warpgroup_warps * P::consumers>(products_issued_by_other + (w ^ 1)));
    }
    // Issues [M|N] = Q [K;U]^T, dA = dO V^T.
    __device__ __forceinline__ void scores(typename Shared::Stage &stage) {
        warpgroup::mm_ABt(mn, shared.rows[w].q, stage.ku);
        warpgroup::mm_ABt(da, shared.rows[w].grad_out, stage.v);
    }
    // a = act(M), c = act'(M)
    __device__ __forceinline__ void slopes() {
        pin(mn);
#pragma unroll
        for (int j = 0; j < blocks; ++j) activate<typename P::Activation>(mn.tiles[0][j], slope.tiles[0][j]);
    }
    // dN = r dA a;  dM = r dA N c;  dR += sum dA a N
    __device__ __forceinline__ void step(float2 r, float2 &dr) {
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
            GradBlock<T> block;
            swiglu_grad(block, mn.tiles[0][j], slope.tiles[0][j], mn.tiles[0][j + blocks], da.tiles[0][j], r, dr);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                grads.tiles[0][j].data[k] = block.dm[k];
                grads.tiles[0][j + blocks].data[k] = block.dn[k];
            }
        }
    }
    __device__ __forceinline__ void run() {
        const TokenGate<T> gate{p, work.head, tile};
        dq = 0.f;
        int subnet = work.first_subnet, left = work.per_subnet;
        float2 r = gate.load(subnet), next_r = r, dr = {0.f, 0.f};
        if (subnet + 1 < work.last_subnet) next_r = gate.load(subnet + 1);
        Ring<P::stages> ring;
        kittens::wait(shared.rows_full, 0);
        kittens::wait(shared.stage_full[0], 0);
        if (w == 1) let_other_issue();
        wait_to_issue();
        scores(shared.stages[0]);
        let_other_issue();
        warpgroup::mma_async_wait<1>();
#pragma unroll 1
        for (int it = 0;;) {
            slopes();  // of tile i, while dA still runs
            const int slot = ring.slot;
            ring.advance();
            const bool last = ++it == work.count;
            // without pins and a branch (this wait's) the compiler sinks the special functions behind dA
            pin(mn);
            pin(slope);
            if (!last) kittens::wait(shared.stage_full[ring.slot], ring.phase);
            warpgroup::mma_async_wait<0>();
            pin(da);
            step(r, dr);
            if (--left == 0) {
                gate.store_grad(dr, subnet);
                dr = {0.f, 0.f};
                left = work.per_subnet;
                ++subnet;
                r = next_r;
                if (subnet + 1 < work.last_subnet) next_r = gate.load(subnet + 1);
            }
            // dQ += [dM|dN] [K;U] of tile i, and the scores of tile i + 1
            wait_to_issue();
            warpgroup::mma_AB(dq, grads, shared.stages[slot].ku);
            if (last) {
                let_other_issue();
                break;
            }
            scores(shared.stages[ring.slot]);
            let_other_issue();
            // wait for dQ, hand back the stage; wait for [M|N]
            warpgroup::mma_async_wait<2>();
            if (kittens::laneid() == 0) kittens::arrive(shared.stage_empty[slot]);
            warpgroup::mma_async_wait<1>();
        }
        if (w == 0) wait_to_issue();  // the other's last arrival
        warpgroup::mma_async_wait<0>();
        pin(dq);
        finish();
    }
    // dQ to its part, or to rows.
    __device__ __forceinline__ void finish() {
        if (p.query_parts) {
            if (tile >= work.tiles) return;
            float *part =
                p.query_parts + ((static_cast<int64_t>(work.head) * work.tiles + tile) * p.token_parts + blockIdx.z) * tile_rows * d_h;
            each_fragment(dq, [&](int j, float4 v) { __stcg(reinterpret_cast<float4 *>(part) + 128 * j + warpgroup::laneid(), v); });
        } else {
            const TokenTile tokens(tile, p.row_tiles);
            const int64_t row = p.dense.index(tokens.sequence, tokens.token()) * p.dq_heads + work.head;
            const int64_t rows = tile < work.tiles ? p.length - tokens.token() : 0;
            store_rows<T>(dq, &shared.rows[w], static_cast<T *>(p.dq) + row * d_h, p.dense.token * p.dq_heads * d_h,
                          static_cast<int>(min(rows, static_cast<int64_t>(tile_rows))), output_barrier + w);
        }
    }
};

template <int d_h, typename T>
__global__ void __launch_bounds__(TokenPolicy<d_h>::threads, 1)
    flashmhf_backward_token(const __grid_constant__ BackwardMaps maps, const __grid_constant__ BackwardParams p) {
    using namespace kittens;
    using P = TokenPolicy<d_h>;
    using Shared = TokenShared<d_h, T>;
    static_assert(sizeof(Shared) == P::shared_memory);
    extern __shared__ __align__(1024) uint8_t shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);

    const int role = __shfl_sync(MASK_ALL, warpgroupid(), 0), warp_in_role = __shfl_sync(MASK_ALL, warpid() & 3, 0);
    const TokenWork<P> work(p);

    kittens::pdl::arrive();
    if (threadIdx.x == 32)
        for (const CUtensorMap *map : {&maps.q, &maps.grad_out, &maps.k, &maps.u, &maps.v}) tma::prefetch(map);
    if (threadIdx.x == 0) {
        init_semaphore(shared.rows_full, loader_arrival);
        for (int s = 0; s < P::stages; ++s) {
            init_semaphore(shared.stage_full[s], loader_arrival);
            init_semaphore(shared.stage_empty[s], warpgroup_arrivals * P::consumers);
        }
        tma::fence_semaphore_init();
        tma::fence_shared_writes();
    }
    __syncthreads();

    if (role == 0) {
        warpgroup::decrease_registers<P::loader_registers>();
        if (warp_in_role == 0 && kittens::laneid() == 0) load_stages(shared, maps, p, work);
    } else {
        warpgroup::increase_registers<P::consumer_registers>();
        QueryGrads<T, Shared>{shared, p, work, role - 1, work.tile(role - 1)}.run();
    }
}

}  // namespace flashmhf
