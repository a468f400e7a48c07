// The exchange of sums between the CTAs that divide an item. Sharers add their sums in pieces of some columns of a row tile, 16 bytes a
// thread. What does not depend on the sums is computed ahead (`prepare`): addresses in the other CTAs, bytes to expect, places in the
// output. After the last product (`run`) a thread sends its pieces at once, and adds those of its CTA in a loop over the slices, which is
// the order of their ranks: unrolled, the loop takes a little longer.
#pragma once

#include "forward/epilogue.cuh"

namespace flashmhf {

// Piece i (of all warpgroups) goes to CTA i % slices, where it is number i / slices and lies beside the pieces of the other slices, in the
// order of their ranks. Threads whose first row holds no token send nothing: the SMs send each other some 16 bytes a clock, so that 32 KB
// take more than a microsecond.
template <int of_tile> struct Pieces {
    int slices, threads, stride;  // of 16 bytes: a slice in a piece, and a piece
    int number = 0, cta = 0;      // of the warpgroup's first piece
    int each, spare;              // pieces of a row tile for each CTA, and for one CTA each

    // of_tile = slices * each + spare. Divisions here would lie between the last product and the sums.
    __device__ __forceinline__ Pieces(const ForwardParams &p, int warpgroup)
        : slices(p.schedule.slices),
          threads(p.slices.sum_threads),
          stride(slices * threads),
          each(p.slices.pieces),
          spare(p.slices.spare_pieces) {
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

// Sums: what a thread sends, in pieces of `columns` columns of its two rows; `scaled`: with a factor for each row, which the CTA that adds
// multiplies.
template <int d_h, typename T, typename Sums, typename Shared> struct SliceExchange {
    static constexpr int of_tile = d_h / Sums::columns, quads = Sums::columns / 8, row_threads = 4;
    static constexpr int scale_sends = Sums::scaled ? max_slices / row_threads : 0;  // FP8 has no bundles of heads

    Shared &shared;
    const ForwardParams &p;
    bool stores;                            // the thread's first row holds a token
    bool both;                              // the row 8 below holds one, too
    tma::Remote piece_at[of_tile];          // where each piece goes; of the CTA's own pieces `data` is the address in this CTA
    uint32_t own;                           // bit j: piece j is the CTA's own
    tma::Remote scale_at[scale_sends + 1];  // where the scale of the thread's rows goes
    int scales_sent;                        // by this thread: the four threads of a row divide the CTAs among them
    int slices;
    int slice_stride, piece_stride;  // between two slices' sums of a piece, and between two pieces, in 16 bytes
    int pairs;                       // scales of a slice
    int first;                       // the first piece that the thread adds
    const uint4 *pieces;             // slice 0's sums of that piece
    const float2 *scales;            // slice 0's scale of the thread's rows
    T *out;                          // the output's place of that piece

    // tile: the record of the item. The cluster has one item, so the producer does not overwrite the record.
    __device__ __forceinline__ void prepare(const Item &tile, int warpgroup) {
        const int thread = kittens::warpgroup::laneid(), row = fragment_row(thread), rank = kittens::cluster_ctarank();
        const Pieces<of_tile> of(p, warpgroup);
        slices = of.slices, slice_stride = of.threads, piece_stride = of.stride, first = of.first_of(rank);
        stores = holds_token(p, tile.sequence, tile.token + p.token_of(row));
        both = holds_token(p, tile.sequence, tile.token + p.token_of(row + 8));
        // As many threads of each slice send sums of the warp's rows.
        const int senders = __popc(__ballot_sync(kittens::MASK_ALL, stores));
        if (kittens::laneid() == 0)
            kittens::tma::expect_bytes(shared.semaphores.slice_sums_full,
                                       senders * (of.count_of(rank) * (slices - 1) * int{sizeof(uint4)} +
                                                  (Sums::scaled ? slices * int{sizeof(float2)} / row_threads : 0)));
        __syncwarp();

        // Scales lie in front of the pieces: of each slice, its warpgroups' pairs of rows.
        auto *const base = reinterpret_cast<float2 *>(shared.ring);
        float2 *const row_scales = base + warpgroup * (tile_rows / 2) + row / 16 * 8 + row % 8;
        pairs = Sums::scaled ? p.consumers * (tile_rows / 2) : 0;
        auto *const all = reinterpret_cast<uint4 *>(base + slices * pairs) + thread;
        scales = row_scales, pieces = all + of.number_of(rank) * piece_stride;
        out = output_at<d_h, T>(p, tile, row, thread % row_threads * 2) + Sums::columns * first;

        auto &full = shared.semaphores.slice_sums_full;
        scales_sent = 0;
#pragma unroll
        for (int i = 0; i < scale_sends; ++i) {
            const int cta = thread % row_threads + i * row_threads;
            scale_at[i] = tma::remote(row_scales + rank * pairs, full, min(cta, slices - 1));
            scales_sent += cta < slices;
        }
        const uint4 *at = all + of.number * piece_stride + rank * slice_stride;
        int cta = of.cta;
        own = 0;
#pragma unroll
        for (int j = 0; j < of_tile; ++j) {
            piece_at[j] = tma::remote(at, full, cta);
            if (cta == rank) piece_at[j].data = tma::shared_address(at), own |= 1u << j;
            if (++cta == slices) cta = 0, at += piece_stride;
        }
        keep();
    }

    __device__ __forceinline__ void run(const Sums &sums) {
        cluster_sync();  // every ring has been read for the last time
        stamp(Stamp::forward_slices_met);
        if (stores) send(sums);
        stamp(Stamp::forward_slices_sent);
        kittens::wait(shared.semaphores.slice_sums_full, 0);
        stamp(Stamp::forward_slices_full);
        if (stores) add();
        stamp(Stamp::forward_item_stored);
    }

  private:
    // Keeps the compiler from computing these values behind the last product.
    __device__ __forceinline__ void keep() {
        auto pin = [](tma::Remote &x) { asm volatile("" : "+r"(x.data), "+r"(x.full)); };
#pragma unroll
        for (tma::Remote &x : piece_at) pin(x);
#pragma unroll
        for (int i = 0; i < scale_sends; ++i) pin(scale_at[i]);
        asm volatile("" : "+r"(own), "+r"(scales_sent), "+r"(slices), "+r"(slice_stride), "+r"(piece_stride), "+r"(first), "+r"(pairs));
    }
    __device__ __forceinline__ void send(const Sums &sums) const {
        if constexpr (Sums::scaled) {
#pragma unroll
            for (int i = 0; i < scale_sends; ++i)
                if (i < scales_sent) tma::store_async(scale_at[i], sums.scale());
        }
#pragma unroll
        for (int j = 0; j < of_tile; ++j) {
            if (own & 1u << j) tma::store(piece_at[j].data, sums.piece(j));
            else tma::store_async(piece_at[j], sums.piece(j));
        }
    }
    // Two pieces at a time. The sums of the next slice are loaded while those of a slice are added.
    __device__ __forceinline__ void add() {
        for (int j = first; j < of_tile; j += 2 * slices, pieces += 2 * piece_stride, out += 2 * Sums::columns * slices) {
            const bool second = j + slices < of_tile;
            const uint4 *at = pieces;
            const float2 *scale_at = scales;
            uint4 next[2] = {at[0], second ? at[piece_stride] : uint4{}};
            float2 next_scale = Sums::scaled ? *scale_at : float2{};
            float4 sum[2][quads] = {};
#pragma unroll 1
            for (int left = slices; left > 0; --left) {
                const uint4 x[2] = {next[0], next[1]};
                const float2 scale = next_scale;
                at += slice_stride, scale_at += pairs;
                if (left > 1) {
                    next[0] = at[0];
                    if (Sums::scaled) next_scale = *scale_at;
                    if (second) next[1] = at[piece_stride];
                }
                Sums::add(sum[0], x[0], scale);
                Sums::add(sum[1], x[1], scale);
            }
            store_sums(out, sum[0]);
            if (second) store_sums(out + Sums::columns * slices, sum[1]);
        }
    }
    __device__ __forceinline__ void store_sums(T *to, const float4 (&sum)[quads]) const {
#pragma unroll
        for (int i = 0; i < quads; ++i) {
            store_pair(to + 8 * i, sum[i].x, sum[i].y);
            if (both) store_pair(to + 8 * i + 8 * p.out_token, sum[i].z, sum[i].w);
        }
    }
};

}  // namespace flashmhf
