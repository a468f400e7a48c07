// Tile sizes and the shared-memory and register budgets of the backward kernels. Pure C++: the host code reads it too. The kernels assert
// that the shared memory is the size of their structs.
#pragma once

#include "common/geometry.h"
#include "common/head_dims.h"

namespace flashmhf {

// Sub-networks that the router's kernels hold in registers at once, and of those the ones whose dW a CTA accumulates: 128 registers of it.
constexpr int gate_chunk_columns = 32;
template <int d_h> constexpr int gate_dw_columns = d_h > 128 ? 16 : 32;
// Columns of dQ that the router's kernel has in shared memory at once; two CTAs of it share an SM.
template <int d_h> constexpr int gate_staged_columns = d_h > 128 ? 64 : d_h;
// Columns of an fp32 tile that are staged at once on their way to rows.
template <int d_h> constexpr int collect_columns = d_h % 64 == 0 ? 64 : 96;

// Threads of the kernels without warpgroup roles: a warpgroup, which holds a tile of 64 rows in fragment order; and of those that go
// through elements.
constexpr int row_tile_threads = 128, element_threads = 256;

// Shared memory is a struct that begins at a multiple of the alignment, as the widest swizzle needs, and has a multiple of it for its size.
constexpr int shared_memory_alignment = 1024, semaphore_bytes = 256;
constexpr int round_up(int x, int multiple) { return ceil_div(x, multiple) * multiple; }

// Up to this d_h one kernel can compute all gradients; above, dK and dU, and dV, are apart.
constexpr int widest_fused = 128;
// What an inter-stationary kernel produces.
enum BackwardOutputs : int {
    query_grad = 1,  // dQ (fp32 sums in global memory) and dR
    key_grads = 2,   // dK, dU
    value_grad = 4,  // dV
    weight_grads = key_grads | value_grad,
    all_grads = query_grad | weight_grads,
};

struct Silu;  // common/activation.cuh

// Inter-stationary kernel: a CTA owns 64 inter rows of one sub-network and walks over tokens in tiles of 64.
template <int d_h, int outputs> struct InterPolicy {
    static_assert(BackwardHeadDims::contains(d_h));
    using Activation = Silu;
    static constexpr int panel_cols = panel_cols_of(d_h);
    static constexpr bool query = outputs & query_grad, keys = outputs & key_grads, values = outputs & value_grad;
    static_assert(d_h <= widest_fused || !query, "K, U, V and dQ do not fit one kernel");
    static_assert(d_h <= widest_fused || keys != values, "the accumulators do not fit one kernel");
    static constexpr bool needs_v = keys;  // dA = dO V^T enters dM and dN only
    static constexpr bool pairs = query;   // the others gain nothing from clusters of two

    // Warpgroups: loader; "S", scores, elementwise part and, in the fused kernel, where they are two, dQ; one or two "W", weight gradients.
    static constexpr int w_warpgroups = d_h > 128 && keys ? 2 : 1;
    static constexpr int fused_s_warpgroups = 2, s_warpgroups = query ? fused_s_warpgroups : 1;
    static constexpr int warpgroups = 1 + s_warpgroups + w_warpgroups;
    static constexpr int threads = 128 * warpgroups;
    static constexpr int launch_registers = launch_registers_of(threads);
    static constexpr int loader_registers = 24;
    static constexpr int s_registers = query ? (d_h == 128 ? 128 : d_h == 96 ? 152 : 168) : warpgroups == 4 ? 160 : 240;
    static constexpr int w_registers = query ? (d_h == 128 ? 224 : d_h == 96 ? 176 : 144) : warpgroups == 4 ? 160 : 240;
    static_assert(loader_registers + s_warpgroups * s_registers + w_warpgroups * w_registers <= warpgroups * launch_registers);
    // 16-column blocks of [dM|dN] that S reads back from shared memory for dQ: its registers do not hold all of them beside M, N and dA.
    static constexpr int reloaded_blocks = d_h == 128 ? 1 : 0;
    static constexpr int staged_slices = d_h == 128 ? 2 : 1;  // of a dQ tile: one is on its way to memory while the next is computed
    // Columns of one product: an m64n256 needs more registers than there are at launch.
    static constexpr int w_columns = w_warpgroups == 2 ? d_h / 2 : d_h;
    // Fused: where registers allow it, the special functions start under the product dA; elsewhere they always do.
    static constexpr bool early_slopes = d_h < 128;

    static constexpr int q_stages = d_h > 128 ? 2 : d_h == 128 ? 3 : 4;
    static constexpr int g_stages = d_h > 128 ? (values ? 2 : 1) : q_stages;
    // Of P and of [dM|dN] of a tile: S fills one while W reads the other.
    static constexpr int grad_buffers = 2;
    static_assert(grad_buffers == 2, "S hands over the other buffer than the one it fills, and finds two empty at the start");
    static_assert(staged_slices <= 2, "the dQ warp hands back the staging in one or two slices");
    static_assert(q_stages >= 2 && g_stages >= 1 + values, "a role holds a tile while it waits for the next one");
    static constexpr int grad_readers = query + w_warpgroups, most_readers = 2;  // roles that read them: dR 0, if any, then W
    static_assert(grad_readers <= most_readers);

    static constexpr int row_tile_bytes = tile_rows * d_h * element_bytes, grad_tile_bytes = tile_rows * tile_inter * element_bytes;
    static constexpr int weight_bytes = (2 + needs_v) * row_tile_bytes;
    static constexpr int ring_bytes = (q_stages + g_stages) * row_tile_bytes;
    static constexpr int grad_bytes = grad_buffers * (2 * keys + values) * grad_tile_bytes;
    static constexpr int staged_bytes = query * tile_rows * d_h * 4;
    static constexpr int row_bytes = q_stages * tile_rows * 4 + query * grad_buffers * tile_rows * 16;  // R; sums of dR
    static constexpr int shared_memory =
        round_up(weight_bytes + ring_bytes + grad_bytes + staged_bytes + row_bytes + semaphore_bytes, shared_memory_alignment);
    static_assert(shared_memory <= shared_memory_limit, "does not fit the shared memory of an SM");
};

// Token-stationary kernel for dQ and dR: a CTA owns a tile of 64 tokens of one head for each consumer, and streams K, U, V.
constexpr int token_consumers = 2;
static_assert(token_consumers == 2, "the consumers of the token-stationary kernel let each other issue in turn");
template <int d_h> struct TokenPolicy {
    using Activation = Silu;
    static constexpr int panel_cols = panel_cols_of(d_h);
    static constexpr int consumers = token_consumers;
    static constexpr int inter = d_h > 128 ? 32 : 64;  // inter rows of a tile: dQ, [M|N], dA and their 16-bit copies in 240 registers
    static constexpr int stages = d_h > 128 ? 2 : d_h == 128 ? 3 : 4;
    static_assert(stages >= 2, "a consumer holds a stage while it waits for the next one");
    static constexpr int threads = 128 * (1 + consumers);
    static constexpr int launch_registers = launch_registers_of(threads);
    static constexpr int loader_registers = 24, consumer_registers = 240;
    static_assert(loader_registers + consumers * consumer_registers <= (1 + consumers) * launch_registers);
    static constexpr int row_tile_bytes = tile_rows * d_h * element_bytes;
    static constexpr int shared_memory =
        round_up(2 * consumers * row_tile_bytes + stages * 3 * inter * d_h * element_bytes + semaphore_bytes, shared_memory_alignment);
    static_assert(shared_memory <= shared_memory_limit, "does not fit the shared memory of an SM");
};

}  // namespace flashmhf
