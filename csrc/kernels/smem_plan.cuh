// Shared memory of a CTA of the forward kernel.
#pragma once

#include "kernels/barriers.h"
#include "kernels/policy.h"
#include "kittens.cuh"

namespace flashmhf {

template <int d_h, typename T> struct alignas(1024) ForwardShared {
    using P = ForwardPolicy<d_h>;
    template <int rows, int cols> using tile = kittens::st<T, rows, cols, true, P::swizzle_bytes>;
    using KU = tile<2 * tile_inter, P::q_in_registers ? d_h : d_h / 2>;  // K over U; half of d_h a slot where Q is not in registers
    using V = tile<tile_inter, d_h>;
    using Q = tile<tile_rows, d_h>;

    struct Semaphores {
        kittens::semaphore slot_full[P::slots], slot_empty[P::slots], q_full[consumers], q_empty[consumers];
    };

    // Q in registers: a slot is [K;U] of one tile, then V of the tile before it. Otherwise: half of [K;U], or V.
    uint8_t ring[P::slots][P::slot_bytes];
    Q q[consumers];
    Q staged[P::q_in_registers ? consumers : 0];
    float gate[consumers][4][P::gate_chunk][16];  // of a warp's 16 rows, sub-network by sub-network
    Semaphores semaphores;

    __device__ KU &ku(int slot) { return *reinterpret_cast<KU *>(ring[slot]); }
    __device__ V &v(int slot) { return *reinterpret_cast<V *>(ring[slot] + (P::q_in_registers ? P::ku_bytes : 0)); }
    __device__ Q &output(int warpgroup) {
        if constexpr (P::q_in_registers) return staged[warpgroup];
        else return q[warpgroup];
    }
};

}  // namespace flashmhf
