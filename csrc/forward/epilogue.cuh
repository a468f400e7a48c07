// Epilogue: a whole item's output goes to shared memory, from where the producer stores it; a part of an item goes to the
// workspace in fp32, in fragment order.
#pragma once

#include "common/fragments.cuh"
#include "forward/items.cuh"

namespace flashmhf {

template <int d_h> using OutputTile = kittens::rt_fl<16, d_h>;

// Float4 j of thread i of the warpgroup is quad j of its fragment.
template <int d_h>
__device__ __forceinline__ size_t part_offset(const ForwardParams &p, int cluster, int block, int part, int rank, int warpgroup) {
    return static_cast<size_t>((((cluster * p.schedule.abreast + block) * 2 + part) * p.row_ctas + rank) * p.consumers + warpgroup) *
           (tile_rows * d_h);
}

template <int d_h>
__device__ __forceinline__ void store_part(const OutputTile<d_h> &o, const ForwardParams &p, int cluster, int block, int part, int rank,
                                           int warpgroup) {
    auto *dst = reinterpret_cast<float4 *>(p.parts.sums + part_offset<d_h>(p, cluster, block, part, rank, warpgroup)) +
                kittens::warpgroup::laneid();
#pragma unroll
    for (int j = 0; j < d_h / 8; ++j) __stcg(dst + 128 * j, fragment_quad<d_h>(o, j));
}

// Where the output has a row and a column of a row tile. Tile: RowTile, or the record of an item.
template <int d_h, typename T, typename Tile>
__device__ __forceinline__ T *output_at(const ForwardParams &p, const Tile &tile, int row, int column) {
    return static_cast<T *>(p.out) + tile.sequence * p.out_batch + (tile.token + p.token_of(row)) * p.out_token +
           (tile.head + p.head_of(row)) * d_h + column;
}
template <typename T> __device__ __forceinline__ void store_pair(T *dst, float x, float y) {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    *reinterpret_cast<T2 *>(dst) = kittens::base_types::convertor<T2, float2>::convert(float2{x, y});
}

// The output of a whole item, to where its Q was. A warp writes the rows that it has read.
template <typename Tile, int d_h> __device__ __forceinline__ void stage_output(Tile &staged, const OutputTile<d_h> &o) {
    kittens::warpgroup::store(staged, o);
    tma::fence_shared_writes();
}

}  // namespace flashmhf
