// What the warps of the producer that load rows do in every format: the records of items, W, the outputs.
#pragma once

#include "forward/barriers.h"
#include "forward/items.cuh"
#include "forward/router.cuh"

namespace flashmhf {

template <typename Format, Division division> struct RowLoader {
    using Shared = typename Format::Shared;
    using Params = typename Format::Params;
    static constexpr bool adds_behind_waves = division == Division::waves && Format::has_instance(Division::gathers);

    Shared &shared;
    const ForwardMaps maps;
    const Params &p;
    const bool leader = kittens::laneid() == 0;
    Cursor<division> cursor;
    const bool stages;  // this thread brings W
    int count = 0;      // items so far

    // first: this warp has the first warpgroup.
    __device__ __forceinline__ RowLoader(Shared &shared, const ForwardMaps &maps, const Params &p, bool first)
        : shared(shared),
          maps(maps),
          p(p),
          cursor(p.schedule, kittens::clusterIdx().x),
          stages(Format::stages_router && p.gate.router_bytes > 0 && leader && first) {}

    // Whether the current item is one whose parts are added behind the whole item. The cursor is then one wave too far.
    __device__ __forceinline__ bool is_added() const {
        if constexpr (adds_behind_waves) return cursor.wave > p.schedule.waves;
        return false;
    }
    // Behind the whole item: the one that this cluster adds, without tiles.
    __device__ __forceinline__ bool next_added(Work &work) {
        if constexpr (adds_behind_waves) {
            const ForwardSchedule &s = p.schedule;
            if (shared.added.item < 0 || is_added()) return false;
            work = {s.waves * s.clusters + shared.added.item, s.inter_tiles, s.inter_tiles, 0};
            ++cursor.wave;
            return true;
        }
        return false;
    }
    // W of the head of the current item: one for all consumers.
    __device__ __forceinline__ void load_router() {
        auto &w_full = shared.w_full;
        kittens::tma::expect_bytes(w_full, p.gate.router_bytes);
        const void *w = router_of<Format::d_h, typename Format::T>(p, shared.items[count % 2][0].head);
        kittens::tma::load_async(shared.router(p), const_cast<void *>(w), p.gate.router_bytes, w_full);
    }
    // The record of the next item, for each warpgroup of this warp. False: there is none.
    template <typename Each> __device__ __forceinline__ bool next_item(Each &&each) {
        Work work;
        if constexpr (adds_behind_waves) {
            const bool more = !is_added() && next_work(cursor, work);
            if (!more && !next_added(work)) return false;
        } else if (!next_work(cursor, work)) return false;
        each([&](int warpgroup) {
            const RowTile rows(p, work.item, p.row_ctas > 1 ? kittens::cluster_ctarank() : 0, warpgroup);
            int part = p.schedule.slices == 1 && work.end - work.begin == p.schedule.inter_tiles ? whole_item : work.part;
            if (division == Division::gathers && work.begin > 0 && work.end == p.schedule.inter_tiles) part = gathered_item;
            if constexpr (adds_behind_waves)
                if (is_added()) part = gathered_item;
            const int subnet = work.begin / p.subnet_tiles, column = p.gate.tiles ? (rows.head * p.subnets + subnet) % 4 : 0;
            if (leader)
                shared.items[count % 2][warpgroup] = Item{work.begin, work.end, part, subnet, column, rows.head, rows.sequence, rows.token};
        });
        return true;
    }
    // Issues the copies of Q, by the leader.
    __device__ __forceinline__ void load_q(int warpgroup, const Item &item, kittens::semaphore &full) {
        constexpr int panel_cols = panel_cols_of(Format::d_h);
#pragma unroll
        for (int c = 0; c < Format::d_h; c += panel_cols)
            tma::load_async(&shared.q[warpgroup].data[c * tile_rows], maps.q, int4{c, item.head, item.token, item.sequence}, full);
    }
    // Waits until the consumers have read Q. From item `index` on the buffer then holds an output: stores it.
    __device__ __forceinline__ void take_over(int warpgroup, int index) {
        kittens::arrive_and_wait(q_read_barrier(warpgroup));
        if (index < 0 || !leader) return;
        const Item &done = shared.items[index % 2][warpgroup];
        if (done.part >= 0) return;
        store_output(shared.q[warpgroup], maps.out, done);
        kittens::tma::store_async_read_wait<0>();
    }
    // Tells a warpgroup that there are no more items.
    __device__ __forceinline__ void end_items(int warpgroup) {
        if (!leader) return;
        shared.items[count % 2][warpgroup].begin = shared.items[count % 2][warpgroup].end = 0;
        kittens::arrive(shared.semaphores.q_full[warpgroup], ForwardArrivals::q_full);
    }
};

// Brings the rows of all items of a CTA, and stores their outputs. By one warp; each(body): body(warpgroup) for the warpgroups that it serves.
// Rows: the format's RowLoader, with what it brings before the kernel before has ended, Q and what comes with it, what comes behind, and what
// it waits for at the end.
template <typename Rows, typename Each> __device__ __forceinline__ void load_items(Rows &rows, Each &&each) {
    bool more = rows.next_item(each);
    if (more) each([&](int warpgroup) { rows.before_predecessor(warpgroup); });
    wait_for_cluster_and_predecessor(rows.p);
    if (rows.stages && more) rows.load_router();
    while (more) {
        __syncwarp();
        each([&](int warpgroup) { rows.fetch_q(warpgroup); });
        if (rows.stages && rows.count > 0 && !rows.is_added()) {
            wait_sleeping(rows.shared.w_empty, (rows.count - 1) & 1);
            rows.load_router();
        }
        each([&](int warpgroup) { rows.behind_q(warpgroup); });
        ++rows.count;
        each([&](int warpgroup) { rows.take_over(warpgroup, rows.count - Rows::lag); });
        more = rows.next_item(each);
    }
    each([&](int warpgroup) { rows.end_items(warpgroup); });
    if (Rows::lag == 2 && rows.count > 0)
        each([&](int warpgroup) {
            rows.behind_items(warpgroup);
            rows.take_over(warpgroup, rows.count - 1);
        });
    if (rows.leader) kittens::tma::store_async_read_wait<0>();  // the memory outlives the copy; the end of the kernel publishes it
}

}  // namespace flashmhf
