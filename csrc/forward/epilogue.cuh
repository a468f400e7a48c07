// Epilogue: a whole item's output goes to shared memory, from where the producer stores it; a part of an item goes to the
// workspace in fp32, in fragment order; the sums of slices go to each other's shared memory.
#pragma once

#include "forward/producer.cuh"

namespace flashmhf {

template <int d_h> using OutputTile = kittens::rt_fl<16, d_h>;

// Float4 j of thread i of the warpgroup is quad j of its fragment.
template <int d_h>
__device__ __forceinline__ size_t part_offset(const ForwardParams &p, int cluster, int lane, int part, int rank, int warpgroup) {
    return static_cast<size_t>((((cluster * p.schedule.lanes + lane) * 2 + part) * p.row_ctas + rank) * p.consumers + warpgroup) *
           (tile_rows * d_h);
}

template <int d_h>
__device__ __forceinline__ void store_part(const OutputTile<d_h> &o, const ForwardParams &p, int cluster, int lane, int part, int rank,
                                           int warpgroup) {
    auto *dst =
        reinterpret_cast<float4 *>(p.partials + part_offset<d_h>(p, cluster, lane, part, rank, warpgroup)) + kittens::warpgroup::laneid();
#pragma unroll
    for (int j = 0; j < d_h / 8; ++j) __stcg(dst + 128 * j, fragment_quad<d_h>(o, j));
}

// Where the output has a row and a column of a row tile.
template <int d_h, typename T> __device__ __forceinline__ T *output_at(const ForwardParams &p, const RowTile &tile, int row, int column) {
    return static_cast<T *>(p.out) + tile.sequence * p.out_batch + (tile.token + p.token_of(row)) * p.out_token +
           (tile.head + p.head_of(row)) * d_h + column;
}
template <typename T> __device__ __forceinline__ void store_pair(T *dst, float x, float y) {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    *reinterpret_cast<T2 *>(dst) = kittens::base_types::convertor<T2, float2>::convert(float2{x, y});
}
// Two columns of rows `row` and `row + 8` of a row tile, as in a float4 above, to the output.
template <int d_h, typename T>
__device__ __forceinline__ void store_quad(float4 sum, const ForwardParams &p, const RowTile &tile, int row, int column) {
    T *dst = output_at<d_h, T>(p, tile, row, column);
    store_pair(dst, sum.x, sum.y);
    if (holds_token(p, tile.sequence, tile.token + p.token_of(row + 8))) store_pair(dst + 8 * p.out_token, sum.z, sum.w);
}

// Sharers of an item add their sums in pieces of 8 columns of a row tile, 128 float4s as above: piece i (of all warpgroups) goes to CTA
// i % slices, where it is number i / slices and lies beside the pieces of the other slices, in the order of their ranks.
struct Pieces {
    int of_tile, all, slices;
    template <int d_h> __device__ __forceinline__ static Pieces of(const ForwardParams &p) {
        return {d_h / 8, d_h / 8 * p.consumers, p.schedule.slices};
    }
    __device__ __forceinline__ int of_cta(int rank) const { return (all - rank + slices - 1) / slices; }
    __device__ __forceinline__ int bytes(int rank) const { return of_cta(rank) * slices * 128 * int{sizeof(float4)}; }
};

// The sums of a warpgroup, to the rings of the CTAs that add them; no ring holds tiles any more.
template <int d_h>
__device__ __forceinline__ void send_slice_sums(float4 *slice_sums, kittens::semaphore &full, const OutputTile<d_h> &o,
                                                const ForwardParams &p, int warpgroup) {
    const Pieces pieces = Pieces::of<d_h>(p);
    const int thread = kittens::warpgroup::laneid(), rank = kittens::cluster_ctarank();
    int number = warpgroup * pieces.of_tile / pieces.slices, cta = warpgroup * pieces.of_tile - number * pieces.slices;
#pragma unroll
    for (int j = 0; j < d_h / 8; ++j) {
        tma::store_remote_async(slice_sums + (number * pieces.slices + rank) * 128 + thread, fragment_quad<d_h>(o, j), full, cta);
        if (++cta == pieces.slices) cta = 0, ++number;
    }
}
// Adds what the slices have sent, and writes the output.
template <int d_h, typename T>
__device__ __forceinline__ void add_slice_sums(const float4 *slice_sums, const ForwardParams &p, int warpgroup) {
    const Pieces pieces = Pieces::of<d_h>(p);
    const int thread = kittens::warpgroup::laneid(), row = fragment_row(thread), rank = kittens::cluster_ctarank();
    for (int number = warpgroup; number < pieces.of_cta(rank); number += p.consumers) {
        const int i = number * pieces.slices + rank;
        const RowTile tile(p, kittens::clusterIdx().x, 0, i / pieces.of_tile);
        if (!holds_token(p, tile.sequence, tile.token + p.token_of(row))) continue;
        float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 8
        for (int c = 0; c < pieces.slices; ++c) add(sum, slice_sums[(number * pieces.slices + c) * 128 + thread]);
        store_quad<d_h, T>(sum, p, tile, row, i % pieces.of_tile * 8 + thread % 4 * 2);
    }
}

// The output of a whole item, to where its Q was. A warp writes the rows that it has read.
template <typename Tile, int d_h> __device__ __forceinline__ void stage_output(Tile &staged, const OutputTile<d_h> &o) {
    kittens::warpgroup::store(staged, o);
    tma::fence_shared_writes();
}

}  // namespace flashmhf
