// Adds the parts of split items in the forward kernel, at its end: a warp of the producer waits for the parts of the item that ends in this
// cluster, and the consumers add them.
#pragma once

#include "forward/epilogue.cuh"
#include "forward/f16/shared_memory.cuh"

namespace flashmhf {

// By a warp of the producer: tells the device of the parts of this CTA, when they are stored, then waits for those that its consumers add. The
// flag of a part holds the launch's nonce when the CTA of its rank has stored its rows.
template <int d_h, typename T, Division division>
__device__ __forceinline__ void signal_parts(ForwardShared<d_h, T> &shared, const ForwardParams &p) {
    constexpr bool gathers = division == Division::gathers;  // no whole items: the last part of an item stays in registers
    const ForwardSchedule &s = p.schedule;
    const int cluster = kittens::clusterIdx().x, block = gathers ? kittens::clusterIdx().y : 0, lane = kittens::laneid(),
              rank = p.row_ctas > 1 ? kittens::cluster_ctarank() : 0;
    auto flag_of = [&](int of_cluster, int part) {
        return p.parts.flags + ((of_cluster * (gathers ? s.abreast : 1) + block) * 2 + part) * p.row_ctas + rank;
    };
    if (lane == 0) {
        // The consumers' arrivals release their stores to this thread, and its own release hands them on to the device.
        Cursor<division> cursor(s, cluster);
        Work work;
        while (cursor.next(work, cluster, block, 0))
            if (work.end - (gathers ? 0 : work.begin) < s.inter_tiles) {
                wait_sleeping(shared.parts.stored[work.part], 0);
                store_release(flag_of(cluster, work.part), p.parts.nonce);
            }
    }
    __syncwarp();
    stamp(Stamp::forward_parts_signalled);
    const int index = shared.added.item;
    if (index < 0) return;
    const int first = s.first_owner(index), count = s.last_owner(index) - first + !gathers;
    if (lane < count) {
        const int part = lane == 0 ? s.part_of(first, index) : 0;  // a span behind the first begins within the item
        shared.added.part[lane] = reinterpret_cast<const float4 *>(p.parts.sums + part_offset<d_h>(p, first + lane, block, part, rank, 0));
        shared.added.count = count;
        uint64_t *const flag = flag_of(first + lane, part);
        while (load_acquire(flag) != p.parts.nonce) __nanosleep(32);
        *flag = 0;  // no other warp waits for it, and a graph launch has the same nonce again
    }
    __syncwarp();
    if (lane == 0) kittens::arrive(shared.parts.gathered);
}

// By a consumer warpgroup: adds the parts in memory, in the order of the clusters, to o. Few instructions: they run once, and come from
// memory.
template <int d_h, typename T> __device__ __forceinline__ void gather_parts(ForwardShared<d_h, T> &shared, OutputTile<d_h> &o, int wg) {
    constexpr int quads = d_h / 8;
    const int offset = wg * (tile_rows * d_h / 4) + kittens::warpgroup::laneid();
    kittens::wait(shared.parts.gathered, 0);
    stamp(Stamp::forward_parts_full);
    const int count = shared.added.count;
    float4 x[2][quads];  // two parts in flight, as many as registers hold
    auto load = [&](float4(&to)[quads], int i) {
        const float4 *from = shared.added.part[i] + offset;
#pragma unroll
        for (int j = 0; j < quads; ++j) to[j] = __ldcg(from + 128 * j);
    };
    auto add_to_o = [&](const float4(&part)[quads]) {
#pragma unroll
        for (int j = 0; j < quads; ++j) add_quad<d_h>(o, j, part[j]);
    };
    static_assert(most_gathered - 1 <= most_behind_wave && most_behind_wave <= 32);
    load(x[0], 0);
#pragma unroll 1
    for (int i = 0; i < count; i += 2) {
        if (i + 1 < count) load(x[1], i + 1);
        add_to_o(x[0]);
        if (i + 2 < count) load(x[0], i + 2);
        if (i + 1 < count) add_to_o(x[1]);
    }
    stamp(Stamp::forward_parts_added);
}

}  // namespace flashmhf
