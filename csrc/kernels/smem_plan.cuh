// Shared memory of a CTA of the forward kernel.
#pragma once

#include "kernels/barriers.h"
#include "kernels/policy.h"
#include "kittens.cuh"

namespace flashmhf {

// What a consumer warpgroup is to do with the Q that arrives along with it.
struct Item {
    int begin, end;             // inner tiles; end = 0: the work is done
    int part;                   // of a split item, as in Work; -1: a whole item
    int head, sequence, token;  // of the warpgroup's first row
};

template <int d_h, typename T> struct alignas(1024) ForwardShared {
    using P = ForwardPolicy<d_h>;
    template <int rows, int cols> using tile = kittens::st<T, rows, cols, true, P::swizzle_bytes>;
    using KU = tile<2 * tile_inter, P::q_in_registers ? d_h : d_h / 2>;  // K over U; half of d_h a slot where Q is not in registers
    using V = tile<tile_inter, d_h>;
    using Q = tile<tile_rows, d_h>;

    struct Semaphores {
        kittens::semaphore slot_full[P::slots], slot_empty[P::slots], q_full[P::consumers];
    };

    // Q in registers: a slot is [K;U] of one tile, then V of the tile before it. Otherwise: half of [K;U], or V.
    uint8_t ring[P::slots][P::slot_bytes];
    Q q[P::consumers];  // and the output on its way out
    float gate[P::gate_buffers][P::consumers][4][P::gate_chunk + 1][P::gate_pitch];  // [sub-network, then the scale][row of the warp]
    Item items[2][P::consumers];  // two: an item is finished after the next one's Q has been read
    Semaphores semaphores;

    __device__ KU &ku(int slot) { return *reinterpret_cast<KU *>(ring[slot]); }
    __device__ V &v(int slot) { return *reinterpret_cast<V *>(ring[slot] + (P::q_in_registers ? P::ku_bytes : 0)); }
};

}  // namespace flashmhf
