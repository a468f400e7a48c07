// Definitions for launch.h; included by the instances only.
#pragma once

#include <algorithm>

#include "backward/collect.cuh"
#include "backward/gate_grad.cuh"
#include "backward/gate_rows.cuh"
#include "backward/inter_kernel.cuh"
#include "backward/launch.h"
#include "backward/token_kernel.cuh"
#include "common/launch_kernel.cuh"

namespace flashmhf {
namespace {

template <int d_h, int outputs, typename T> cudaError_t launch_inter(const HeadGroupLaunch &l, bool early, cudaStream_t stream) {
    using P = InterPolicy<d_h, outputs>;
    const bool pairs = P::pairs && l.plan.may_pair;
    if (cudaError_t error = allow_shared_memory(flashmhf_backward_inter<d_h, outputs, T>, P::shared_memory)) return error;
    return launch_clusters(pairs ? 2 : 1, early, flashmhf_backward_inter<d_h, outputs, T>, dim3(l.plan.inter_blocks()), P::threads,
                           P::shared_memory, stream, l.group_maps, l.group_params);
}

template <int d_h, typename T> cudaError_t collect(int tiles, int outputs, const CollectParams &c, cudaStream_t stream) {
    return launch_kernel(true, flashmhf_backward_collect<d_h, T>, dim3(tiles, d_h / collect_columns<d_h>, outputs), row_tile_threads, 0,
                         stream, c);
}

// dQ tiles, numbered head by head, to [T, H, d_h].
template <int d_h, typename T> cudaError_t collect_query(const BackwardParams &p, const float *tiles, int parts, cudaStream_t stream) {
    const CollectParams c{.tiles = tiles,
                          .parts = parts,
                          .part_stride = tile_rows * d_h,
                          .band_tiles = p.row_tiles,
                          .band_rows = p.length,
                          .inner_bands = p.batch,
                          .outer_step = 1,
                          .inner_step = p.dense.batch * p.dq_heads,
                          .row_step = p.dense.token * p.dq_heads,
                          .out = {p.dq}};
    return collect<d_h, T>(p.heads * p.batch * p.row_tiles, 1, c, stream);
}

// Parts of the split items to the weight gradients.
template <int d_h, typename T> cudaError_t collect_weights(const HeadGroupLaunch &l, cudaStream_t stream) {
    const BackwardParams &p = l.params;
    const int split = l.plan.items - l.plan.whole;
    if (split == 0) return cudaSuccess;
    const CollectParams c{.tiles = p.weight_parts,
                          .parts = p.parts,
                          .part_stride = 3 * tile_inter * d_h,
                          .first_tile = l.plan.whole,
                          .band_tiles = p.subnet_tiles,
                          .band_rows = p.subnet_dim,
                          .inner_bands = 1,
                          .outer_step = p.subnet_dim,
                          .row_step = 1,
                          .out = {p.dk, p.du, p.dv},
                          .out_step = tile_inter * d_h};
    return collect<d_h, T>(split, 3, c, stream);
}

// dq from the fp32 tiles of dQ, and dW of the router where there is one; dR is complete.
template <int d_h, typename T> cudaError_t finish_query(const HeadGroupLaunch &l, const float *tiles, int parts, cudaStream_t stream) {
    if (!l.router.w) return l.params.dq && tiles ? collect_query<d_h, T>(l.params, tiles, parts, stream) : cudaSuccess;
    RouterParams g = l.router;
    g.query_tiles = tiles;
    g.query_parts = parts;
    const int chunks = g.dw ? ceil_div(g.subnets, gate_dw_columns<d_h>) : 1;
    if (cudaError_t error = launch_kernel(true, flashmhf_gate_grad<d_h, T>, dim3(g.dw_part_count, g.heads, chunks), row_tile_threads,
                                          sizeof(GateGradShared<d_h, T>), stream, g))
        return error;
    if (!g.dw) return cudaSuccess;
    const int64_t count = static_cast<int64_t>(g.heads) * d_h * g.subnets;
    return launch_kernel(true, flashmhf_gate_sum<T>, dim3(ceil_div(count, element_threads)), element_threads, 0, stream, g, count);
}

template <int d_h, typename T> cudaError_t launch_typed(const HeadGroupLaunch &l, cudaStream_t stream) {
    const BackwardParams &p = l.params;
    if (l.router.w) {
        const dim3 grid(std::min(l.plan.gate_rows_parts, p.batch * p.row_tiles), p.heads);
        if (cudaError_t error = launch_kernel(false, flashmhf_gate_rows<d_h, T>, grid, row_tile_threads, 0, stream, l.router)) return error;
    }
    if constexpr (d_h <= widest_fused) {
        if (l.kernels != Kernels::pair) {
            // dr_sums and the counters of ordered accumulation, if any, lie behind query_sums; with a router gate_rows has cleared them
            if (!l.router.w)
                if (cudaError_t error = cudaMemsetAsync(p.query_sums, 0, l.sums_bytes, stream)) return error;
            if (cudaError_t error = launch_inter<d_h, all_grads, T>(l, false, stream)) return error;
            if (p.dr_sums && p.dr)
                if (cudaError_t error =
                        launch_kernel(true, flashmhf_backward_dr<T>, dim3(p.batch * p.row_tiles, p.heads), element_threads, 0, stream, p))
                    return error;
            if (cudaError_t error = finish_query<d_h, T>(l, p.query_sums, 1, stream)) return error;
            return collect_weights<d_h, T>(l, stream);
        }
    }
    if (l.needs_tokens) {
        if (cudaError_t error = launch_kernel(false, flashmhf_backward_token<d_h, T>, dim3(l.plan.token_blocks, p.heads, p.token_parts),
                                              TokenPolicy<d_h>::threads, TokenPolicy<d_h>::shared_memory, stream, l.maps, p))
            return error;
        if (cudaError_t error = finish_query<d_h, T>(l, p.query_parts, p.token_parts, stream)) return error;
    }
    if (!l.needs_weights) return cudaSuccess;
    if constexpr (d_h <= widest_fused) {
        if (cudaError_t error = launch_inter<d_h, weight_grads, T>(l, l.needs_tokens, stream)) return error;
    } else {
        if (cudaError_t error = launch_inter<d_h, key_grads, T>(l, l.needs_tokens, stream)) return error;
        if (cudaError_t error = launch_inter<d_h, value_grad, T>(l, true, stream)) return error;
    }
    return collect_weights<d_h, T>(l, stream);
}

}  // namespace

template <int d_h> cudaError_t launch_backward(const HeadGroupLaunch &launch, cudaStream_t stream) {
    return launch.bf16 ? launch_typed<d_h, kittens::bf16>(launch, stream) : launch_typed<d_h, kittens::half>(launch, stream);
}

}  // namespace flashmhf
