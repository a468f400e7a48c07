// Shared memory of a CTA of the inter-stationary kernels.
#pragma once

#include "backward/inter_barriers.h"
#include "backward/policy.h"
#include "common/geometry.h"
#include "kittens.cuh"

namespace flashmhf {

template <int d_h, int outputs, typename T> struct alignas(1024) InterShared {
    using P = InterPolicy<d_h, outputs>;
    template <int rows> using tile = kittens::st<T, rows, d_h, true, swizzle_bytes_of(d_h)>;  // as the tensor maps say
    template <int cols> using inter_tile = kittens::st<T, tile_rows, cols, true, 128>;        // 64 tokens
    using KU = tile<2 * tile_inter>;                                                          // K over U
    using Rows = tile<tile_rows>;
    using V = tile<tile_inter>;
    using Grads = inter_tile<2 * tile_inter>;  // dM beside dN
    using Gated = inter_tile<tile_inter>;      // P

    KU ku;
    V v[P::needs_v];
    Rows q[P::q_stages], grad_out[P::g_stages];
    Grads grads[P::keys ? P::grad_buffers : 0];
    Gated gated[P::values ? P::grad_buffers : 0];
    float staged[P::query ? tile_rows * d_h : 0];  // dQ in fragment order
    float r[P::q_stages][tile_rows];
    float4 dr[P::query ? P::grad_buffers : 0][tile_rows];  // a row's sums over the columns of four threads
    kittens::semaphore weights_full, q_full[P::q_stages], q_empty[P::q_stages], g_full[P::g_stages], g_empty[P::g_stages],
        grads_full[P::grad_buffers][P::most_readers], grads_empty[P::grad_buffers], staged_full[P::staged_slices],
        staged_empty[P::fused_s_warpgroups][P::staged_slices];
};

}  // namespace flashmhf
