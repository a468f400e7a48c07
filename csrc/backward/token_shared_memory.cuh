// Shared memory and barriers of a CTA of the token-stationary kernel.
//
//   semaphore    arrives                              waits
//   rows_full    the loader's expect_bytes; copies    consumers, once
//   stage_full   the loader's expect_bytes; copies    consumers, before the products of a stage
//   stage_empty  the consumers' warps                 the loader, before it refills the stage
#pragma once

#include "backward/policy.h"
#include "common/barriers.h"
#include "common/geometry.h"
#include "kittens.cuh"

namespace flashmhf {

template <int d_h, typename T> struct alignas(1024) TokenShared {
    using P = TokenPolicy<d_h>;
    template <int rows> using tile = kittens::st<T, rows, d_h, true, swizzle_bytes_of(d_h)>;
    using Rows = tile<tile_rows>;
    struct Stage {
        tile<2 * P::inter> ku;
        tile<P::inter> v;
    };
    struct {
        Rows q, grad_out;  // in the end the staging of dQ
    } rows[P::consumers];
    Stage stages[P::stages];
    kittens::semaphore rows_full, stage_full[P::stages], stage_empty[P::stages];
};

// Named barriers; 0 is __syncthreads.
enum TokenBarrier : int {
    // A consumer's staging of dQ is free, or full: its own warps. One for each consumer.
    output_barrier = 1,
    // The other consumer has issued its products: that one arrives, this one arrives and waits. One for each consumer.
    products_issued_by_other = output_barrier + token_consumers,
};

}  // namespace flashmhf
