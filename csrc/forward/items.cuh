// The items of a CTA, in whatever format the weights come: what a consumer warpgroup is told of one, and where its rows lie.
#pragma once

#include <type_traits>

#include "common/tma.cuh"
#include "common/trace.cuh"
#include "forward/params.h"

namespace flashmhf {

constexpr int whole_item = -1, gathered_item = -2;  // gathered: the cluster adds the parts in memory

// The work of a consumer warpgroup on the Q that arrives with this record.
struct Item {
    int begin, end;             // inter tiles; end = 0: the work is done
    int part;                   // of a split item, as in Work; whole or gathered: the producer stores the output
    int subnet;                 // of the first tile
    int gate_column;            // column of the gate tile of the first sub-network
    int head, sequence, token;  // of the warpgroup's first row
};

template <Division division> using Cursor = std::conditional_t<division == Division::gathers, GatherCursor, WorkCursor>;
// Without whole waves a tile of K, U and V comes from memory for one CTA, or for some that read it at a time. Later waves read it again.
template <Division division> constexpr tma::Evict evict_of = division != Division::waves ? tma::Evict::first : tma::Evict::normal;

struct ForwardMaps {
    const CUtensorMap *q, *k, *u, *v;  // k, u, v: [H * E][d_e][d_h]; rows from d_e on read as zeros
    const CUtensorMap *out, *r;        // r: only with gate.tiles
};

// The inter tiles of a piece of work, one after the other.
struct TileWalk {
    int subnet, tile;  // among the sub-networks of all heads; in the sub-network
    __device__ __forceinline__ TileWalk(const ForwardParams &p, const Work &work)
        : subnet(work.begin / p.subnet_tiles),
          tile(work.begin - subnet * p.subnet_tiles) {
        subnet += work.item / p.blocks * p.subnets;
    }
    __device__ __forceinline__ void advance(const ForwardParams &p) {
        if (++tile == p.subnet_tiles) {
            tile = 0;
            ++subnet;
        }
    }
};
// The next piece of a CTA's work.
template <typename Cursor> __device__ __forceinline__ bool next_work(Cursor &cursor, Work &work) {
    return cursor.next(work, kittens::clusterIdx().x, kittens::clusterIdx().y, kittens::cluster_ctarank());
}
template <typename Cursor> __device__ __forceinline__ bool first_work(const ForwardParams &p, Work &work) {
    Cursor cursor(p.schedule, kittens::clusterIdx().x);
    return next_work(cursor, work);
}

// Returns when the cluster's barriers are initialised and the kernel before this one has finished. Code before it runs under that kernel.
__device__ __forceinline__ void wait_for_cluster_and_predecessor(const ForwardParams &p) {
    if (p.row_ctas > 1) cluster_sync();
    kittens::pdl::wait();
    stamp(Stamp::forward_predecessor_done);
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

// The output of a whole item, from where its Q was; TMA clips rows that hold no token. By one thread.
template <typename Tile> __device__ __forceinline__ void store_output(const Tile &staged, const CUtensorMap *map, const Item &item) {
    constexpr int panel_cols = Tile::swizzle_bytes / element_bytes;
#pragma unroll
    for (int c = 0; c < Tile::cols; c += panel_cols)
        tma::store_async(map, &staged.data[c * tile_rows], int4{c, item.head, item.token, item.sequence});
    kittens::tma::store_commit_group();
}

}  // namespace flashmhf
