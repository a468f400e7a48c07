// A consumer warpgroup's position in the ring of weights and in its items, whatever the weights' format.
#pragma once

#include "forward/barriers.h"
#include "forward/items.cuh"

namespace flashmhf {

// Shared: has the kernel's semaphores, items and Q.
template <typename Shared, typename Params, int slots> struct ItemStream {
    using warpgroup = kittens::warpgroup;

    Shared &shared;
    const Params &p;
    const int wg, warp = warpgroup::warpid(), lane = kittens::laneid();
    // The CTA whose slot_empty this thread arrives on when its warpgroup has read a slot; -1: none.
    const int reader_of = lane != 0 || warp >= p.row_ctas ? -1 : p.row_ctas > 1 ? warp : kittens::cluster_ctarank();
    Ring<slots> ring;
    uint32_t q_phase = 0;
    int tiles = 0, items = 0;  // for the stamps

    __device__ __forceinline__ void wait_slot() {
        kittens::wait(shared.semaphores.slot_full[ring.slot], ring.phase);
        stamp(Stamp::forward_tile_full, tiles++);
    }
    // One thread of the warpgroup for every CTA that gets the tile. wgmma.wait_group has covered the reads of the slot.
    __device__ __forceinline__ void release(int slot) {
        if (reader_of >= 0) tma::arrive_remote(shared.semaphores.slot_empty[slot], reader_of);
    }
    // At the start the consumers own the ring. Release only slot 0 until the first Q arrives; otherwise weight copies queue ahead of Q.
    // With slices (few tokens) the memory is the bound: release `early_slots`.
    __device__ __forceinline__ void release_ring(int from, int to) {
#pragma unroll 1
        for (int slot = from; slot < to; ++slot) release(slot);
    }
    __device__ __forceinline__ const Item &first_item(int early_slots) {
        const int early = p.schedule.slices > 1 ? early_slots : 1;
        release_ring(0, early);
        const Item &item = next_item();
        release_ring(early, slots);
        return item;
    }
    // Waits for the next item with its Q and gate or scales, and makes it the current item.
    __device__ __forceinline__ const Item &next_item() {
        kittens::wait(shared.semaphores.q_full[wg], q_phase);
        stamp(Stamp::forward_q_full, items++);
        q_phase ^= 1;
        return this_item();
    }
    __device__ __forceinline__ const Item &this_item() { return shared.items[q_phase ^ 1][wg]; }
    __device__ __forceinline__ const Item &last_item() { return shared.items[q_phase][wg]; }
    // Fragment k of Q, d_h columns 16k.., of the warp's rows, from shared memory.
    template <typename T2> __device__ __forceinline__ void read_q(int k, T2 (&fragment)[4]) {
        using Q = std::remove_reference_t<decltype(shared.q[0])>;
        const uint32_t base = tma::shared_address(shared.q[wg].data);
        const uint32_t at = Q::idx(base, int2{16 * warp + lane % 16, 16 * k + lane / 16 * 8});
        kittens::move<T2>::ldsm4(fragment[0], fragment[1], fragment[2], fragment[3], at);
    }
    // Q has been read. Its buffer is empty, or holds an output for the producer to store.
    __device__ __forceinline__ void release_q() { kittens::arrive(q_read_barrier(wg)); }
};

}  // namespace flashmhf
