// Loader warps of the inter-stationary kernels: 0 weights, Q and dO; 1 sums of dQ; 2 the gate; 3 sums of dR. This role has few registers.
#pragma once

#include "backward/inter_cta.cuh"
#include "common/trace.cuh"

namespace flashmhf {

// One thread: K, U and V once, then Q and dO of every tile.
template <typename Shared>
__device__ __forceinline__ void load_tiles(Shared &shared, const BackwardMaps &maps, const BackwardParams &p, const InterWork &work) {
    using P = typename Shared::P;
    constexpr int d_h = Shared::Rows::cols;
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
        kittens::wait(shared.q_empty[q.slot], q.phase ^ 1);
        kittens::tma::expect_bytes(shared.q_full[q.slot], sizeof(typename Shared::Rows));
        if (work.rank == 0) fetch(shared.q[q.slot], maps.q, shared.q_full[q.slot]);
        kittens::wait(shared.g_empty[g.slot], g.phase ^ 1);
        kittens::tma::expect_bytes(shared.g_full[g.slot], sizeof(typename Shared::Rows));
        if (work.rank == work.pair) fetch(shared.grad_out[g.slot], maps.grad_out, shared.g_full[g.slot]);
        tokens.advance();
        q.advance();
        g.advance();
    }
}

// One thread, fused kernel: adds the staged dQ of every tile into global memory.
template <typename Shared> __device__ __forceinline__ void add_query_grads(Shared &shared, const BackwardParams &p, const InterWork &work) {
    using P = typename Shared::P;
    constexpr int d_h = Shared::Rows::cols, slices = P::staged_slices;
    uint32_t tile = work.head * p.batch * p.row_tiles + work.begin;
    float *sums = p.query_sums + static_cast<int64_t>(tile) * tile_rows * d_h;
    const OrderedAdds order{p.query_added, static_cast<uint32_t>(work.subnet * p.subnet_tiles + work.row / tile_inter)};
    uint32_t phase = 0;
#pragma unroll 1
    for (int it = work.begin; it < work.end; ++it, ++tile) {
        order.wait_for_predecessor(tile);
        stamp(Stamp::dq_predecessor_added, it - work.begin);
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) {
            kittens::wait(shared.staged_full[slice], phase);
            if (order.added) tma::fence_global();
            constexpr int size = P::query ? tile_rows * d_h / slices : 0;
            tma::reduce_add_async(sums + slice * size, shared.staged + slice * size, size * sizeof(float));
            kittens::tma::store_commit_group();
        }
        // to the S warpgroup that stages the next tile
        if constexpr (slices == 2) {
            kittens::tma::store_async_read_wait<1>();
            kittens::arrive(shared.staged_empty[phase ^ 1][0]);
        }
        kittens::tma::store_async_read_wait<0>();
        kittens::arrive(shared.staged_empty[phase ^ 1][slices - 1]);
        if (order.added) kittens::tma::store_async_wait<0>();
        order.signal_successor(tile);
        stamp(Stamp::dq_added, it - work.begin);
        sums += tile_rows * d_h;
        phase ^= 1;
    }
    kittens::tma::store_async_wait<0>();  // store_async_read_wait says that staging was read, not that the sum has arrived
}

// A warp: the gate R of every tile to shared memory.
template <typename T, typename Shared>
__device__ __forceinline__ void load_gates(Shared &shared, const BackwardParams &p, const InterWork &work) {
    using namespace kittens;
    using P = typename Shared::P;
    const int lane = kittens::laneid();
    // One running address: this role has few registers.
    const int size = p.r_is_float ? 4 : 2;
    TokenTile tokens(work.begin, p.row_tiles);
    const char *at =
        static_cast<const char *>(p.r.data) + size * (tokens.sequence * p.r.batch_stride + (tokens.token() + lane) * p.r.token_stride +
                                                      work.head * p.r.head_stride + work.subnet);
    Ring<P::q_stages> q;
#pragma unroll 1
    for (int it = work.begin; it < work.end; ++it) {
        float r[2] = {1.f, 1.f};
        if (p.r.data) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const char *row = at + size * 32 * half * p.r.token_stride;
                // load_real() written out: a call of it makes ptxas schedule the whole kernel differently.
                if (tokens.token() + lane + 32 * half < p.length)
                    r[half] = p.r_is_float ? load_behind_wait(reinterpret_cast<const float *>(row))
                                           : base_types::convertor<float, T>::convert(load_behind_wait(reinterpret_cast<const T *>(row)));
            }
        }
        wait(shared.q_empty[q.slot], q.phase ^ 1);
        shared.r[q.slot][lane] = r[0];
        shared.r[q.slot][lane + 32] = r[1];
        __syncwarp();
        if (lane == 0) arrive(shared.q_full[q.slot]);
        tokens.advance();
        at += size * tile_rows * p.r.token_stride;
        if (tokens.tile == 0) at += size * (p.r.batch_stride - static_cast<int64_t>(p.row_tiles) * tile_rows * p.r.token_stride);
        q.advance();
    }
}

// A warp, fused kernel: adds dR of every tile into global memory.
template <typename Shared> __device__ __forceinline__ void add_gate_grads(Shared &shared, const BackwardParams &p, const InterWork &work) {
    using P = typename Shared::P;
    const int lane = kittens::laneid();
    uint32_t tile = (work.head * p.subnets + work.subnet) * p.batch * p.row_tiles + work.begin;
    const OrderedAdds order{p.dr_added, static_cast<uint32_t>(work.row / tile_inter)};
    Ring<P::grad_buffers> buffer;
#pragma unroll 1
    for (int it = work.begin; it < work.end; ++it, ++tile) {
        kittens::wait(shared.grads_full[buffer.slot][0], buffer.phase);
        float dr[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float4 v = shared.dr[P::query ? buffer.slot : 0][lane + 32 * half];
            dr[half] = (v.x + v.y) + (v.z + v.w);
        }
        __syncwarp();
        if (lane == 0) {
            kittens::arrive(shared.grads_empty[buffer.slot]);
            order.wait_for_predecessor(tile);
        }
        __syncwarp();
        if (p.dr_sums)
#pragma unroll
            for (int half = 0; half < 2; ++half) atomicAdd(p.dr_sums + static_cast<int64_t>(tile) * tile_rows + lane + 32 * half, dr[half]);
        __syncwarp();
        if (lane == 0) order.signal_successor(tile);
        buffer.advance();
    }
}

}  // namespace flashmhf
