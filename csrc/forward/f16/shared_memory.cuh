// Shared memory of a CTA of the forward kernel in 16 bits.
#pragma once

#include "forward/barriers.h"
#include "forward/f16/policy.h"
#include "forward/items.cuh"

namespace flashmhf {

// What a cluster adds: the item of the rest, or -1, and its parts in memory, in the order of the clusters: those of the same rank and its
// first warpgroup.
struct AddedParts {
    int item, count;
    const float4 *part[most_behind_wave];
};

// The gate of a chunk of sub-networks, for the rows of a warpgroup. Chunks of 32 are swizzled as TMA swizzles rows of 128 bytes: neither
// a row nor a column of eight rows meets a bank twice.
template <int d_h> struct alignas(ForwardPolicy<d_h>::gate_alignment) GateTile {
    static constexpr int chunk = ForwardPolicy<d_h>::gate_chunk;
    float values[tile_rows * chunk];
    float scale[tile_rows];  // of a row

    __device__ __forceinline__ float &at(unsigned row, int subnet) {
        return values[row * chunk + (chunk == 32 ? subnet ^ row % 8 * 4 : subnet)];
    }
};

template <int d_h, typename T> struct alignas(1024) ForwardShared {
    using P = ForwardPolicy<d_h>;
    template <int rows, int cols> using tile = kittens::st<T, rows, cols, true, P::swizzle_bytes>;
    using KU = tile<2 * tile_inter, P::q_in_registers ? d_h : d_h / 2>;  // K over U; half of d_h a slot where Q is not in registers
    using V = tile<tile_inter, d_h>;
    using Q = tile<tile_rows, d_h>;

    struct PartSemaphores {
        kittens::semaphore stored[2], gathered;
    };

    // Q in registers: a slot is [K;U] of one tile, then V of the tile before it. Otherwise: half of [K;U], or V.
    uint8_t ring[P::slots][P::slot_bytes];
    Q q[P::consumers];  // and the output on its way out
    GateTile<d_h> gate[P::gate_buffers][P::consumers];
    Item items[2][P::consumers];  // two: an item is finished after the next one's Q has been read
    ForwardSemaphores<P::slots, P::consumers> semaphores;
    PartSemaphores parts;
    kittens::semaphore w_full, w_empty;
    AddedParts added;
    // W of a head. The shared memory of a launch without a router ends here.
    alignas(16) uint8_t w[P::router_bytes > 0 ? P::router_bytes : 16];

    // Sums of the slices of an item lie in the ring when the consumers have read the last tile.
    static_assert(!P::may_slice || (P::consumers * d_h / P::piece_columns + large_slices - 1) * tile_rows * 32 <= sizeof(ring));
    // By one thread, before all others begin.
    __device__ __forceinline__ void init_semaphores(const ForwardParams &p) {
        flashmhf::init_semaphores(*this, p);
        for (auto &stored : parts.stored) kittens::init_semaphore(stored, ForwardArrivals::part_stored(p.consumers));
        kittens::init_semaphore(parts.gathered, ForwardArrivals::part_gathered);
        added.item =
            p.schedule.adds_parts ? p.schedule.adds_item(kittens::clusterIdx().x) : -1;  // the row loaders have no registers for it
    }
    // Cached router W. When CTAs of a cluster divide one item, it aliases the gate tiles that nobody uses then.
    __device__ void *router(const ForwardParams &p) {
        return p.schedule.slices > 1 ? static_cast<void *>(gate[0] + p.consumers) : static_cast<void *>(w);
    }
    __device__ KU &ku(int slot) { return *reinterpret_cast<KU *>(ring[slot]); }
    __device__ V &v(int slot) { return *reinterpret_cast<V *>(ring[slot] + (P::q_in_registers ? P::ku_bytes : 0)); }
};

}  // namespace flashmhf
