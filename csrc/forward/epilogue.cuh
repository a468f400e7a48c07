// Epilogue: a whole item's output goes to shared memory, from where the producer stores it; a part of an item goes to the
// workspace in fp32, in fragment order; the sums of slices go to each other's shared memory.
#pragma once

#include "common/fragments.cuh"
#include "forward/items.cuh"

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

// Sharers of an item add their sums in pieces of some columns of a row tile, 16 bytes a thread: piece i (of all warpgroups) goes to CTA
// i % slices, where it is number i / slices and lies beside the pieces of the other slices, in the order of their ranks. Threads whose
// first row holds no token send nothing: the SMs send each other some 16 bytes a clock, so that 32 KB take more than a microsecond.
template <int of_tile> struct Pieces {
    int slices, threads, stride;  // of 16 bytes: a slice in a piece, and a piece
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

// The sums of a warpgroup, to the CTAs that add them. Those that this CTA adds, which the thread that stores them reads, take ordinary
// stores; an asynchronous store to the CTA itself takes as long as one to another.
template <int of_tile, typename Sums>
__device__ __forceinline__ void send_slice_sums(typename Sums::Piece *slice_sums, kittens::semaphore &full, const Pieces<of_tile> &pieces,
                                                const Sums &sums) {
    const int rank = kittens::cluster_ctarank();
    int cta = pieces.cta;
    auto *at = slice_sums + pieces.number * pieces.stride + rank * pieces.threads + kittens::warpgroup::laneid();
#pragma unroll
    for (int j = 0; j < of_tile; ++j) {
        if (cta == rank) *at = sums.piece(j);
        else tma::store_remote_async(at, sums.piece(j), full, cta);
        if (++cta == pieces.slices) cta = 0, at += pieces.stride;
    }
}
// The scale of the thread's rows, to where the CTAs expect that of this slice. The four threads of a row divide the CTAs among them.
__device__ __forceinline__ void send_slice_scale(float2 *slice_scale, kittens::semaphore &full, int slices, float2 scale) {
    for (int cta = kittens::laneid() % 4; cta < slices; cta += 4) tma::store_remote_async(slice_scale, scale, full, cta);
}
// Adds what the slices have sent of the warpgroup's rows, and writes the output from the thread's first row and column on. both: the row 8
// below holds a token, too. scale(c): of the rows, of slice c.
template <typename Sums, typename T, int of_tile, typename Scale>
__device__ __forceinline__ void add_slice_sums(const typename Sums::Piece *slice_sums, Scale &&scale, const ForwardParams &p,
                                               const Pieces<of_tile> &pieces, T *out, bool both) {
    const int rank = kittens::cluster_ctarank();
    slice_sums += pieces.number_of(rank) * pieces.stride + kittens::warpgroup::laneid();
    for (int j = pieces.first_of(rank); j < of_tile; j += pieces.slices, slice_sums += pieces.stride) {
        float4 sum[Sums::columns / 8] = {};
#pragma unroll 8
        for (int c = 0; c < pieces.slices; ++c) Sums::add(sum, slice_sums[c * pieces.threads], scale(c));
#pragma unroll
        for (int i = 0; i < Sums::columns / 8; ++i) {
            store_pair(out + Sums::columns * j + 8 * i, sum[i].x, sum[i].y);
            if (both) store_pair(out + Sums::columns * j + 8 * i + 8 * p.out_token, sum[i].z, sum[i].w);
        }
    }
}
// A cluster's CTAs add the sums of its item, which `tile` describes: a copy, since the producer may overwrite the item's record. A CTA may
// end with its sums on their way: the CTAs that they go to wait for them, and it has waited for all that comes to it.
template <int d_h, typename T, typename Shared, typename Sums>
__device__ __forceinline__ void exchange_slice_sums(Shared &shared, const ForwardParams &p, const Item &tile, int warpgroup,
                                                    const Sums &sums) {
    const int row = fragment_row(kittens::warpgroup::laneid());
    const Pieces<d_h / Sums::columns> pieces(p, warpgroup);
    const bool stores = holds_token(p, tile.sequence, tile.token + p.token_of(row));
    // As many threads of each slice send sums of the warp's rows.
    const int senders = __popc(__ballot_sync(kittens::MASK_ALL, stores));
    if (kittens::laneid() == 0) {
        int bytes = pieces.count_of(kittens::cluster_ctarank()) * (pieces.slices - 1) * senders * int{sizeof(typename Sums::Piece)};
        if (Sums::scaled) bytes += pieces.slices * senders / 4 * int{sizeof(float2)};
        kittens::tma::expect_bytes(shared.semaphores.slice_sums_full, bytes);
    }
    __syncwarp();
    cluster_sync();  // every ring has been read for the last time
    auto *slice_sums = reinterpret_cast<typename Sums::Piece *>(shared.ring);
    // Scales lie in front of the pieces: of each slice, its warpgroups' pairs of rows.
    const int rank = kittens::cluster_ctarank(), pairs = Sums::scaled ? p.consumers * (tile_rows / 2) : 0;
    auto *slice_scales = reinterpret_cast<float2 *>(slice_sums) + warpgroup * (tile_rows / 2) + row / 16 * 8 + row % 8;
    slice_sums += pieces.slices * pairs / 2;
    if (stores) {
        if constexpr (Sums::scaled)
            send_slice_scale(slice_scales + rank * pairs, shared.semaphores.slice_sums_full, pieces.slices, sums.scale);
        send_slice_sums(slice_sums, shared.semaphores.slice_sums_full, pieces, sums);
    }
    T *out = output_at<d_h, T>(p, tile, row, kittens::warpgroup::laneid() % 4 * 2);
    const bool both = holds_token(p, tile.sequence, tile.token + p.token_of(row + 8));
    kittens::wait(shared.semaphores.slice_sums_full, 0);
    auto scale = [&](int c) -> float2 {
        if constexpr (!Sums::scaled) return {1.f, 1.f};
        else return slice_scales[c * pairs];
    };
    if (stores) add_slice_sums<Sums, T>(slice_sums, scale, p, pieces, out, both);
}

// The output of a whole item, to where its Q was. A warp writes the rows that it has read.
template <typename Tile, int d_h> __device__ __forceinline__ void stage_output(Tile &staged, const OutputTile<d_h> &o) {
    kittens::warpgroup::store(staged, o);
    tma::fence_shared_writes();
}

}  // namespace flashmhf
