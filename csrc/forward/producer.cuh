// The producer: one thread streams tiles of K, U and V through the ring. One warp for each consumer warpgroup loads Q and the gate of the
// first sub-networks of an item, and stores the outputs.
#pragma once

#include <type_traits>

#include "common/fragments.cuh"
#include "common/ptx.cuh"
#include "common/tma.cuh"
#include "common/token_tile.cuh"
#include "forward/params.h"
#include "forward/router.cuh"
#include "forward/shared_memory.cuh"

namespace flashmhf {

template <Division division> using Cursor = std::conditional_t<division == Division::gathers, GatherCursor, WorkCursor>;
// Without whole waves a tile of K, U and V comes from memory for one CTA, or for some that read it at a time. Later waves read it again.
template <Division division> constexpr bool reads_once = division != Division::waves;

struct WeightMaps {
    const CUtensorMap *k, *u, *v;  // [H * E][d_e][d_h]; rows from d_e on read as zeros
};

// Rows `row..` of one matrix to rows `at..` of the panels of a tile, of this CTA alone or, multicast, of those in the mask `ctas`: as many
// boxes of the tensor map, of box_rows rows each.
template <bool multicast, bool once, int boxes, int box_rows, typename Tile>
__device__ __forceinline__ void load_rows(Tile &dst, int at, const CUtensorMap *map, int col, int row, int subnet, kittens::semaphore &full,
                                          uint16_t ctas) {
    constexpr int panel_cols = Tile::swizzle_bytes / element_bytes;
#pragma unroll
    for (int i = 0; i < boxes; ++i)
#pragma unroll
        for (int c = 0; c < Tile::cols; c += panel_cols) {
            auto *panel = &dst.data[c * Tile::rows + (at + i * box_rows) * panel_cols];
            const int3 from{col + c, row + i * box_rows, subnet};
            if constexpr (multicast) tma::multicast_async<once>(panel, map, from, full, ctas);
            else tma::load_async<once>(panel, map, from, full);
        }
}

// Returns when the cluster's barriers are initialised and the kernel before this one has finished. Code before it runs under that kernel.
__device__ __forceinline__ void begin(const ForwardParams &p) {
    if (p.row_ctas > 1) cluster_sync();
    kittens::pdl::wait();
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
                tma::prefetch_tile<reads_once<division>>(map, int3{c, row, subnet + work.item / p.blocks * p.subnets});
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
        load_rows<multicast, reads_once<division>, tile_inter / box_rows, box_rows>(shared.v(ring.slot), own_row, maps.v, 0, row_v,
                                                                                    subnet_v, sem.slot_full[ring.slot], ctas);
    };
    auto send_v = [&]() {  // in a slot of its own
        fill(P::v_bytes);
        load_v();
        ring.advance();
    };
    auto load_ku = [&](int col, int row, int subnet) {
        auto &ku = shared.ku(ring.slot);
        load_rows<multicast, reads_once<division>, tile_inter / box_rows, box_rows>(ku, own_row, maps.k, col, row, subnet,
                                                                                    sem.slot_full[ring.slot], ctas);
        load_rows<multicast, reads_once<division>, tile_inter / box_rows, box_rows>(ku, tile_inter + own_row, maps.u, col, row, subnet,
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
    // Not earlier: with few tokens these tiles would evict from the L2 what the next kernel prefetches.
    if (division != Division::slices || !p.late_successor) kittens::pdl::arrive();
}

// The row tile of a warpgroup.
struct RowTile {
    int head, sequence, token;  // the first head and token
    // rank: among the CTAs of a cluster that take rows
    __device__ __forceinline__ RowTile(const ForwardParams &p, int item, int rank, int warpgroup) {
        const int weight_head = item / p.blocks;
        int index = ((item - weight_head * p.blocks) * p.row_ctas + rank) * p.consumers + warpgroup;
        const int bundle = min(index / p.head_tiles, p.bundles - 1);
        index -= bundle * p.head_tiles;
        head = (weight_head * p.bundles + bundle) * p.bundle;
        const TokenTile tile(index, p.row_tiles);
        // Behind the last tile: no sequence, and no head of a bundle, which its tensor maps have in place of the sequences.
        sequence = tile.sequence * p.bundle;
        token = tile.tile << p.tile_shift;
    }
};
__device__ __forceinline__ bool holds_token(const ForwardParams &p, int sequence, int token) {
    return sequence < p.batch && token < p.length;
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
    const int64_t at = item.sequence * p.r_batch + (item.token + from + lane / chunk) * p.r_token + item.head * p.r_head + first + e;
    auto load = [&](auto *r) {
#pragma unroll 1
        for (int row = from + lane / chunk; row < to; row += batch * step) {
            float values[batch];
#pragma unroll
            for (int j = 0; j < batch; ++j, r += step * p.r_token) values[j] = row + j * step < tokens ? static_cast<float>(__ldg(r)) : 0.f;
#pragma unroll
            for (int j = 0; j < batch; ++j) dst.at(row + j * step, e) = values[j];
        }
    };
    if (p.gate == Gate::r_float && urgent) {
        const float *r = static_cast<const float *>(p.gate_data) + at;
#pragma unroll 1
        for (int row = from + lane / chunk; row < to; row += step, r += step * p.r_token) copy_word_async(&dst.at(row, e), r, row < tokens);
    } else if (p.gate == Gate::r_float) {
        load(static_cast<const float *>(p.gate_data) + at);
    } else if (p.gate == Gate::r_half) {
        load(static_cast<const T *>(p.gate_data) + at);
    } else {
        for (int row = from + lane / chunk; row < to; row += step) dst.at(row, e) = 1.f;
    }
    unit_scale<d_h>(dst, from, to);
}
__device__ __forceinline__ void wait_gate() {
    wait_copied_words();
    __syncwarp();
}

// The output of a whole item, from where its Q was; TMA clips rows that hold no token. By one thread.
template <typename Tile> __device__ __forceinline__ void store_output(const Tile &staged, const CUtensorMap *map, const Item &item) {
    constexpr int panel_cols = Tile::swizzle_bytes / element_bytes;
#pragma unroll
    for (int c = 0; c < Tile::cols; c += panel_cols)
        tma::store_async(map, &staged.data[c * tile_rows], int4{c, item.head, item.token, item.sequence});
    kittens::tma::store_commit_group();
}

// For one consumer warpgroup, by one warp: loads Q and gate of its items, stores their outputs.
template <int d_h, typename T, Division division>
__device__ __forceinline__ void load_rows_of_items(ForwardShared<d_h, T> &shared, const CUtensorMap *map, const CUtensorMap *map_r,
                                                   const CUtensorMap *map_out, const ForwardParams &p, int warpgroup) {
    using P = ForwardPolicy<d_h>;
    const bool leader = kittens::laneid() == 0;
    auto &full = shared.semaphores.q_full[warpgroup];
    Cursor<division> cursor(p.schedule, kittens::clusterIdx().x);
    constexpr int unhurried_tiles = 48 * 128 / d_h;  // 25 us: an item of so many tiles covers the slow load of the next item's gate
    const bool stages = P::gate_early && p.router_bytes > 0 && leader && warpgroup == 0;
    int count = 0, ahead = 0;
    // W of the head of the current item: one for all consumers.
    auto load_router = [&]() {
        auto &w_full = shared.semaphores.w_full;
        kittens::tma::expect_bytes(w_full, p.router_bytes);
        const void *w = router_of<d_h, T>(p, shared.items[count % 2][0].head);
        kittens::tma::load_async(shared.router(p), const_cast<void *>(w), p.router_bytes, w_full);
    };
    auto next_item = [&]() {
        Work work;
        if (!cursor.next(work, kittens::clusterIdx().x, kittens::clusterIdx().y, kittens::cluster_ctarank())) return false;
        const RowTile rows(p, work.item, p.row_ctas > 1 ? kittens::cluster_ctarank() : 0, warpgroup);
        int part = p.schedule.slices == 1 && work.end - work.begin == p.schedule.inter_tiles ? whole_item : work.part;
        if (division == Division::gathers && work.begin > 0 && work.end == p.schedule.inter_tiles) part = gathered_item;
        const int subnet = work.begin / p.subnet_tiles, column = p.gate_tiles ? (rows.head * p.subnets + subnet) % 4 : 0;
        if (leader)
            shared.items[count % 2][warpgroup] = Item{work.begin, work.end, part, subnet, column, rows.head, rows.sequence, rows.token};
        return true;
    };
    // Waits until the consumers have read Q. From item `index` on the buffer then holds an output: stores it.
    auto take_over = [&](int index) {
        kittens::arrive_and_wait(q_read_barrier(warpgroup));
        if (index < 0 || !leader) return;
        const Item &done = shared.items[index % 2][warpgroup];
        if (done.part >= 0) return;
        store_output(shared.q[warpgroup], map_out, done);
        kittens::tma::store_async_read_wait<0>();
    };
    constexpr int lag = P::q_in_registers ? 2 : 1;  // Q is read an item ahead, or not
    bool more = next_item();
    begin(p);
    if (stages && more) load_router();
    while (more) {
        const Item &item = shared.items[count % 2][warpgroup];
        auto &gate = shared.gate[count % P::gate_buffers][warpgroup];
        __syncwarp();
        const int first = item.subnet;
        if (leader) {
            kittens::tma::expect_bytes(full, P::row_tile_bytes + (p.gate_tiles ? P::gate_chunk_bytes : 0));
#pragma unroll
            for (int c = 0; c < d_h; c += P::panel_cols)
                tma::load_async(&shared.q[warpgroup].data[c * tile_rows], map, int4{c, item.head, item.token, item.sequence}, full);
            if (P::gate_early && p.gate_tiles)  // from a multiple of 16 bytes on: TMA takes no other column
                tma::load_async(gate.values, map_r, int3{item.head * p.subnets + first - item.gate_column, item.token, item.sequence},
                                full);
        }
        if (P::gate_early && p.gate < Gate::w_float) {
            if (!p.gate_tiles) {
                load_gate<d_h, T>(p, item, 0, tile_rows, first, ahead < unhurried_tiles, gate);
                wait_gate();
            } else if (count < P::gate_buffers) {
                unit_scale<d_h>(gate, 0, tile_rows);
                __syncwarp();
            }
        }
        if (leader) kittens::arrive(full);
        if (stages && count > 0) {
            wait_sleeping(shared.semaphores.w_empty, count - 1 & 1);
            load_router();
        }
        ahead = item.end - item.begin;
        ++count;
        take_over(count - lag);
        more = next_item();
    }
    if (leader) {
        shared.items[count % 2][warpgroup].begin = shared.items[count % 2][warpgroup].end = 0;
        kittens::arrive(full, ForwardArrivals::q_full);
    }
    if (lag == 2 && count > 0) take_over(count - 1);
    if (leader) kittens::tma::store_async_read_wait<0>();  // the memory outlives the copy; the end of the kernel publishes it
}

}  // namespace flashmhf
