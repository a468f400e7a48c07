// W role of the inter-stationary kernels: dK, dU and dV of the CTA's 64 inter rows in registers, over all its tiles.
#pragma once

#include "backward/inter_cta.cuh"
#include "backward/rows.cuh"
#include "common/trace.cuh"

namespace flashmhf {

// acc += a^T b, the columns of b spread over the accumulators; behind the caller's mma_fence.
template <int halves, typename Acc, typename A, typename B>
__device__ __forceinline__ void add_product(Acc (&acc)[halves], const A &a, B &b) {
#pragma unroll
    for (int c = 0; c < halves; ++c) {
        auto &columns = b.template subtile<Acc::cols>(c);
        kittens::warpgroup::mma_AtB<Acc, A, std::remove_reference_t<decltype(columns)>, 0, 1>(acc[c], a, columns);
    }
}

// W role: accumulates weight gradients over all tiles. Where the role has two warpgroups, w_warpgroup 0 takes dK and 1 takes dU.
template <typename Shared>
__device__ __forceinline__ void accumulate_weight_grads(Shared &shared, const BackwardParams &p, const InterWork &work, int reader,
                                                        int w_warpgroup) {
    using namespace kittens;
    using P = typename Shared::P;
    using T = typename Shared::Rows::T;
    using Acc = rt_fl<16, P::w_columns>;
    constexpr int d_h = Shared::Rows::cols, halves = d_h / P::w_columns;
    constexpr bool keys = P::keys, ups = P::keys && P::w_warpgroups == 1, values = P::values;
    Acc dk[halves], du[halves], dv[halves];
#pragma unroll
    for (int c = 0; c < halves; ++c) dk[c] = 0.f, du[c] = 0.f, dv[c] = 0.f;
    Ring<P::q_stages> q;
    Ring<P::g_stages> g;
    Ring<P::grad_buffers> buffer;
    const bool leader = kittens::laneid() == 0;
#pragma unroll 1
    for (int it = work.begin; it < work.end; ++it) {
        if constexpr (keys) wait(shared.q_full[q.slot], q.phase);
        if constexpr (values) wait(shared.g_full[g.slot], g.phase);
        wait(shared.grads_full[buffer.slot][reader], buffer.phase);
        stamp(Stamp::w_operands_full, it - work.begin);
        warpgroup::mma_fence();
        // issue dK += dM^T Q, dU += dN^T Q, dV += P^T dO
        if constexpr (keys) add_product(dk, shared.grads[buffer.slot].template subtile<tile_inter>(w_warpgroup), shared.q[q.slot]);
        if constexpr (ups) add_product(du, shared.grads[buffer.slot].template subtile<tile_inter>(1), shared.q[q.slot]);
        if constexpr (values) add_product(dv, shared.gated[buffer.slot], shared.grad_out[g.slot]);
        // wait for dK and dU; hand back Q (all but dV, which is still in the tensor cores)
        if constexpr (keys) {
            warpgroup::mma_async_wait<values * halves>();
            if (leader) work.release(shared.q_empty[q.slot]);
        }
        // wait for dV; hand back dO, P and [dM|dN]
        warpgroup::mma_async_wait<0>();
        stamp(Stamp::w_products_done, it - work.begin);
        if (leader) {
            if constexpr (values) work.release(shared.g_empty[g.slot]);
            arrive(shared.grads_empty[buffer.slot]);
        }
        q.advance();
        g.advance();
        buffer.advance();
    }
    warpgroup::mma_async_wait<0>();
    // Every tile has been consumed: the rings become staging, once all W warpgroups are here.
    if constexpr (P::w_warpgroups > 1)
        kittens::arrive_and_wait(kittens::barrier<warpgroup_warps * P::w_warpgroups>(w_staging_barrier + P::w_warpgroups));
    constexpr int size = tile_inter * d_h, staged = tile_inter * P::w_columns;
    static_assert(P::w_warpgroups * staged * sizeof(float) <= sizeof(shared.q) + sizeof(shared.grad_out));
    float *staging = reinterpret_cast<float *>(&shared.q[0]) + w_warpgroup * staged;
    auto finish = [&](Acc(&acc)[halves], void *out, int which) {
#pragma unroll
        for (int c = 0; c < halves; ++c) {
            pin(acc[c]);
            if (work.split) {
                float *slot =
                    p.weight_parts + ((static_cast<int64_t>(work.item - p.whole) * p.parts + work.part) * 3 + which) * size + c * staged;
                each_fragment(acc[c],
                              [&](int j, float4 v) { __stcg(reinterpret_cast<float4 *>(slot) + 128 * j + warpgroup::laneid(), v); });
            } else {
                const int64_t first_row = static_cast<int64_t>(work.head * p.subnets + work.subnet) * p.subnet_dim + work.row;
                T *at = static_cast<T *>(out) + first_row * d_h + c * P::w_columns;
                store_rows<T>(acc[c], staging, at, d_h, p.subnet_dim - work.row, w_staging_barrier + w_warpgroup);
            }
        }
    };
    if constexpr (keys) finish(dk, w_warpgroup ? p.du : p.dk, w_warpgroup);
    if constexpr (ups) finish(du, p.du, 1);
    if constexpr (values) finish(dv, p.dv, 2);
}

}  // namespace flashmhf
