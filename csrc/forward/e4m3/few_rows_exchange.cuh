// The exchange of slices' sums (forward/epilogue.cuh) in the instance for few rows, where it takes a tenth of a call: the same pieces at
// the same places. What does not depend on the sums is computed ahead, under the stream of the weights. After the last product a thread
// sends its pieces at once. It adds the pieces of its CTA in a loop over the slices: unrolled, the loop takes a little longer.
#pragma once

#include "forward/e4m3/slice_sums.cuh"
#include "forward/epilogue.cuh"

namespace flashmhf {

template <int d_h, typename T, typename Shared> struct FewRowsExchange {
    using Sums = Fp8SliceSums<d_h>;
    using Piece = typename Sums::Piece;
    static constexpr int of_tile = d_h / Sums::columns, quads = Sums::columns / 8, row_threads = 4;

    Shared &shared;
    const ForwardParams &p;
    bool stores;                                     // the thread's first row holds a token
    bool both;                                       // the row 8 below holds one, too
    tma::Remote piece_at[of_tile];                   // where each piece goes; of the CTA's own pieces `data` is the address in this CTA
    uint32_t own;                                    // bit j: piece j is the CTA's own
    tma::Remote scale_at[max_slices / row_threads];  // where the scale of the thread's rows goes
    int scales_sent;                                 // by this thread: the four threads of a row divide the CTAs among them
    int slices;                                      // at most max_slices: FP8 has no bundles of heads
    int slice_stride, piece_stride;                  // between two slices' sums of a piece, and between two pieces, in 16 bytes
    int pairs;                                       // scales of a slice
    int first;                                       // the first piece that the thread adds
    const Piece *pieces;                             // slice 0's sums of that piece
    const float2 *scales;                            // slice 0's scale of the thread's rows
    T *out;                                          // the output's place of that piece

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
            kittens::tma::expect_bytes(shared.semaphores.slice_sums_full, senders * (of.count_of(rank) * (slices - 1) * int{sizeof(Piece)} +
                                                                                     slices * int{sizeof(float2)} / row_threads));
        __syncwarp();

        // Scales lie in front of the pieces: of each slice, its warpgroups' pairs of rows.
        auto *const base = reinterpret_cast<float2 *>(shared.ring);
        float2 *const row_scales = base + warpgroup * (tile_rows / 2) + row / 16 * 8 + row % 8;
        pairs = p.consumers * (tile_rows / 2);
        auto *const all = reinterpret_cast<Piece *>(base + slices * pairs) + thread;
        scales = row_scales, pieces = all + of.number_of(rank) * piece_stride;
        out = output_at<d_h, T>(p, tile, row, thread % row_threads * 2) + Sums::columns * first;

        auto &full = shared.semaphores.slice_sums_full;
        scales_sent = 0;
#pragma unroll
        for (int i = 0; i < max_slices / row_threads; ++i) {
            const int cta = thread % row_threads + i * row_threads;
            scale_at[i] = tma::remote(row_scales + rank * pairs, full, min(cta, slices - 1));
            scales_sent += cta < slices;
        }
        const Piece *at = all + of.number * piece_stride + rank * slice_stride;
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
        if (stores) send(sums);
        kittens::wait(shared.semaphores.slice_sums_full, 0);
        if (stores) add();
    }

  private:
    // Keeps the compiler from computing these values behind the last product.
    __device__ __forceinline__ void keep() {
        auto pin = [](tma::Remote &x) { asm volatile("" : "+r"(x.data), "+r"(x.full)); };
#pragma unroll
        for (tma::Remote &x : piece_at) pin(x);
#pragma unroll
        for (tma::Remote &x : scale_at) pin(x);
        asm volatile("" : "+r"(own), "+r"(scales_sent), "+r"(slices), "+r"(slice_stride), "+r"(piece_stride), "+r"(first), "+r"(pairs));
    }
    __device__ __forceinline__ void send(const Sums &sums) const {
#pragma unroll
        for (int i = 0; i < max_slices / row_threads; ++i)
            if (i < scales_sent) tma::store_async(scale_at[i], sums.scale);
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
            const Piece *at = pieces;
            const float2 *scale_at = scales;
            Piece next[2] = {at[0], second ? at[piece_stride] : Piece{}};
            float2 next_scale = *scale_at;
            float4 sum[2][quads] = {};
#pragma unroll 1
            for (int left = slices; left > 0; --left) {
                const Piece x[2] = {next[0], next[1]};
                const float2 scale = next_scale;
                at += slice_stride, scale_at += pairs;
                if (left > 1) {
                    next[0] = at[0], next_scale = *scale_at;
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
