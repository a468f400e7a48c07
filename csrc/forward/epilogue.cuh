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
// Two columns of rows `row` and `row + 8` of a row tile, as in a float4 above, to the output.
template <int d_h, typename T>
__device__ __forceinline__ void store_quad(float4 sum, const ForwardParams &p, const RowTile &tile, int row, int column) {
    T *dst = output_at<d_h, T>(p, tile, row, column);
    store_pair(dst, sum.x, sum.y);
    if (holds_token(p, tile.sequence, tile.token + p.token_of(row + 8))) store_pair(dst + 8 * p.out_token, sum.z, sum.w);
}

// Sharers of an item add their sums in pieces of 8 columns of a row tile, 128 float4s as above: piece i (of all warpgroups) goes to CTA
// i % slices, where it is number i / slices and lies beside the pieces of the other slices, in the order of their ranks. Threads whose
// first row holds no token send nothing: the SMs send each other some 16 bytes a clock, so that 32 KB take more than a microsecond.
template <int d_h> struct Pieces {
    static constexpr int of_tile = d_h / 8;
    int slices, threads, stride;  // float4s of a slice in a piece, and of a piece
    int number = 0, cta = 0;      // of the warpgroup's first piece
    int each, spare;              // pieces of a row tile for each CTA, and for one CTA each

    // of_tile = slices * each + spare. Divisions here would lie between the last product and the sums.
    __device__ __forceinline__ Pieces(const ForwardParams &p, int warpgroup)
        : slices(p.schedule.slices),
          threads(p.sum_threads),
          stride(slices * threads),
          each(p.slice_pieces),
          spare(p.spare_pieces) {
        for (int i = 0; i < warpgroup; ++i) {
            number += each, cta += spare;
            if (cta >= slices) cta -= slices, ++number;
        }
    }
    // The first of the warpgroup's pieces that goes to CTA `rank`, in the warpgroup and in the CTA; the others follow at every `slices`.
    __device__ __forceinline__ int first_of(int rank) const { return rank - cta + (rank < cta ? slices : 0); }
    __device__ __forceinline__ int number_of(int rank) const { return number + (rank < cta ? 1 : 0); }
    __device__ __forceinline__ int count_of(int rank) const { return each + (first_of(rank) < spare); }
};

// The sums of a warpgroup, to the CTAs that add them. stores_own: those that this CTA adds, which the thread that stores them reads, take
// ordinary stores; an asynchronous store to the CTA itself takes as long as one to another.
template <int d_h, bool stores_own, typename Quad>
__device__ __forceinline__ void send_slice_sums(float4 *slice_sums, kittens::semaphore &full, const Pieces<d_h> &pieces, Quad &&quad) {
    const int rank = kittens::cluster_ctarank();
    int cta = pieces.cta;
    float4 *at = slice_sums + pieces.number * pieces.stride + rank * pieces.threads + kittens::warpgroup::laneid();
#pragma unroll
    for (int j = 0; j < d_h / 8; ++j) {
        if (stores_own && cta == rank) *at = quad(j);
        else tma::store_remote_async(at, quad(j), full, cta);
        if (++cta == pieces.slices) cta = 0, at += pieces.stride;
    }
}
// Adds what the slices have sent of the warpgroup's rows, and writes the output from the thread's first row and column on. both: the row 8
// below holds a token, too. at_once: up to max_slices slices, all of whose sums of a piece are loaded before they are added.
template <int d_h, typename T, bool at_once>
__device__ __forceinline__ void add_slice_sums(const float4 *slice_sums, const ForwardParams &p, const Pieces<d_h> &pieces, T *out,
                                               bool both) {
    const int rank = kittens::cluster_ctarank();
    slice_sums += pieces.number_of(rank) * pieces.stride + kittens::warpgroup::laneid();
    for (int j = pieces.first_of(rank); j < Pieces<d_h>::of_tile; j += pieces.slices, slice_sums += pieces.stride) {
        float4 sum = {0.f, 0.f, 0.f, 0.f};
        if constexpr (at_once) {
            float4 x[max_slices];
#pragma unroll
            for (int c = 0; c < max_slices; ++c)
                if (c < pieces.slices) x[c] = slice_sums[c * pieces.threads];
#pragma unroll
            for (int c = 0; c < max_slices; ++c)
                if (c < pieces.slices) add(sum, x[c]);
        } else {
#pragma unroll 8
            for (int c = 0; c < pieces.slices; ++c) add(sum, slice_sums[c * pieces.threads]);
        }
        store_pair(out + 8 * j, sum.x, sum.y);
        if (both) store_pair(out + 8 * j + 8 * p.out_token, sum.z, sum.w);
    }
}
// A cluster's CTAs add the sums of its item, which `tile` describes: a copy, since the producer may overwrite the item's record.
template <int d_h, typename T, bool stores_own, bool at_once, typename Shared, typename Quad>
__device__ __forceinline__ void exchange_slice_sums(Shared &shared, const ForwardParams &p, const Item &tile, int warpgroup, Quad &&quad) {
    const int row = fragment_row(kittens::warpgroup::laneid());
    const Pieces<d_h> pieces(p, warpgroup);
    const bool stores = holds_token(p, tile.sequence, tile.token + p.token_of(row));
    // As many threads of each slice send sums of the warp's rows.
    const int senders = __popc(__ballot_sync(kittens::MASK_ALL, stores)) * (pieces.slices - stores_own);
    if (kittens::laneid() == 0)
        kittens::tma::expect_bytes(shared.semaphores.slice_sums_full,
                                   pieces.count_of(kittens::cluster_ctarank()) * senders * int{sizeof(float4)});
    __syncwarp();
    if (p.sums_in_q) kittens::wait(shared.semaphores.q_free, 0);
    else cluster_sync();  // every ring has been read for the last time
    float4 *slice_sums = shared.slice_sums(p.sums_in_q);
    if (stores) send_slice_sums<d_h, stores_own>(slice_sums, shared.semaphores.slice_sums_full, pieces, quad);
    T *out = output_at<d_h, T>(p, tile, row, kittens::warpgroup::laneid() % 4 * 2);
    const bool both = holds_token(p, tile.sequence, tile.token + p.token_of(row + 8));
    kittens::wait(shared.semaphores.slice_sums_full, 0);
    if (stores) add_slice_sums<d_h, T, at_once>(slice_sums, p, pieces, out, both);
}

// The output of a whole item, to where its Q was. A warp writes the rows that it has read.
template <typename Tile, int d_h> __device__ __forceinline__ void stage_output(Tile &staged, const OutputTile<d_h> &o) {
    kittens::warpgroup::store(staged, o);
    tma::fence_shared_writes();
}

}  // namespace flashmhf
