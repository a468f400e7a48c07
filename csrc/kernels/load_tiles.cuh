// The producer: one thread streams tiles of K, U and V through the ring; one warp for each consumer warpgroup brings what belongs to the
// rows of an item: Q, and the weights of the first sub-networks.
#pragma once

#include "kernels/ptx_ext.cuh"
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
        tma::multicast_async(panel, map, int3{col + c, row, subnet}, full, (1 << cluster_size) - 1);
    }
}

template <int d_h, typename T> __device__ __forceinline__ void load_weights(ForwardShared<d_h, T> &shared, const WeightMaps &maps, const ForwardParams &p) {
    using P = ForwardPolicy<d_h>;
    auto &sem = shared.semaphores;
    Ring<P::slots> ring;
    WorkCursor cursor(p.schedule, kittens::clusterIdx().x);
    Work work;
    const int share = tile_inter / p.cluster_size * kittens::cluster_ctarank();  // first row of a tile that this CTA fetches

    auto fill = [&](int bytes) {
        wait_sleeping(sem.slot_empty[ring.slot], ring.phase ^ 1);
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
#pragma unroll 1  // the producer has few registers
        for (int left = work.end - work.begin; left > 0; --left) {
            const int row = tile * tile_inter + share;
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
}

// The row tile of a warpgroup: head, sequence and first token. The last tiles of a launch may lie behind the last sequence: their rows read
// as zeros and are not stored.
struct RowTile {
    int head, sequence, token;
    __device__ __forceinline__ RowTile(const ForwardParams &p, int item, int rank, int consumers, int warpgroup) {
        head = item / p.blocks;
        const int tile = ((item - head * p.blocks) * p.cluster_size + rank) * consumers + warpgroup;
        sequence = tile / p.row_tiles;
        token = (tile - sequence * p.row_tiles) * tile_rows;
    }
};
__device__ __forceinline__ bool holds_token(const ForwardParams &p, int sequence, int token) { return sequence < p.batch && token < p.length; }

template <int d_h> using GateBuffer = float[ForwardPolicy<d_h>::gate_chunk + 1][ForwardPolicy<d_h>::gate_pitch];

// R of a warpgroup's rows from..to, sub-networks first.. of a chunk, by one warp: lanes along the sub-networks. A burst of loads clogs the
// path that all warps share (6 % of a run at T = 32,256), so a few at a time, through registers; but in a hurry (fp32 only) all at once, by
// copies that need no register, complete after wait_gate().
template <int d_h, typename T> __device__ __forceinline__ void load_gate(const ForwardParams &p, const Item &item, int from, int to, int first,
                                                                         bool hurry, GateBuffer<d_h> *dst) {
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
            for (int j = 0; j < batch; ++j) dst[row / 16][e][row % 16 + j * step] = values[j];
        }
    };
    if (p.gate == Gate::r_float && hurry) {
        const float *r = static_cast<const float *>(p.gate_data) + at;
#pragma unroll 1
        for (int row = from + lane / chunk; row < to; row += step, r += step * p.r_token) copy_word_async(&dst[row / 16][e][row % 16], r, row < tokens);
    } else if (p.gate == Gate::r_float) {
        load(static_cast<const float *>(p.gate_data) + at);
    } else if (p.gate == Gate::r_half) {
        load(static_cast<const T *>(p.gate_data) + at);
    } else {
        for (int row = from + lane / chunk; row < to; row += step) dst[row / 16][e][row % 16] = 1.f;
    }
    for (int row = from + lane; row < to; row += 32) dst[row / 16][chunk][row % 16] = 1.f;
}
__device__ __forceinline__ void wait_gate() {
    wait_copied_words();
    __syncwarp();
}

// For one consumer warpgroup, by one warp.
template <int d_h, typename T> __device__ __forceinline__ void load_rows_of_items(ForwardShared<d_h, T> &shared, const CUtensorMap *map,
                                                                                  const ForwardParams &p, int warpgroup) {
    using P = ForwardPolicy<d_h>;
    const bool leader = kittens::laneid() == 0;
    auto &full = shared.semaphores.q_full[warpgroup];
    WorkCursor cursor(p.schedule, kittens::clusterIdx().x);
    Work work;
    constexpr int patience = 48 * 128 / d_h;  // tiles of an item under which the next one's weights can come at leisure, 25 us
    int count = 0, ahead = 0;
    for (; cursor.next(work); ++count) {
        const RowTile rows(p, work.item, kittens::cluster_ctarank(), P::consumers, warpgroup);
        const int part = work.end - work.begin == p.schedule.inter_tiles ? -1 : work.part;
        Item &item = shared.items[count % 2][warpgroup];
        if (count > 0) kittens::arrive_and_wait(q_empty_barrier(warpgroup));
        if (leader) {
            item = Item{work.begin, work.end, part, rows.head, rows.sequence, rows.token};
            kittens::tma::expect_bytes(full, P::row_tile_bytes);
#pragma unroll
            for (int c = 0; c < d_h; c += P::panel_cols)
                tma::load_async(&shared.q[warpgroup].data[c * tile_rows], map, int4{c, rows.head, rows.token, rows.sequence}, full);
        }
        __syncwarp();
        if (P::gate_early && p.gate < Gate::w_float) {
            load_gate<d_h, T>(p, item, 0, tile_rows, item.begin / p.subnet_tiles, ahead < patience, shared.gate[count % P::gate_buffers][warpgroup]);
            wait_gate();
        }
        if (leader) kittens::arrive(full);
        ahead = item.end - item.begin;
    }
    if (count > 0) kittens::arrive_and_wait(q_empty_barrier(warpgroup));
    if (leader) {
        shared.items[count % 2][warpgroup].begin = shared.items[count % 2][warpgroup].end = 0;
        kittens::arrive(full, q_full_arrivals);
    }
}

}  // namespace flashmhf
