// The producer: one thread streams tiles of K, U and V through the ring, another brings Q.
#pragma once

#include "kernels/smem_plan.cuh"
#include "kernels/tma_ext.cuh"
#include "params.h"

namespace flashmhf {

struct WeightMaps {
    const CUtensorMap *k, *u, *v;  // [H * E][d_e][d_h]; rows from d_e on read as zeros
};

// Rows `row..` of one matrix to rows `at..` of the panels of a tile. In a cluster every CTA fetches its share of the rows and multicasts it.
template <typename Tile> __device__ __forceinline__ void load_rows(Tile &dst, int at, const CUtensorMap *map, int col, int row, int subnet,
                                                                    kittens::semaphore &full, int cluster_size) {
    constexpr int panel_cols = Tile::swizzle_bytes / element_bytes;
#pragma unroll
    for (int c = 0; c < Tile::cols; c += panel_cols) {
        auto *panel = &dst.data[c * Tile::rows + at * panel_cols];
        if (cluster_size > 1) tma::multicast_async(panel, map, int3{col + c, row, subnet}, full, (1 << cluster_size) - 1);
        else tma::load_async(panel, map, int3{col + c, row, subnet}, full);
    }
}

template <int d_h, typename T> __device__ __forceinline__ void load_weights(ForwardShared<d_h, T> &shared, const WeightMaps &maps, const ForwardParams &p,
                                                                             int cluster, int rank) {
    using P = ForwardPolicy<d_h>;
    auto &sem = shared.semaphores;
    Ring<P::slots> ring;
    WorkCursor cursor(p.schedule, cluster);
    Work work;
    const int share = tile_inter / p.cluster_size * rank;  // first row of a tile that this CTA fetches

    auto fill = [&](int bytes) {
        kittens::wait(sem.slot_empty[ring.slot], ring.phase ^ 1);
        kittens::tma::expect_bytes(sem.slot_full[ring.slot], bytes);
    };
    int row_v = 0, subnet_v = -1;  // the tile whose V is still to be sent
    auto load_v = [&]() { load_rows(shared.v(ring.slot), share, maps.v, 0, row_v, subnet_v, sem.slot_full[ring.slot], p.cluster_size); };
    auto send_v = [&]() {  // in a slot of its own
        fill(P::v_bytes);
        load_v();
        ring.advance();
    };
    auto load_ku = [&](int col, int row, int subnet) {
        auto &ku = shared.ku(ring.slot);
        load_rows(ku, share, maps.k, col, row, subnet, sem.slot_full[ring.slot], p.cluster_size);
        load_rows(ku, tile_inter + share, maps.u, col, row, subnet, sem.slot_full[ring.slot], p.cluster_size);
    };

    while (cursor.next(work)) {
        int subnet = work.begin / p.subnet_tiles, tile = work.begin - subnet * p.subnet_tiles;
        subnet += work.item / p.blocks * p.subnets;
        for (int left = work.end - work.begin; left > 0; --left) {
            const int row = tile * tile_inter + share;
            if constexpr (P::q_in_registers) {
                fill(P::ku_bytes + (subnet_v >= 0 ? P::v_bytes : 0));
                load_ku(0, row, subnet);
                if (subnet_v >= 0) load_v();
                ring.advance();
            } else {
#pragma unroll
                for (int col = 0; col < d_h; col += d_h / 2) {
                    fill(P::slot_bytes);
                    load_ku(col, row, subnet);
                    ring.advance();
                }
                if (subnet_v >= 0) send_v();
            }
            row_v = row;
            subnet_v = subnet;
            if (++tile == p.subnet_tiles) {
                tile = 0;
                ++subnet;
            }
        }
        if constexpr (!P::q_in_registers) {
            send_v();
            subnet_v = -1;
        }
    }
    if (P::q_in_registers && subnet_v >= 0) send_v();
}

// First token and sequence of a warpgroup's row tile of an item. The last tiles of a launch may lie behind the last sequence: their rows
// read as zeros and are not stored.
struct RowTile {
    int head, sequence, token;
    __device__ __forceinline__ RowTile(const ForwardParams &p, int item, int rank, int warpgroup) {
        head = item / p.blocks;
        const int tile = ((item - head * p.blocks) * p.cluster_size + rank) * consumers + warpgroup;
        sequence = tile / p.row_tiles;
        token = (tile - sequence * p.row_tiles) * tile_rows;
    }
    // rows of the tile that hold tokens; may be negative or more than a tile
    __device__ __forceinline__ int64_t rows(const ForwardParams &p) const { return sequence < p.batch ? p.length - token : 0; }
};

template <int d_h, typename T> __device__ __forceinline__ void load_queries(ForwardShared<d_h, T> &shared, const CUtensorMap *map, const ForwardParams &p,
                                                                             int cluster, int rank) {
    using P = ForwardPolicy<d_h>;
    auto &sem = shared.semaphores;
    WorkCursor cursor(p.schedule, cluster);
    Work work;
    for (uint32_t phase = 1; cursor.next(work); phase ^= 1) {
        for (int w = 0; w < consumers; ++w) {
            const RowTile rows(p, work.item, rank, w);
            kittens::wait(sem.q_empty[w], phase);
            kittens::tma::expect_bytes(sem.q_full[w], P::row_tile_bytes);
#pragma unroll
            for (int c = 0; c < d_h; c += P::panel_cols)
                tma::load_async(&shared.q[w].data[c * tile_rows], map, int4{c, rows.head, rows.token, rows.sequence}, sem.q_full[w]);
        }
    }
}

}  // namespace flashmhf
