// Adds the parts of split items in the forward kernel. Under whole items that follow (Division::waves) a warp of the producer does, which
// is otherwise idle: no consumer fences or waits for it. Where none follow (Division::gathers) the consumers do, at the end of the kernel.
// `Parts` is what both have in common: where parts lie, and the flags by which the clusters tell each other of them.
#pragma once

#include "forward/epilogue.cuh"
#include "forward/f16/shared_memory.cuh"

namespace flashmhf {

template <int d_h, Division division> struct Parts {
    static constexpr bool gathers = division == Division::gathers;  // then the last part of an item stays in registers
    // ns between two looks at a flag: what is gathered is waited for by all, the rest has the time of a whole item.
    static constexpr int pause = gathers ? 32 : 256;

    const ForwardParams &p;
    const int cluster = kittens::clusterIdx().x, block = gathers ? kittens::clusterIdx().y : 0;  // whole items have none side by side

    // Computed at each use: the producer has no register left to keep it.
    __device__ __forceinline__ int rank() const { return p.row_ctas > 1 ? kittens::cluster_ctarank() : 0; }
    // Holds the launch's nonce when the CTA of this rank has stored its rows of a part.
    __device__ __forceinline__ uint64_t *flag(int of_cluster, int part) const {
        return p.flags + ((of_cluster * (gathers ? p.schedule.abreast : 1) + block) * 2 + part) * p.row_ctas + rank();
    }
    // By one lane: tells the device of the parts of this CTA that are added from memory, when they are stored; how many. The consumers'
    // arrivals release their stores to this thread, and its own release hands them on.
    __device__ __forceinline__ int signal(kittens::semaphore (&stored)[2]) const {
        const ForwardSchedule &s = p.schedule;
        Cursor<division> cursor(s, cluster);
        Work work;
        int signalled = 0;
        while (cursor.next(work, cluster, block, 0) && (gathers || work.item >= s.waves * s.clusters))
            if (work.end - (gathers ? 0 : work.begin) < s.inter_tiles) {
                if constexpr (gathers) kittens::wait(stored[work.part], 0);
                else wait_sleeping(stored[work.part], 0);
                store_release(flag(cluster, work.part), p.nonce);
                ++signalled;
            }
        stamp(Stamp::forward_parts_signalled);
        return signalled;
    }
    // By a warp, a lane for each of `count` parts of an item from cluster `first` on: waits for the part, and returns where it lies.
    __device__ __forceinline__ const float *receive(int index, int first, int count) const {
        const int lane = kittens::laneid();
        if (lane >= count) return nullptr;
        const int part = lane == 0 ? p.schedule.part_of(first, index) : 0;  // a span behind the first begins within the item
        const float *const data = p.partials + part_offset<d_h>(p, first + lane, block, part, rank(), 0);
        uint64_t *const set = flag(first + lane, part);
        while (load_acquire(set) != p.nonce) __nanosleep(pause);
        *set = 0;  // no other warp waits for it, and a graph launch has the same nonce again
        return data;
    }
};

// By a warp of the producer: signals the parts of this CTA, then adds the item that ends in its cluster: the rows of this CTA, in the order
// of the clusters. Sums of 8 columns of a row tile are in registers at a time, of which the producer has few. The parts come through a
// ring: 12 KB can be on their way without registers, at a steady rate. A burst of loads would clog the path that all warps use.
template <int d_h, typename T> __device__ __forceinline__ void add_parts(ForwardShared<d_h, T> &shared, const ForwardParams &p) {
    using P = ForwardPolicy<d_h>;
    const ForwardSchedule &s = p.schedule;
    const Parts<d_h, Division::waves> all{p};
    const int cluster = all.cluster, lane = kittens::laneid();

    if (lane == 0) {
        const int signalled = all.signal(shared.parts.stored);
        if (p.router_bytes) wait_sleeping(shared.w_empty, signalled & 1);  // the whole item's W has been read from where the pieces will be
    }
    __syncwarp();
    const int index = s.ends_item(cluster);
    if (index < 0) return;
    const int first = s.first_owner(index), parts = cluster - first + 1, item = s.waves * s.clusters + index;  // 2 to most_parts parts

    // A lane for each part, which sends its pieces, one row tile behind the other. Rows that hold no token were not stored, and are added up
    // like the others, but not written.
    const float *src = all.receive(index, first, parts);
    tma::fence_global();
    __syncwarp();
    stamp(Stamp::forward_parts_full);
    int sender = 0;
    auto send = [&](int slot) {
        if (lane == sender) {
            kittens::tma::expect_bytes(shared.parts.piece_full[slot], P::piece_bytes);
            kittens::tma::load_async(shared.pieces[slot], const_cast<float *>(src), P::piece_bytes, shared.parts.piece_full[slot]);
            src += P::piece_bytes / sizeof(float);
        }
        if (++sender == parts) sender = 0;
    };
    static_assert(P::piece_slots <= 2 * d_h / 8);  // two parts of one row tile fill the ring
#pragma unroll 1
    for (int slot = 0; slot < P::piece_slots; ++slot) send(slot);

    constexpr int columns = d_h / 8;  // pieces of a row tile
    Ring<P::piece_slots> ring;
    T *out = nullptr;  // rows 0, 8, ... of 64 from the lane's first one on, and how many of 64 hold a token from there on
    int rows = 0;
#pragma unroll 1
    for (int piece = 0; piece < p.consumers * columns; ++piece, out += 8) {
        if (piece % columns == 0) {
            const RowTile tile(p, item, all.rank(), piece / columns);
            out = output_at<d_h, T>(p, tile, fragment_row(lane), lane % 4 * 2);
            const int64_t tokens = tile.sequence < p.batch ? p.length - tile.token : 0;
            rows = static_cast<int>(min(tokens, int64_t{tile_rows})) - fragment_row(lane);
        }
        float4 sums[4] = {};  // of threads lane, 32 + lane, ... of the warpgroup
        int left = parts;
        do {
            wait_sleeping(shared.parts.piece_full[ring.slot], ring.phase);
#pragma unroll
            for (int k = 0; k < 4; ++k) add(sums[k], shared.pieces[ring.slot][32 * k + lane]);
            __syncwarp();
            if ((p.consumers * columns - piece - 1) * parts + left > P::piece_slots) send(ring.slot);  // more than are in the ring
            ring.advance();
        } while (--left > 0);
        T *dst = out;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (rows > 16 * k) store_pair(dst, sums[k].x, sums[k].y);
            dst += 8 * p.out_token;
            if (rows > 16 * k + 8) store_pair(dst, sums[k].z, sums[k].w);
            dst += 8 * p.out_token;
        }
    }
    stamp(Stamp::forward_parts_added);
}

// By a warp of the producer: signals the parts of this CTA that other clusters gather, then waits for those that its consumers gather.
template <int d_h, typename T> __device__ __forceinline__ void signal_parts(ForwardShared<d_h, T> &shared, const ForwardParams &p) {
    const ForwardSchedule &s = p.schedule;
    const Parts<d_h, Division::gathers> all{p};
    const int cluster = all.cluster, lane = kittens::laneid();
    if (lane == 0) all.signal(shared.parts.stored);
    __syncwarp();
    const int index = s.ends_item(cluster);
    if (index < 0) return;
    const int first = s.first_owner(index), others = cluster - first;
    const float *part = all.receive(index, first, others);
    if (lane < others) {
        shared.gathered.of_cluster[lane] = reinterpret_cast<const float4 *>(part);
        shared.gathered.count = others;
    }
    __syncwarp();
    if (lane == 0) kittens::arrive(shared.parts.piece_full[0]);
}

// By a consumer warpgroup: adds the parts of the other clusters, in their order, to the part of this cluster in o. Few instructions: they
// run once, and come from memory.
template <int d_h, typename T> __device__ __forceinline__ void gather_parts(ForwardShared<d_h, T> &shared, OutputTile<d_h> &o, int wg) {
    constexpr int quads = d_h / 8;
    const int offset = wg * (tile_rows * d_h / 4) + kittens::warpgroup::laneid();
    kittens::wait(shared.parts.piece_full[0], 0);
    stamp(Stamp::forward_parts_full);
    const GatheredParts &parts = shared.gathered;
    float4 x[2][quads];  // two parts in flight, as many as registers hold
    auto load = [&](int i) {
        const float4 *from = parts.of_cluster[i] + offset;
#pragma unroll
        for (int j = 0; j < quads; ++j) x[i % 2][j] = __ldcg(from + 128 * j);
    };
    auto add_part = [&](int i) {
#pragma unroll
        for (int j = 0; j < quads; ++j) add_quad<d_h>(o, j, x[i % 2][j]);
    };
    static_assert(most_gathered <= 4);
    load(0);
    if (parts.count > 1) load(1);
    add_part(0);
    if (parts.count > 2) load(2);
    if (parts.count > 1) add_part(1);
    if (parts.count > 2) add_part(2);
    stamp(Stamp::forward_parts_added);
}

}  // namespace flashmhf
