// Inter-stationary backward. A CTA owns 64 inter rows of one sub-network (K, U, V stay in shared memory) and walks over tokens in tiles
// of 64. Its warpgroups have roles, drawn in README.md:
//
//   loader  warp 0 streams Q and dO tiles (TMA, a ring each). Warp 1 adds staged dQ tiles into global memory (bulk reduce-add).
//           Warp 2 brings the gate R of a tile to shared memory. Warp 3 adds dR into global memory.
//   S       [M|N] = Q [K;U]^T and dA = dO V^T, the elementwise part, P and [dM|dN] as 16-bit tiles to shared memory. The fused kernel has
//           two S warpgroups, which take alternate tiles, and then compute dQ = [dM|dN] [K;U] with [dM|dN] from registers, fp32 to staging.
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

#include "backward/inter_scores.cuh"
#include "backward/inter_shared_memory.cuh"
#include "backward/inter_weight_grads.cuh"
#include "backward/inter_work.cuh"
#include "backward/maps.h"
#include "common/ring.h"
#include "common/tma.cuh"
#include "common/token_tile.cuh"

namespace flashmhf {

template <int d_h, int outputs, typename T>
__global__ void __launch_bounds__(InterPolicy<d_h, outputs>::threads, 1)
    flashmhf_backward_inter(const __grid_constant__ BackwardMaps maps, const __grid_constant__ BackwardParams p) {
    using namespace kittens;
    using P = InterPolicy<d_h, outputs>;
    using Shared = InterShared<d_h, outputs, T>;
    using Arrivals = InterArrivals<P>;
    static_assert(sizeof(Shared) == P::shared_memory);
    extern __shared__ __align__(1024) uint8_t shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);

    // The shuffle tells the compiler that both are uniform over the warp.
    const int role = __shfl_sync(MASK_ALL, warpgroupid(), 0), warp_in_role = __shfl_sync(MASK_ALL, warpid() & 3, 0);
    const int lane = kittens::laneid();
    const bool leader = lane == 0;
    const InterWork work(p, P::pairs);

    kittens::pdl::arrive();
    if (threadIdx.x == 32)
        for (const CUtensorMap *map : {&maps.k, &maps.u, &maps.q, &maps.v, &maps.grad_out}) tma::prefetch(map);
    if (threadIdx.x == 0) {
        const int ctas = 1 + work.pair;
        init_semaphore(shared.weights_full, Arrivals::weights_full);
        for (int s = 0; s < P::q_stages; ++s) {
            init_semaphore(shared.q_full[s], Arrivals::q_full);
            init_semaphore(shared.q_empty[s], Arrivals::q_empty(ctas));
        }
        for (int s = 0; s < P::g_stages; ++s) {
            init_semaphore(shared.g_full[s], Arrivals::g_full);
            init_semaphore(shared.g_empty[s], Arrivals::g_empty(ctas));
        }
        for (int b = 0; b < P::grad_buffers; ++b) {
            for (int reader = 0; reader < P::grad_readers; ++reader) init_semaphore(shared.grads_full[b][reader], Arrivals::grads_full);
            init_semaphore(shared.grads_empty[b], Arrivals::grads_empty);
        }
        for (int slice = 0; slice < P::staged_slices; ++slice) {
            init_semaphore(shared.staged_full[slice], Arrivals::staged_full);
            for (auto &empty : shared.staged_empty) init_semaphore(empty[slice], Arrivals::staged_empty);
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
            Ring<P::grad_buffers> buffer;
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
