// Epilogue: a whole item's output goes through shared memory and TMA (which clips rows that hold no token); a part of an item goes to the
// workspace in fp32, in fragment order.
#pragma once

#include "kernels/load_tiles.cuh"

namespace flashmhf {

template <int d_h> using OutputTile = kittens::rt_fl<16, d_h>;

// Float4 j of thread i of the warpgroup holds the fragment's accumulators 4j..4j + 3: columns 8j + 2 (i % 4), + 1 of row g and of row g + 8.
template <int d_h> __device__ __forceinline__ size_t part_offset(const ForwardParams &p, int cluster, int part, int rank, int warpgroup) {
    return ((((static_cast<size_t>(cluster) * 2 + part) * p.cluster_size + rank) * ForwardPolicy<d_h>::consumers + warpgroup) * tile_rows) * d_h;
}

__device__ __forceinline__ int fragment_row(int thread) { return thread / 32 * 16 + thread % 32 / 4; }

template <int d_h> __device__ __forceinline__ void store_part(const OutputTile<d_h> &o, const ForwardParams &p, const Item &item, int cluster, int rank,
                                                               int warpgroup) {
    const int thread = kittens::warpgroup::laneid();
    if (!holds_token(p, item.sequence, item.token + fragment_row(thread))) return;
    auto *dst = reinterpret_cast<float4 *>(p.partials + part_offset<d_h>(p, cluster, item.part, rank, warpgroup)) + thread;
#pragma unroll
    for (int j = 0; j < d_h / 8; ++j) {
        const auto &pair = o.tiles[0][j / 2].data;
        const float2 low = pair[j % 2 * 2], high = pair[j % 2 * 2 + 1];
        __stcg(dst + 128 * j, float4{low.x, low.y, high.x, high.y});
    }
}

template <typename Tile, int d_h> __device__ __forceinline__ void store_output(Tile &staged, const OutputTile<d_h> &o, const CUtensorMap *map,
                                                                                const Item &item, int barrier) {
    using namespace kittens;
    const bool leader = warpgroup::laneid() == 0;
    constexpr int panel_cols = Tile::swizzle_bytes / element_bytes;
    warpgroup::sync(barrier);
    warpgroup::store(staged, o);
    flashmhf::tma::fence_shared_writes();
    warpgroup::sync(barrier);
    if (leader) {
#pragma unroll
        for (int c = 0; c < d_h; c += panel_cols)
            flashmhf::tma::store_async(map, &staged.data[c * tile_rows], int4{c, item.head, item.token, item.sequence});
        kittens::tma::store_commit_group();
    }
}

}  // namespace flashmhf
