// The producer: one thread streams tiles of K, U and V through the ring. One warp for each consumer warpgroup loads Q and the gate of the
// first sub-networks of an item, and stores the outputs.
#pragma once

#include "common/fragments.cuh"
#include "common/ptx.cuh"
#include "common/tma.cuh"
#include "forward/f16/shared_memory.cuh"
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
template <int d_h, Division division> __device__ __forceinline__ void prefetch_weights(const WeightMaps &maps, const ForwardParams &p) {
    using P = ForwardPolicy<d_h>;
    const int own_row = p.row_ctas > 1 ? tile_inter / p.row_ctas * kittens::cluster_ctarank() : 0;
    Work work;
    if (!Cursor<division>(p.schedule, kittens::clusterIdx().x)
             .next(work, kittens::clusterIdx().x, kittens::clusterIdx().y, kittens::cluster_ctarank()))
        return;
#pragma unroll 1
    for (int i = work.begin; i < min(work.end, work.begin + P::slots); ++i) {
        const int subnet = i / p.subnet_tiles, row = (i - subnet * p.subnet_tiles) * tile_inter + own_row;
        for (const CUtensorMap *map : {maps.k, maps.u, maps.v})
#pragma unroll
            for (int c = 0; c < d_h; c += P::panel_cols)
                tma::prefetch_tile(map, int3{c, row, subnet + work.item / p.blocks * p.subnets}, evict_of<division>);
    }
}

// By one thread. CTAs of a pair each fetch a part of the rows of a tile and multicast it. Every instruction of the loop over the tiles
// delays the refill of a slot: ptxas keeps coordinates in uniform registers only if this thread runs alone from the beginning of its code.
template <int d_h, typename T, bool multicast, Division division>
__device__ __forceinline__ void load_weights(ForwardShared<d_h, T> &shared, const WeightMaps &maps, const ForwardParams &p) {
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
    while (cursor.next(work, kittens::clusterIdx().x, kittens::clusterIdx().y, kittens::cluster_ctarank())) {
        int subnet = work.begin / p.subnet_tiles, tile = work.begin - subnet * p.subnet_tiles;
        subnet += work.item / p.blocks * p.subnets;
#pragma unroll 1  // the producer has few registers
        for (int left = work.end - work.begin; left > 0; --left) {
            const int row = tile * tile_inter + own_row;
            if constexpr (P::q_in_registers) {
                fill(P::ku_bytes + (subnet_v >= 0 ? P::v_bytes : 0));
                load_ku(0, row, subnet);
                if (subnet_v >= 0) load_v();
                ring.advance();
            } else {
#pragma unroll 1
                for (int col = 0; col < d_h; col += d_h / 2) {
                    fill(P::slot_bytes);
                    load_ku(col, row, subnet);
                    ring.advance();
                }
                if (subnet_v >= 0) send_v();
            }
            stamp(Stamp::forward_tile_sent, work.end - work.begin - left);
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
    stamp(Stamp::forward_weights_sent);
    // Not earlier: with few tokens these tiles would evict from the L2 what the next kernel prefetches.
    if (division != Division::slices || !p.slices.late_successor) kittens::pdl::arrive();
}

// A given gate is not scaled.
template <int d_h> __device__ __forceinline__ void unit_scale(GateTile<d_h> &tile, int from, int to) {
    for (int row = from + kittens::laneid(); row < to; row += 32) tile.scale[row] = 1.f;
}

// R of a warpgroup's rows from..to, sub-networks first.. of a chunk, where TMA cannot read it. By one warp, lanes along the sub-networks. A
// burst of loads clogs the path that all warps use (6 % of a run at T = 32,256), so loads go a few at a time, through registers. `urgent`
// (fp32 only): all at once, by copies that need no register and are complete after wait_gate().
template <int d_h, typename T>
__device__ __forceinline__ void load_gate(const ForwardParams &p, const Item &item, int from, int to, int first, bool urgent,
                                          GateTile<d_h> &dst) {
    constexpr int chunk = ForwardPolicy<d_h>::gate_chunk, step = 32 / chunk, batch = step == 1 ? 4 : 16 / step;
    const int lane = kittens::laneid(), e = lane % chunk;
    const int64_t left = item.sequence < p.batch && first + e < p.subnets ? p.length - item.token : 0;
    const int tokens = left < tile_rows ? static_cast<int>(left) : tile_rows;  // rows that have a weight
    const int64_t at =
        item.sequence * p.gate.batch + (item.token + from + lane / chunk) * p.gate.token + item.head * p.gate.head + first + e;
    auto load = [&](auto *r) {
#pragma unroll 1
        for (int row = from + lane / chunk; row < to; row += batch * step) {
            float values[batch];
#pragma unroll
            for (int j = 0; j < batch; ++j, r += step * p.gate.token)
                values[j] = row + j * step < tokens ? static_cast<float>(__ldg(r)) : 0.f;
#pragma unroll
            for (int j = 0; j < batch; ++j) dst.at(row + j * step, e) = values[j];
        }
    };
    if (p.gate.kind == Gate::r_float && urgent) {
        const float *r = static_cast<const float *>(p.gate.data) + at;
#pragma unroll 1
        for (int row = from + lane / chunk; row < to; row += step, r += step * p.gate.token)
            copy_word_async(&dst.at(row, e), r, row < tokens);
    } else if (p.gate.kind == Gate::r_float) {
        load(static_cast<const float *>(p.gate.data) + at);
    } else if (p.gate.kind == Gate::r_half) {
        load(static_cast<const T *>(p.gate.data) + at);
    } else {
        for (int row = from + lane / chunk; row < to; row += step) dst.at(row, e) = 1.f;
    }
    unit_scale<d_h>(dst, from, to);
}
__device__ __forceinline__ void wait_gate() {
    wait_copied_words();
    __syncwarp();
}

// For one consumer warpgroup, by one warp: loads Q and gate of its items, stores their outputs.
template <typename Format, Division division>
__device__ __forceinline__ void load_rows_of_items(typename Format::Shared &shared, const CUtensorMap *map, const CUtensorMap *map_r,
                                                   const CUtensorMap *map_out, const ForwardParams &p, int warpgroup) {
    constexpr int d_h = Format::d_h;
    using P = ForwardPolicy<d_h>;
    auto &full = shared.semaphores.q_full[warpgroup];
    constexpr int unhurried_tiles = 48 * 128 / d_h;  // 25 us: an item of so many tiles covers the slow load of the next item's gate
    RowLoader<Format, division> loader(shared, p, map_out, warpgroup == 0);
    const bool leader = loader.leader;
    int &count = loader.count, ahead = 0;
    auto each = [&](auto body) { body(warpgroup); };
    constexpr int lag = P::q_in_registers ? 2 : 1;  // Q is read an item ahead, or not
    bool more = loader.next_item(each);
    wait_for_cluster_and_predecessor(p);
    if (loader.stages && more) loader.load_router();
    while (more) {
        const Item &item = shared.items[count % 2][warpgroup];
        auto &gate = shared.gate[count % P::gate_buffers][warpgroup];
        __syncwarp();
        const int first = item.subnet;
        if (leader) {
            kittens::tma::expect_bytes(full, P::row_tile_bytes + (p.gate.tiles ? P::gate_chunk_bytes : 0));
#pragma unroll
            for (int c = 0; c < d_h; c += P::panel_cols)
                tma::load_async(&shared.q[warpgroup].data[c * tile_rows], map, int4{c, item.head, item.token, item.sequence}, full);
            if (P::gate_early && p.gate.tiles)  // from a multiple of 16 bytes on: TMA takes no other column
                tma::load_async(gate.values, map_r, int3{item.head * p.subnets + first - item.gate_column, item.token, item.sequence},
                                full);
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
        if (leader) kittens::arrive(full);
        if (loader.stages && count > 0 && !loader.is_added()) {
            wait_sleeping(shared.w_empty, count - 1 & 1);
            loader.load_router();
        }
        ahead = item.end - item.begin;
        ++count;
        loader.take_over(warpgroup, count - lag);
        more = loader.next_item(each);
    }
    loader.end_items(warpgroup);
    if (lag == 2 && count > 0) loader.take_over(warpgroup, count - 1);
    if (leader) kittens::tma::store_async_read_wait<0>();  // the memory outlives the copy; the end of the kernel publishes it
}

}  // namespace flashmhf
