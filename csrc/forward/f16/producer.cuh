// The producer: one thread streams tiles of K, U and V through the ring. One warp for each consumer warpgroup loads Q and the gate of the
// first sub-networks of an item, and stores the outputs.
#pragma once

#include "forward/f16/gate.cuh"
#include "forward/producer.cuh"

namespace flashmhf {

// Rows `row..` of one matrix to rows `at..` of the panels of a tile, of this CTA alone or, multicast, of those in the mask `ctas`: as many
// boxes of the tensor map, of box_rows rows each.
template <bool multicast, tma::Evict evict, int boxes, int box_rows, typename Tile>
__device__ __forceinline__ void load_rows(Tile &dst, int at, const CUtensorMap *map, int col, int row, int subnet, kittens::semaphore &full,
                                          uint16_t ctas) {
    constexpr int panel_cols = Tile::swizzle_bytes / element_bytes;
#pragma unroll
    for (int i = 0; i < boxes; ++i)
#pragma unroll
        for (int c = 0; c < Tile::cols; c += panel_cols) {
            auto *panel = &dst.data[c * Tile::rows + (at + i * box_rows) * panel_cols];
            const int3 from{col + c, row + i * box_rows, subnet};
            if constexpr (multicast) tma::multicast_async(panel, map, from, full, ctas, evict);
            else tma::load_async(panel, map, from, full, evict);
        }
}

// Prefetches to the L2 the tiles that fill the ring first. A hint: right even while the kernel before this one writes them. By one thread.
template <int d_h, Division division> __device__ __forceinline__ void prefetch_weights(const ForwardMaps &maps, const ForwardParams &p) {
    using P = ForwardPolicy<d_h>;
    const int own_row = p.row_ctas > 1 ? tile_inter / p.row_ctas * kittens::cluster_ctarank() : 0;
    Work work;
    if (!first_work<Cursor<division>>(p, work)) return;
    TileWalk at(p, work);
#pragma unroll 1
    for (int left = min(work.end - work.begin, P::slots); left > 0; --left, at.advance(p))
        for (const CUtensorMap *map : {maps.k, maps.u, maps.v})
#pragma unroll
            for (int c = 0; c < d_h; c += P::panel_cols)
                tma::prefetch_tile(map, int3{c, at.tile * tile_inter + own_row, at.subnet}, evict_of<division>);
}

// By one thread. CTAs of a pair each fetch a part of the rows of a tile and multicast it. Every instruction of the loop over the tiles
// delays the refill of a slot: ptxas keeps coordinates in uniform registers only if this thread runs alone from the beginning of its code.
template <int d_h, typename T, bool multicast, Division division>
__device__ __forceinline__ void load_weights(ForwardShared<d_h, T> &shared, const ForwardMaps &maps, const ForwardParams &p) {
    using P = ForwardPolicy<d_h>;
    auto &sem = shared.semaphores;
    Ring<P::slots> ring;
    const int own_row =
        multicast && p.row_ctas > 1 ? tile_inter / p.row_ctas * kittens::cluster_ctarank() : 0;      // first row of a tile to fetch
    const uint16_t ctas = p.row_ctas > 1 ? (1 << p.row_ctas) - 1 : 1 << kittens::cluster_ctarank();  // that get it

    auto fill = [&](int bytes) {
        wait_sleeping(sem.slot_empty[ring.slot], ring.phase);
        kittens::tma::expect_bytes(sem.slot_full[ring.slot], bytes);
    };
    int row_v = 0, subnet_v = -1;                                                         // the tile whose V is still to be sent
    constexpr int box_rows = division == Division::slices ? slice_box_rows : tile_inter;  // a pair takes one box, of fewer rows
    auto load_v = [&]() {
        load_rows<multicast, evict_of<division>, tile_inter / box_rows, box_rows>(shared.v(ring.slot), own_row, maps.v, 0, row_v, subnet_v,
                                                                                  sem.slot_full[ring.slot], ctas);
    };
    auto send_v = [&]() {  // in a slot of its own
        fill(P::v_bytes);
        load_v();
        ring.advance();
    };
    auto load_ku = [&](int col, int row, int subnet) {
        auto &ku = shared.ku(ring.slot);
        load_rows<multicast, evict_of<division>, tile_inter / box_rows, box_rows>(ku, own_row, maps.k, col, row, subnet,
                                                                                  sem.slot_full[ring.slot], ctas);
        load_rows<multicast, evict_of<division>, tile_inter / box_rows, box_rows>(ku, tile_inter + own_row, maps.u, col, row, subnet,
                                                                                  sem.slot_full[ring.slot], ctas);
    };

    Cursor<division> cursor(p.schedule, kittens::clusterIdx().x);
    Work work;
    while (next_work(cursor, work)) {
        TileWalk at(p, work);
#pragma unroll 1  // the producer has few registers
        for (int left = work.end - work.begin; left > 0; --left) {
            const int row = at.tile * tile_inter + own_row;
            if constexpr (P::q_in_registers) {
                fill(P::ku_bytes + (subnet_v >= 0 ? P::v_bytes : 0));
                load_ku(0, row, at.subnet);
                if (subnet_v >= 0) load_v();
                ring.advance();
            } else {
#pragma unroll 1
                for (int col = 0; col < d_h; col += d_h / 2) {
                    fill(P::slot_bytes);
                    load_ku(col, row, at.subnet);
                    ring.advance();
                }
                if (subnet_v >= 0) send_v();
            }
            stamp(Stamp::forward_tile_sent, work.end - work.begin - left);
            row_v = row;
            subnet_v = at.subnet;
            at.advance(p);
        }
        if constexpr (!P::q_in_registers) {
            send_v();
            subnet_v = -1;
        }
    }
    if (P::q_in_registers && subnet_v >= 0) send_v();
    stamp(Stamp::forward_weights_sent);
    // Not earlier: with few tokens these tiles would evict from the L2 what the next kernel prefetches.
    if (division != Division::slices || !p.slices.late_successor) kittens::pdl::arrive();
}

// For one consumer warpgroup, by one warp: loads Q and gate of its items, stores their outputs.
template <typename Format, Division division> struct RowsOfItems : RowLoader<Format, division> {
    static constexpr int d_h = Format::d_h, lag = ForwardPolicy<d_h>::q_in_registers ? 2 : 1;  // Q is read an item ahead, or not
    static constexpr int unhurried_tiles = 48 * 128 / d_h;  // 25 us: an item of so many tiles covers the slow load of the next item's gate
    using P = ForwardPolicy<d_h>;
    int ahead = 0;  // tiles of the item before

    __device__ __forceinline__ void before_predecessor(int) {}
    __device__ __forceinline__ void fetch_q(int warpgroup) {
        auto &shared = this->shared;
        auto &p = this->p;
        const int count = this->count;
        const Item &item = shared.items[count % 2][warpgroup];
        auto &gate = shared.gate[count % P::gate_buffers][warpgroup];
        auto &full = shared.semaphores.q_full[warpgroup];
        const int first = item.subnet;
        if (this->leader) {
            kittens::tma::expect_bytes(full, P::row_tile_bytes + (p.gate.tiles ? P::gate_chunk_bytes : 0));
            this->load_q(warpgroup, item, full);
            if (P::gate_early && p.gate.tiles)  // from a multiple of 16 bytes on: TMA takes no other column
                tma::load_async(gate.values, this->maps.r,
                                int3{item.head * p.subnets + first - item.gate_column, item.token, item.sequence}, full);
        }
        if (P::gate_early && p.gate.kind < Gate::w_float) {
            if (!p.gate.tiles) {
                load_gate<d_h, typename Format::T>(p, item, 0, tile_rows, first, ahead < unhurried_tiles, gate);
                wait_gate();
            } else if (count < P::gate_buffers) {
                unit_scale<d_h>(gate, 0, tile_rows);
                __syncwarp();
            }
        }
        if (this->leader) kittens::arrive(full);
        ahead = item.end - item.begin;
    }
    __device__ __forceinline__ void behind_q(int) {}
    __device__ __forceinline__ void behind_items(int) {}
};

}  // namespace flashmhf
