// The producer of the FP8 forward kernel: one thread streams tiles of K, U and V through the ring. One warp for each consumer warpgroup,
// or for two, loads the Q, the scales and the gate of an item, and stores the outputs.
#pragma once

#include "forward/e4m3/shared_memory.cuh"
#include "forward/producer.cuh"

namespace flashmhf {

// The copies of tile `tile` of a sub-network: copy(byte of the slot, map, where from). Of a pair of CTAs each has half the rows.
template <typename P, int d_h, bool pair, typename Copy>
__device__ __forceinline__ void each_copy(const ForwardMaps &maps, int tile, int subnet, Copy &&copy) {
    const int rank = pair ? kittens::cluster_ctarank() : 0;
#pragma unroll
    for (int i = 0; i < tile_inter / P::box_rows / (pair ? 2 : 1); ++i) {
        const int row = (pair ? rank : i) * P::box_rows;
#pragma unroll
        for (int panel = 0; panel < P::ku_panels; ++panel) {
            const int at = row / P::chunk_inter * P::ku_chunk_bytes + panel * P::ku_panel_bytes + row % P::chunk_inter * P::ku_panel;
            const int3 from{panel * P::ku_panel, tile * tile_inter + row, subnet};
            copy(at, maps.k, from);
            copy(at + P::chunk_inter * P::ku_panel, maps.u, from);
        }
    }
    copy(P::ku_bytes + rank * (P::v_bytes / 2), maps.v, int3{tile * tile_inter, rank * (d_h / 2), subnet});
}

// Prefetches to the L2 the first tiles of a CTA's slice: a hint, right even while the kernel before this one writes them. By one thread.
template <typename P, int d_h> __device__ __forceinline__ void prefetch_weights_fp8(const ForwardMaps &maps, const ForwardFp8Params &p) {
    Work work;
    if (!first_work<WorkCursor>(p, work)) return;
    TileWalk at(p, work);
#pragma unroll 1
    for (int left = min(work.end - work.begin, P::prefetched_tiles); left > 0; --left, at.advance(p))
        each_copy<P, d_h, false>(maps, at.tile, at.subnet,
                                 [](int, const CUtensorMap *map, int3 from) { tma::prefetch_tile(map, from, tma::Evict::first); });
}

// By one thread. Of a pair of CTAs each fetches half the rows of K, U and V, and multicasts them.
template <int d_h, typename T, bool few_rows, bool multicast>
__device__ __forceinline__ void load_weights_fp8(ForwardFp8Shared<d_h, T, few_rows> &shared, const ForwardMaps &maps,
                                                 const ForwardFp8Params &p) {
    using P = ForwardFp8Policy<d_h, few_rows>;
    constexpr uint16_t ctas = 3;
    constexpr auto evict = few_rows ? tma::Evict::first : tma::Evict::normal;  // elsewhere later waves read a tile again
    auto &sem = shared.semaphores;
    Ring<P::slots> ring;

    WorkCursor cursor(p.schedule, kittens::clusterIdx().x);
    Work work;
    while (next_work(cursor, work)) {
        TileWalk walk(p, work);
#pragma unroll 1  // the producer has few registers
        for (int left = work.end - work.begin; left > 0; --left) {
            wait_sleeping(sem.slot_empty[ring.slot], ring.phase);
            kittens::tma::expect_bytes(sem.slot_full[ring.slot], P::slot_bytes);
            each_copy<P, d_h, multicast>(maps, walk.tile, walk.subnet, [&](int at, const CUtensorMap *map, int3 from) {
                void *dst = shared.ring[ring.slot] + at;
                if constexpr (multicast) tma::multicast_async(dst, map, from, sem.slot_full[ring.slot], ctas);
                else tma::load_async(dst, map, from, sem.slot_full[ring.slot], evict);
            });
            ring.advance();
            stamp(Stamp::forward_tile_sent, work.end - work.begin - left);
            walk.advance(p);
        }
    }
    stamp(Stamp::forward_weights_sent);
    kittens::pdl::arrive();  // not earlier: with few tokens these tiles would evict from the L2 what the next kernel prefetches
}

// For some consumer warpgroups, by one warp: loads Q, scales and gate of their items, stores their outputs.
template <typename Format, Division division> struct RowsOfItemsFp8 : RowLoader<Format, division> {
    static constexpr int lag = 2;
    using P = typename Format::Policy;

    // Without this prefetch the scales of few tokens come a microsecond after Q, behind the tiles that fill the ring.
    __device__ __forceinline__ void before_predecessor(int warpgroup) {
        __syncwarp();
        auto &p = this->p;
        const Item &item = this->shared.items[0][warpgroup];
        const int lane = kittens::laneid(), e = subnet_of_lane(item), at = first_scale(item);
        if (lane < P::gate_chunk && e >= 0 && e < p.subnets) prefetch_line(p.u_scales + (at + e)), prefetch_line(p.v_scales + (at + e));
        if (lane == P::gate_chunk) prefetch_line(p.k_scales + at);
    }
    __device__ __forceinline__ void fetch_q(int warpgroup) {
        auto &shared = this->shared;
        const Item &item = shared.items[this->count % 2][warpgroup];
        auto &full = shared.semaphores.q_full[warpgroup];
        if (this->leader) {
            kittens::tma::expect_bytes(full, P::row_tile_bytes);
            this->load_q(warpgroup, item, full);
        }
        load_scales(item, shared.scales[this->count % 2][warpgroup]);
        __syncwarp();
        if (this->leader) kittens::arrive(full);
    }
    __device__ __forceinline__ void behind_q(int warpgroup) {
        auto &shared = this->shared;
        auto &p = this->p;
        if (!p.gate.tiles) return;
        const Item &item = shared.items[this->count % 2][warpgroup];
        auto &r_full = shared.r_full[warpgroup];
        if (this->count > 0) kittens::arrive_and_wait(r_read_barrier(warpgroup));
        if (!this->leader) return;
        kittens::tma::expect_bytes(r_full, tile_rows * P::gate_chunk * 4);
        tma::load_async(shared.gate[warpgroup].values, this->maps.r,
                        int3{item.head * p.subnets + item.subnet - item.gate_column, item.token, item.sequence}, r_full);
    }
    __device__ __forceinline__ void behind_items(int warpgroup) {
        if (this->p.gate.tiles) kittens::arrive_and_wait(r_read_barrier(warpgroup));
    }

  private:
    __device__ __forceinline__ int first_scale(const Item &item) const { return item.head / this->p.bundles * this->p.subnets; }
    __device__ __forceinline__ static int subnet_of_lane(const Item &item) { return item.subnet - item.gate_column + kittens::laneid(); }
    template <typename Scales> __device__ __forceinline__ void load_scales(const Item &item, Scales &scales) const {
        auto &p = this->p;
        const int lane = kittens::laneid(), e = subnet_of_lane(item), at = first_scale(item);
        if (lane < P::gate_chunk)
            scales.uv[lane] =
                e >= 0 && e < p.subnets ? load_behind_wait(p.u_scales + (at + e)) * load_behind_wait(p.v_scales + (at + e)) : 0.f;
        if (lane == P::gate_chunk) scales.k = load_behind_wait(p.k_scales + at);
    }
};

}  // namespace flashmhf
