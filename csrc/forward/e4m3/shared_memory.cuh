// Shared memory of a CTA of the FP8 forward kernel.
#pragma once

#include "forward/barriers.h"
#include "forward/e4m3/policy.h"
#include "forward/items.cuh"

namespace flashmhf {

// The gate of a chunk of sub-networks for the rows of a warpgroup, and a factor for each row.
template <int d_h> struct alignas(128) Fp8GateTile {
    static constexpr int chunk = ForwardFp8Policy<d_h>::gate_chunk;
    float values[tile_rows * chunk];
    float scale[tile_rows];
    __device__ __forceinline__ float &at(unsigned row, int subnet) { return values[row * chunk + subnet]; }
};

// Of an item's head: k's, and the products of u's and v's for the sub-networks whose gates lie in the gate tile, column by column.
template <int d_h> struct Fp8Scales {
    float uv[ForwardFp8Policy<d_h>::gate_chunk];
    float k;
};

template <int d_h, typename T, bool few_rows> struct alignas(1024) ForwardFp8Shared {
    using P = ForwardFp8Policy<d_h, few_rows>;
    using Q = kittens::st<T, tile_rows, d_h, true, swizzle_bytes_of(d_h)>;
    using GateTile = Fp8GateTile<d_h>;

    // A slot: for each chunk of inter rows and each panel of d_h its rows of K, then of U; behind them V, d_h rows of 64 inter units.
    uint8_t ring[P::slots][P::slot_bytes];
    Q q[P::consumers];  // and the output on its way out
    GateTile gate[P::consumers];
    Item items[2][P::consumers];  // two: an item is finished after the next one's Q has been read
    Fp8Scales<d_h> scales[2][P::consumers];
    ForwardSemaphores<P::slots, P::consumers> semaphores;
    kittens::semaphore r_full[P::consumers], w_full, w_empty;
    // W of a head. The shared memory of a launch without a router ends here.
    alignas(16) uint8_t w[P::router_bytes > 0 ? P::router_bytes : 16];
    __device__ void *router(const ForwardParams &) { return w; }
    __device__ __forceinline__ void init_semaphores(const ForwardParams &p) {
        flashmhf::init_semaphores(*this, p);
        for (auto &full : r_full) kittens::init_semaphore(full, ForwardArrivals::r_full);
    }

    // Sums of the slices of an item lie in the ring when the consumers have read the last tile.
    static_assert((P::consumers * d_h / P::piece_columns + max_slices - 1) * tile_rows * 32 + max_slices * P::consumers * tile_rows * 4 <=
                  sizeof(ring));
};

}  // namespace flashmhf
